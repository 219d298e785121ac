"""Call a reward function and validate its return values, in the trainer or in a worker process.

Imports only the standard library, so that worker processes start quickly.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from math import isfinite, nan
from typing import Any, NamedTuple

from minirl.data.task import EPISODE_ARGUMENTS
from minirl.files.user_code import short_repr, users_traceback

# Maximum absolute reward. Losses and gradients scale with the reward, and their squares must not overflow fp32 (3e38).
MAX_REWARD = 1e12
# Call id of a worker's first answer, which carries the function's signature.
LOAD_CALL = 0

# One reward per completion; None where the reward does not apply.
Rewards = list[float | None]
# The rewards that a call returned, or the call's error message.
CallResult = Rewards | str


class Signature(NamedTuple):
    """The signature of a reward function.

    parameters: names of all named parameters. required: names of parameters without a default. has_kwargs: whether
    the function takes `**kwargs`. is_async: whether the function is an `async def`.
    """

    parameters: list[str]
    required: list[str]
    has_kwargs: bool
    is_async: bool

    def takes(self, argument: str) -> bool:
        """Whether the function accepts an argument by name or, unless it is an episode argument, through `**kwargs`."""
        return argument in self.parameters or (self.has_kwargs and argument not in EPISODE_ARGUMENTS)


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the signature of a reward function."""
    parameters = inspect.signature(function).parameters.values()
    named_parameters = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Signature(
        parameters=[p.name for p in named_parameters],
        required=[p.name for p in named_parameters if p.default is p.empty],
        has_kwargs=any(p.kind is p.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(function),
    )


def call_function(
    function: Callable[..., Any], arguments: Mapping[str, Any], texts: Sequence[str]
) -> CallResult:
    """Call a function, which may be an `async def`; return its rewards, or an error message.

    A plain function may run its own event loop. texts: see `validate_rewards`.
    """
    try:
        rewards = function(**arguments)
        if inspect.iscoroutine(rewards):
            rewards = asyncio.run(rewards)
        return validate_rewards(rewards, texts)
    except BaseException as error:  # includes SystemExit and KeyboardInterrupt
        return raised_message(error)


def raised_message(error: BaseException) -> str:
    """Return the error message for a call that raised."""
    return f"raised\n{users_traceback(error)}"


def validate_rewards(values: Any, texts: Sequence[str]) -> CallResult:
    """Return one float or None per completion, or an error message naming the first invalid value.

    None means that the reward does not apply. A value may be a bool, int, float, Decimal, 0-d array or 0-d tensor
    with a magnitude of at most MAX_REWARD. Tuples, arrays and tensors count as lists; strings, mappings and sets do
    not. texts: the completions, possibly shortened.
    """
    # 0-d arrays and tensors also have `__len__`, but calling it raises TypeError.
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
    """Return `value` as a float (None stays None), or an error message that begins with "returned"."""
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
        return f"returned {short_repr(value)}; a magnitude above {MAX_REWARD:g} could overflow the loss"
    return number
