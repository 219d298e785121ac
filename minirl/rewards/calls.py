"""Call a reward function and check its values, in the trainer or in a worker process.

Standard library only, so that a worker process starts quickly.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from math import isfinite, nan
from typing import Any, NamedTuple

from minirl.data.task import EPISODE_ARGUMENTS
from minirl.files.user_code import short_repr, users_traceback

# The largest magnitude of a reward. Losses and gradients grow with it, and fp32 must hold their squares (up to 3e38).
MAX_REWARD = 1e12
# The number of a worker's first answer, the function's signature.
LOAD_CALL = 0

# A reward for each completion; None where the function does not apply.
Rewards = list[float | None]
# The rewards of a call; an error if it failed.
CallResult = Rewards | str


class Signature(NamedTuple):
    """What a reward function takes: its parameters, those without a default, and whether it has `**kwargs`.

    is_async: whether it is an `async def`.
    """

    parameters: list[str]
    required: list[str]
    has_kwargs: bool
    is_async: bool

    def takes(self, argument: str) -> bool:
        """Whether the function gets an argument: one that it names, or, by `**kwargs`, a column of the data."""
        return argument in self.parameters or (self.has_kwargs and argument not in EPISODE_ARGUMENTS)


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the signature of a reward function."""
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return Signature(
        parameters=[one.name for one in named],
        required=[one.name for one in named if one.default is one.empty],
        has_kwargs=any(one.kind is one.VAR_KEYWORD for one in parameters),
        is_async=inspect.iscoroutinefunction(function),
    )


def call_function(
    function: Callable[..., Any], arguments: Mapping[str, Any], texts: Sequence[str]
) -> CallResult:
    """Call a function, perhaps an `async def`, and return its rewards, or an error: what it raised or returned.

    It may run its own event loop. texts: see `validate_rewards`.
    """
    try:
        values = function(**arguments)
        if inspect.iscoroutine(values):
            values = asyncio.run(values)
        return validate_rewards(values, texts)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt
        return raised_message(error)


def raised_message(error: BaseException) -> str:
    """Return the error of a call that raised."""
    return f"raised\n{users_traceback(error)}"


def validate_rewards(values: Any, texts: Sequence[str]) -> CallResult:
    """Return the values as floats and Nones, one per completion, or an error that names the first wrong one.

    None means that the reward does not apply to the completion. A value is a number of up to MAX_REWARD: bool, int,
    float, Decimal, or a 0-d array or tensor. Tuples, arrays and tensors count as lists; texts, mappings and sets do
    not. texts: the completions, or their beginnings.
    """
    # 0-d arrays and tensors have a `__len__` too; it raises.
    has_length = hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0
    if not has_length or isinstance(values, str | bytes | Mapping | Set):
        return f"returned {short_repr(values)}; expected a list of {len(texts)} numbers"
    if len(values) != len(texts):
        return f"returned {len(values)} values for {len(texts)} completions"
    rewards: Rewards = []
    for value, text in zip(values, texts, strict=True):
        reward = validate_number(value)
        if isinstance(reward, str):
            return f"completion {short_repr(text)}: {reward}"
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
        return f"returned {short_repr(value)}; expected a finite number"
    if abs(number) > MAX_REWARD:
        return f"returned {short_repr(value)}; expected at most {MAX_REWARD:g}, the loss would overflow"
    return number
