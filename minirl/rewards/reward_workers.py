"""A reward function of a file, called in its own processes: a call may hang, die or print megabytes."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from minirl.errors import InputError, RewardError, escaped
from minirl.files.json_files import json_text
from minirl.files.user_code import MAX_REPR, source_and_name
from minirl.ranks.process_group import rank
from minirl.rewards.calls import LOAD_CALL, Rewards, Signature
from minirl.rewards.functions import MAX_CONCURRENT_CALLS, PromptGroup, Reward

PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from minirl.rewards.worker import main; main()"
LOAD_TIMEOUT_S = 60.0  # for the imports of the user's file, besides the time of a call
MAX_ANSWER_BYTES = 1 << 26  # bytes
NO_ANSWER = (
    "its process sent something other than an answer; does its code write to files that it did not open?"
)


class WorkerReward(Reward):
    """A reward function whose calls run in processes; its file is not loaded in this one.

    A process takes one call at a time, or up to MAX_CONCURRENT_CALLS of an `async def`. One thread here waits for all
    of them. What rank 0's calls print goes to its stderr.
    After a process was lost, all later calls fail with the same error. Nothing here is collective.
    """

    def __init__(self, spec: str, *, timeout_s: float = 60.0, num_workers: int = 1):
        """Start the processes and wait until they have loaded the function, "file.py:name" or "module:name".

        timeout_s: limit of one call. Raises InputError if the function is missing or its file cannot be loaded.
        """
        source, name = source_and_name("--reward", spec)
        self._timeout_s = timeout_s
        self._lost_error: RewardError | None = None
        self._processes: list[_Process] = []
        self._free: asyncio.Queue[_Process] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        # A daemon: no call delays the end of this process. The others end when it has closed their pipes.
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"reward {spec}", daemon=True)
        self._thread.start()
        try:
            self._in_loop(self._start(source, name, num_workers)).result()
        except (_WorkerError, OSError) as error:
            self.stop()
            raise InputError(f"--reward {spec}: {escaped(str(error))}") from None

    def submit(self, name: str, group: PromptGroup) -> Future[Any]:
        """Begin to reward a group, once a process is free."""
        beginnings = [text[:MAX_REPR] for text in group.texts]
        request = group.select_arguments(self.signature), beginnings, group.seed
        return self._in_loop(self._call(name, group, request))

    def stop(self) -> None:
        """Kill the processes and all that their code started."""
        for process in self._processes:
            self._in_loop(process.end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _start(self, source: str, name: str, num_workers: int) -> None:
        """Start all processes, and learn the function's signature. Raises _WorkerError and OSError."""
        for _ in range(num_workers):
            self._processes.append(_Process(await _start_process(source, name)))
        limit_s = LOAD_TIMEOUT_S + self._timeout_s
        answers = await asyncio.gather(*(process.answer(LOAD_CALL, limit_s) for process in self._processes))
        for answer in answers:
            if isinstance(answer, str):
                raise _WorkerError(answer)
        self.signature = Signature(*answers[0])
        for process in self._processes * (MAX_CONCURRENT_CALLS if self.signature.is_async else 1):
            self._free.put_nowait(process)

    async def _call(self, name: str, group: PromptGroup, request: Sequence[Any]) -> Rewards:
        """Return the rewards of a group. Raises RewardError."""
        process = await self._free.get()
        try:
            if self._lost_error:
                raise self._lost_error
            answer = await process.call(request, self._timeout_s)
        except _WorkerError as error:
            # Other calls in this process fail now, too: the first error names the cause.
            if self._lost_error is None:
                others = (
                    f", beside {len(process.pending_calls)} other calls in its process"
                    if process.pending_calls
                    else ""
                )
                text = f"reward {name} for the row at {group.row.origin}{others}: {error}"
                self._lost_error = RewardError(escaped(text))
            raise self._lost_error from None
        finally:
            self._free.put_nowait(process)
        return group.rewards_or_raise(name, answer)


class _WorkerError(RuntimeError):
    """A process could not load the function, died, was killed or sent nonsense."""


class _Process:
    """A process (`worker`). Its methods run in the thread of the loop.

    pending_calls: its in-flight calls, by number.
    """

    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests, self._answers = process.stdin, process.stdout
        self._numbers = itertools.count(LOAD_CALL + 1)
        self.pending_calls = {LOAD_CALL: asyncio.get_running_loop().create_future()}
        self._listen_task = asyncio.create_task(self._listen())

    async def call(self, request: Sequence[Any], timeout_s: float) -> Any:
        """Send a request (arguments, texts, seed); returns its answer. Raises _WorkerError."""
        number = next(self._numbers)
        self.pending_calls[number] = asyncio.get_running_loop().create_future()
        self._requests.write(json_text([number, *request]).encode() + b"\n")
        return await self.answer(number, timeout_s)

    async def answer(self, number: int, timeout_s: float) -> Any:
        """Return the answer to a request; kill the process if it takes too long. Raises _WorkerError."""
        waiters = (self.pending_calls[number], self._listen_task)
        await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        call = self.pending_calls.pop(number)
        if call.done():
            return call.result()
        if self._listen_task.done():
            raise _WorkerError(self._listen_task.result())
        self._kill()
        raise _WorkerError(f"took more than {timeout_s:g} s and was killed; see --call-timeout")

    async def end(self) -> None:
        """Kill the process, and wait until it is gone."""
        self._kill()
        await self._listen_task
        await self._process.wait()

    async def _listen(self) -> str:
        """Give each answer to its call, until the process ends or user code writes into the pipe; returns which."""
        why = NO_ANSWER
        with contextlib.suppress(ValueError, LookupError, TypeError, asyncio.InvalidStateError):
            while line := await self._answers.readline():
                number, answer = json.loads(line)
                self.pending_calls[number].set_result(answer)
            # One that has only closed its pipes is killed; it does not change how another one ended.
            self._kill()
            why = _exit_description(await self._process.wait())
        self._kill()
        return why

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _exit_description(code: int) -> str:
    how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
    return f"ended its process, {how}"


async def _start_process(source: str, name: str) -> asyncio.subprocess.Process:
    """Start a process, in its own session, which is killed as a whole. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        # -P: modules of the working directory must not hide those that the program imports.
        *(sys.executable, "-P", "-c", PROGRAM, source, name, json.dumps([*sys.path, os.getcwd()])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # What the other ranks' calls print is nearly the same.
        stderr=None if rank() == 0 else asyncio.subprocess.DEVNULL,
        limit=MAX_ANSWER_BYTES,
        start_new_session=True,
        # With a fixed hash seed, sets keep their order after a resume.
        env={"PYTHONHASHSEED": "0", **os.environ},
    )
