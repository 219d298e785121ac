"""The program of a process that calls a reward function. Arguments: FILE_OR_MODULE NAME.

One JSON list per line. A request is [number, arguments, texts, seed], its answer [number, result of `call_function`].
The
first answer has no request: it is [LOAD_CALL, the function's `Signature`], or [LOAD_CALL, why it cannot be used]. What
user code prints goes to stderr.

Standard library only, so that the process starts quickly.
"""

import asyncio
import os
import random
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from json import dumps, loads
from typing import Any, BinaryIO

from minirl.errors import InputError
from minirl.files.user_code import find_functions
from minirl.rewards.calls import LOAD_CALL, call_function, raised_message, signature_of, validate_rewards

Send = Callable[[int, Any], None]


def main() -> None:
    """Load the function, then answer calls until the trainer has gone."""
    source, name = sys.argv[1:]
    _die_with_trainer()
    requests, send = _take_pipes()
    _seed_generators(0)
    try:
        (function,) = find_functions(source, name)
        signature = signature_of(function)
    except BaseException as error:
        send(LOAD_CALL, str(error) if isinstance(error, InputError) else raised_message(error))
        return
    send(LOAD_CALL, signature)
    if signature.is_async:
        asyncio.run(_serve_concurrently(function, requests, send))
    for line in requests:
        number, arguments, texts, seed = loads(line)
        _seed_generators(seed)
        send(number, call_function(function, arguments, texts))


async def _serve_concurrently(function: Callable[..., Any], requests: BinaryIO, send: Send) -> None:
    """Answer the calls of an `async def`; each begins as soon as it is requested."""

    async def answer_one(number: int, arguments: Mapping[str, Any], texts: Sequence[str], _: int) -> None:
        try:
            answer = validate_rewards(await function(**arguments), texts)
        except BaseException as error:
            answer = raised_message(error)
        send(number, answer)

    loop = asyncio.get_running_loop()
    # The reader has its own thread: user code may use up those of the loop.
    with ThreadPoolExecutor(1) as reader:
        async with asyncio.TaskGroup() as calls:
            while line := await loop.run_in_executor(reader, requests.readline):
                calls.create_task(answer_one(*loads(line)))


def _die_with_trainer() -> None:
    """Fork a process that kills this one, and all that user code starts, when the trainer has gone, however it ended.

    Stdin tells: only the trainer holds the other end of the pipe. A thread could not tell while user code holds the
    interpreter's lock. It is not a child of this process, since user code may wait for all of its children.
    """
    child_pid = os.fork()
    if child_pid != 0:
        os.waitpid(child_pid, 0)
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

    def send(number: int, answer: Any) -> None:
        answers.write(dumps([number, answer]).encode() + b"\n")
        answers.flush()

    return requests, send


def _seed_generators(seed: int) -> None:
    """Seed the global random generators that are loaded."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
