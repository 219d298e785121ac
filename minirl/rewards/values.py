"""Check the values of a reward function. Standard library only: workers check them, too."""

import contextlib
from collections.abc import Mapping, Sequence, Set
from math import isfinite, nan
from typing import Any

from minirl.files.user_code import shown

# The largest magnitude of a reward. Losses and gradients grow with it, and fp32 must hold their squares (up to 3e38).
MAX_REWARD = 1e12

# A reward or None for each completion; an error if the call failed.
Answer = list[float | None] | str


def validate_rewards(values: Any, texts: Sequence[str]) -> Answer:
    """Return the values as floats and Nones, one per completion, or an error that names the first wrong one.

    None means that the reward does not apply to the completion. A value is a number of up to MAX_REWARD: bool, int,
    float, Decimal, or a 0-d array or tensor. Tuples, arrays and tensors count as lists; texts, mappings and sets do
    not. texts: the beginnings of the completions.
    """
    # 0-d arrays and tensors have a `__len__` too; it raises.
    has_length = hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0
    if not has_length or isinstance(values, str | bytes | Mapping | Set):
        return f"returned {shown(values)}; expected a list of {len(texts)} numbers"
    if len(values) != len(texts):
        return f"returned {len(values)} values for {len(texts)} completions"
    rewards: list[float | None] = []
    for value, text in zip(values, texts, strict=True):
        reward = validate_number(value)
        if isinstance(reward, str):
            return f"completion {shown(text)}: {reward}"
        rewards.append(reward)
    return rewards


def validate_number(value: Any) -> float | str | None:
    """Return `value` as a float, None as it is, or an error string that begins with "returned"."""
    if value is None:
        return None
    number = nan
    is_text = isinstance(value, str | bytes | bytearray | memoryview)
    is_array = getattr(value, "ndim", 0) != 0
    if not is_text and not is_array:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not isfinite(number):
        return f"returned {shown(value)}; expected a finite number"
    if abs(number) > MAX_REWARD:
        return f"returned {shown(value)}; expected at most {MAX_REWARD:g}, the loss would overflow"
    return number
