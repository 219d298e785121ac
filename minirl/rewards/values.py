"""Check the values of a reward function. Standard library only: workers check them, too."""

from collections.abc import Mapping, Set
from math import isfinite, nan
from typing import Any

from minirl.files.user_code import shown

# The largest magnitude of a reward. Losses and gradients grow with it, and fp32 must hold their squares (up to 3e38).
MAX_REWARD = 1e12

# A reward, None or an error for each completion; a single error if the whole call failed.
Answers = list[float | str | None] | str


def validate_rewards(values: Any, count: int) -> Answers:
    """Check that `values` is a list of `count` entries, each a number of up to MAX_REWARD or None.

    None means that the reward does not apply to the completion. Returns floats and Nones, with an error string
    for each invalid one; a single error string if `values` is not a list or has another length. Numbers
    are bool, int, float, Decimal, and 0-d arrays and tensors. Tuples, arrays and tensors count as lists; texts,
    mappings and sets do not. The error strings begin with "returned".
    """
    # 0-d arrays and tensors have a `__len__` too; it raises.
    has_length = hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0
    if not has_length or isinstance(values, str | bytes | Mapping | Set):
        return f"returned {shown(values)}; expected a list of {count} numbers"
    if len(values) != count:
        return f"returned {len(values)} values for {count} completions"
    return [validate_number(value) for value in values]


def validate_number(value: Any) -> float | str | None:
    """Return `value` as a float, None as it is, or an error string."""
    if value is None:
        return None
    number = nan
    is_text = isinstance(value, str | bytes | bytearray | memoryview)
    is_array = getattr(value, "ndim", 0) != 0
    if not is_text and not is_array:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = nan
    if not isfinite(number):
        return f"returned {shown(value)}; expected a finite number"
    if abs(number) > MAX_REWARD:
        return f"returned {shown(value)}; expected at most {MAX_REWARD:g}, the loss would overflow"
    return number
