"""Call a user's reward function in separate processes, because a call may hang, crash or print megabytes."""

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

from minirl.errors import InputError, RewardError, escape_control_chars
from minirl.files.json_files import json_text
from minirl.files.user_code import MAX_REPR, source_and_name
from minirl.ranks.process_group import rank
from minirl.rewards.calls import LOAD_CALL, Rewards, Signature
from minirl.rewards.functions import MAX_CONCURRENT_CALLS, PromptGroup, Reward

PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from minirl.rewards.worker import main; main()"
LOAD_TIMEOUT_S = 60.0  # time to import the user's file, in addition to a call's time limit
MAX_ANSWER_BYTES = 1 << 26
INVALID_ANSWER = (
    "its worker process sent an invalid response; "
    "does its code write to file descriptors that it did not open?"
)


class WorkerReward(Reward):
    """A reward function that runs in worker processes; the trainer does not load the function's file.

    A process runs one call at a time, or up to MAX_CONCURRENT_CALLS if the function is an `async def`. One trainer
    thread waits for all processes. On rank 0, the calls' output goes to stderr. Once a process is lost, all later calls
    fail with the same error. Not collective.
    """

    def __init__(self, spec: str, *, timeout_s: float = 60.0, num_workers: int = 1):
        """Start the processes and wait until they have loaded the function.

        spec: "file.py:name" or "module:name". timeout_s: time limit (s) for one call. Raises InputError if the function
        is missing or its file cannot be loaded.
        """
        source, name = source_and_name("--reward", spec)
        self._timeout_s = timeout_s
        self._lost_error: RewardError | None = None
        self._processes: list[_Process] = []
        self._free_processes: asyncio.Queue[_Process] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        # Use a daemon thread, which does not delay the trainer's exit. Workers exit when the trainer closes their
        # pipes.
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"reward {spec}", daemon=True)
        self._thread.start()
        try:
            self._run_in_loop(self._start(source, name, num_workers)).result()
        except (_WorkerError, OSError) as error:
            self.stop()
            raise InputError(f"--reward {spec}: {escape_control_chars(str(error))}") from None

    def submit(self, name: str, group: PromptGroup) -> Future[Any]:
        """Queue the call for a group until a process is free."""
        short_texts = [text[:MAX_REPR] for text in group.texts]
        request = group.select_arguments(self.signature), short_texts, group.seed
        return self._run_in_loop(self._call(name, group, request))

    def stop(self) -> None:
        """Kill the worker processes and all processes that they started."""
        for process in self._processes:
            self._run_in_loop(process.end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _start(self, source: str, name: str, num_workers: int) -> None:
        """Start all processes, and receive the function's signature. Raises _WorkerError and OSError."""
        for _ in range(num_workers):
            self._processes.append(_Process(await _start_process(source, name)))
        load_timeout_s = LOAD_TIMEOUT_S + self._timeout_s
        load_responses = await asyncio.gather(
            *(process.answer(LOAD_CALL, load_timeout_s) for process in self._processes)
        )
        for answer in load_responses:
            if isinstance(answer, str):
                raise _WorkerError(answer)
        self.signature = Signature(*load_responses[0])
        for process in self._processes * (MAX_CONCURRENT_CALLS if self.signature.is_async else 1):
            self._free_processes.put_nowait(process)

    async def _call(self, name: str, group: PromptGroup, request: Sequence[Any]) -> Rewards:
        """Call the function for a group, and return the rewards. Raises RewardError."""
        process = await self._free_processes.get()
        try:
            if self._lost_error:
                raise self._lost_error
            answer = await process.call(request, self._timeout_s)
        except _WorkerError as error:
            # All other calls in this process now fail too, but only the first error names the cause.
            if self._lost_error is None:
                self._lost_error = RewardError(
                    escape_control_chars(f"reward {name} for the row at {group.row.origin}: {error}")
                )
            raise self._lost_error from None
        finally:
            self._free_processes.put_nowait(process)
        return group.rewards_or_raise(name, answer)


class _WorkerError(RuntimeError):
    """A process could not load the function, died, was killed or sent an invalid response."""


class _Process:
    """A worker process, which runs `worker.main`. All methods run on the event loop's thread.

    pending_calls: in-flight calls, keyed by call id.
    """

    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests, self._answers = process.stdin, process.stdout
        self._call_ids = itertools.count(LOAD_CALL + 1)
        self.pending_calls = {LOAD_CALL: asyncio.get_running_loop().create_future()}
        self._listen_task = asyncio.create_task(self._listen())

    async def call(self, request: Sequence[Any], timeout_s: float) -> Any:
        """Send a request (arguments, texts, seed), and return its answer. Raises _WorkerError."""
        call_id = next(self._call_ids)
        self.pending_calls[call_id] = asyncio.get_running_loop().create_future()
        self._requests.write(json_text([call_id, *request]).encode() + b"\n")
        return await self.answer(call_id, timeout_s)

    async def answer(self, call_id: int, timeout_s: float) -> Any:
        """Return the answer to a call; kill the process if the call exceeds the time limit. Raises _WorkerError."""
        futures = (self.pending_calls[call_id], self._listen_task)
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        call = self.pending_calls.pop(call_id)
        if call.done():
            return call.result()
        if self._listen_task.done():
            raise _WorkerError(self._listen_task.result())
        self._kill()
        raise _WorkerError(f"took more than {timeout_s:g} s and was killed; see --call-timeout")

    async def end(self) -> None:
        """Kill the process, and wait until it has exited."""
        self._kill()
        await self._listen_task
        await self._process.wait()

    async def _listen(self) -> str:
        """Deliver answers to their calls until the process exits or sends an invalid response; return the reason."""
        reason = INVALID_ANSWER
        with contextlib.suppress(ValueError, LookupError, TypeError, asyncio.InvalidStateError):
            while line := await self._answers.readline():
                call_id, answer = json.loads(line)
                self.pending_calls[call_id].set_result(answer)
            # The process may merely have closed its pipes without exiting. If the process has already exited, the kill
            # has no effect.
            self._kill()
            reason = _exit_description(await self._process.wait())
        self._kill()
        return reason

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _exit_description(code: int) -> str:
    if code < 0:
        return f"ended its process, signal {-code} ({signal.strsignal(-code)})"
    return f"ended its process, exit code {code}"


async def _start_process(source: str, name: str) -> asyncio.subprocess.Process:
    """Start a worker process in its own session, so that the whole session can be killed at once. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        # -P keeps modules in the working directory from shadowing the program's imports.
        *(sys.executable, "-P", "-c", PROGRAM, source, name, json.dumps([*sys.path, os.getcwd()])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # The other ranks would print nearly the same output.
        stderr=None if rank() == 0 else asyncio.subprocess.DEVNULL,
        limit=MAX_ANSWER_BYTES,
        start_new_session=True,
        # A fixed hash seed keeps the iteration order of sets the same after a resume.
        env={"PYTHONHASHSEED": "0", **os.environ},
    )
