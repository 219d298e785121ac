"""Entry point of a worker process that calls a reward function. Arguments: FILE_OR_MODULE NAME.

The protocol is one JSON list per line. A request is [call id, arguments, texts, seed]; its answer is
[call id, result of `call_function`]. The first answer has no request and is [LOAD_CALL, the function's `Signature`] or
[LOAD_CALL, an error message]. User code's output goes to stderr.

Imports only the standard library, so that the process starts quickly.
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
    """Load the function, then answer calls until the trainer exits."""
    source, name = sys.argv[1:]
    _start_watchdog()
    requests, send = _redirect_stdio()
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
        call_id, arguments, texts, seed = loads(line)
        _seed_generators(seed)
        send(call_id, call_function(function, arguments, texts))


async def _serve_concurrently(function: Callable[..., Any], requests: BinaryIO, send: Send) -> None:
    """Answer calls to an `async def` concurrently; start each call as soon as its request arrives."""

    async def answer_one(call_id: int, arguments: Mapping[str, Any], texts: Sequence[str], _: int) -> None:
        try:
            answer = validate_rewards(await function(**arguments), texts)
        except BaseException as error:
            answer = raised_message(error)
        send(call_id, answer)

    loop = asyncio.get_running_loop()
    # The reader needs its own thread, because user code may occupy all threads of the loop's executor.
    with ThreadPoolExecutor(1) as reader:
        async with asyncio.TaskGroup() as calls:
            while line := await loop.run_in_executor(reader, requests.readline):
                calls.create_task(answer_one(*loads(line)))


def _start_watchdog() -> None:
    """Fork a watchdog that kills this process, and everything that user code started, when the trainer exits.

    The watchdog polls stdin, because only the trainer holds the other end of that pipe. A thread would be blocked while
    user code holds the GIL. A double fork detaches the watchdog, because user code may wait for all child processes.
    """
    child_pid = os.fork()
    if child_pid != 0:
        os.waitpid(child_pid, 0)
        return
    if os.fork() == 0:
        os.closerange(1, 3)  # then the trainer sees end-of-file when the worker exits
        poller = select.poll()
        poller.register(0, 0)
        poller.poll()
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _redirect_stdio() -> tuple[BinaryIO, Send]:
    """Return the request stream and a function that sends answers. User code gets /dev/null and stderr instead."""
    request_stream = os.fdopen(os.dup(0), "rb", 1 << 20)
    answer_pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def send(call_id: int, answer: Any) -> None:
        answer_pipe.write(dumps([call_id, answer]).encode() + b"\n")
        answer_pipe.flush()

    return request_stream, send


def _seed_generators(seed: int) -> None:
    """Seed the global random generators of Python and, if they are imported, of NumPy and PyTorch."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
