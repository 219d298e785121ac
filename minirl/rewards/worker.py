"""The program of a process that calls a reward function. Arguments: FILE_OR_MODULE NAME.

One JSON object a line. The first answer describes the function, {"parameters", "is_async"}, or tells why it cannot be
used, {"error"}. A request is {"number", "arguments", "texts", "seed"}, its answer {"number", "answer"}: the result of
`validate_rewards`, or a text that says what the function raised. What user code prints goes to stderr.

Standard library only, so that the process starts quickly.
"""

import asyncio
import inspect
import os
import random
import select
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from json import dumps, loads
from typing import Any, BinaryIO, NamedTuple

from minirl.errors import InputError
from minirl.files.user_code import find_functions, users_traceback
from minirl.rewards.values import Answer, validate_rewards

LOADING = 0  # the number of the first answer

Send = Callable[[dict[str, Any]], None]


class Parameters(NamedTuple):
    """The names of a function's parameters, of those without a default, and whether it takes `**kwargs`."""

    names: list[str]
    required: list[str]
    takes_all: bool


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a reward function; `RewardWorkers` have those of theirs."""
    if hasattr(function, "reward_parameters"):
        return Parameters(*function.reward_parameters)
    parameters = inspect.signature(function).parameters.values()
    variadic = [one.kind for one in parameters if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    required = [one.name for one in parameters if one.default is one.empty and one.kind not in variadic]
    names = [one.name for one in parameters]
    return Parameters(names, required, inspect.Parameter.VAR_KEYWORD in variadic)


def main() -> None:
    """Load the function, then answer calls until the trainer has gone."""
    source, name = sys.argv[1:]
    _end_with_trainer()
    requests, send = _take_pipes()
    _seed(0)
    try:
        (function,) = find_functions(source, name)
        parameters = parameters_of(function)
    except BaseException as error:
        reason = str(error) if isinstance(error, InputError) else _raised(error)
        send({"number": LOADING, "error": reason})
        return
    is_async = inspect.iscoroutinefunction(function)
    send({"number": LOADING, "parameters": parameters, "is_async": is_async})
    if is_async:
        asyncio.run(_answer_together(function, requests, send))
    for line in requests:
        request = loads(line)
        _seed(request["seed"])
        send({"number": request["number"], "answer": _answer(function, request)})


def _answer(function: Callable[..., Any], request: Mapping[str, Any]) -> Answer:
    """Call a function that does not wait. It may run its own event loop, or use `signal.alarm`."""
    try:
        return validate_rewards(call_reward(function, request["arguments"]), request["texts"])
    except BaseException as error:  # also SystemExit and KeyboardInterrupt
        return _raised(error)


async def _answer_together(function: Callable[..., Any], requests: BinaryIO, send: Send) -> None:
    """Answer the calls of an `async def`; each begins as soon as it is requested."""

    async def answer_one(request: Mapping[str, Any]) -> None:
        try:
            values = await function(**request["arguments"])
            answer = validate_rewards(values, request["texts"])
        except BaseException as error:
            answer = _raised(error)
        send({"number": request["number"], "answer": answer})

    loop = asyncio.get_running_loop()
    # The reader has its own thread: user code may use up those of the loop.
    with ThreadPoolExecutor(1) as reader:
        async with asyncio.TaskGroup() as calls:
            while line := await loop.run_in_executor(reader, requests.readline):
                calls.create_task(answer_one(loads(line)))


def call_reward(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a reward function and wait for its result if it is an `async def`."""
    values = function(**arguments)
    return asyncio.run(values) if inspect.iscoroutine(values) else values


def _end_with_trainer() -> None:
    """Fork a process that kills this one, and all that user code starts, when the trainer has gone, however it ended.

    Stdin tells: only the trainer holds the other end of the pipe. A thread could not tell while user code holds the
    interpreter's lock. It is not a child of this process, since user code may wait for all of its children.
    """
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        return
    if os.fork() == 0:
        os.closerange(1, 3)  # the trainer must see the end of the answers when this process ends
        hangup = select.poll()
        hangup.register(0, 0)
        hangup.poll()
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _take_pipes() -> tuple[BinaryIO, Send]:
    """Return the requests, and the function that sends an answer. User code gets /dev/null and stderr instead."""
    requests = os.fdopen(os.dup(0), "rb", 1 << 20)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def send(answer: dict[str, Any]) -> None:
        answers.write(dumps(answer).encode() + b"\n")
        answers.flush()

    return requests, send


def _seed(seed: int) -> None:
    """Seed the global random generators that are loaded."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _raised(error: BaseException) -> str:
    return f"raised\n{users_traceback(error)}"
