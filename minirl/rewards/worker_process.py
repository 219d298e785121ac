"""Run each of the user's reward functions in a process (`worker`) that is killed if a call takes too long.

When a whole call raises, hangs, dies or does not return a list of the right length, its completions are sent
again, one in a call, to find those that fail. The worker has the user's rights: this limits accidents, not
attacks. Nothing is pickled, and what the worker sends is checked here again.
"""

import contextlib
import inspect
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.errors import InputError, RewardError
from minirl.ranks import watchdog
from minirl.ranks.process_group import print_here, rank
from minirl.rewards import worker

# For the imports of the user's file, in addition to the time limit of a call.
LOAD_TIMEOUT_S = 60.0
# With on_error "zero", up to this share of the completions of a call (at least one) may fail and is forgiven.
MAX_FORGIVEN_FRAC = 0.05
# A rank waiting for its worker sends a heartbeat at least this often.
POLL_S = 0.5
# Bytes of an answer.
MAX_ANSWER = 1 << 26
NO_ANSWER = "its process sent something that is no answer; does its code write to files that it did not open?"


def load_reward(spec: str, *, timeout_s: float = 60.0, on_error: str = "stop") -> "RewardProcess":
    """Start a worker for a function, "file.py:name" or "module:name". Raises InputError if it cannot be used."""
    source, _, name = spec.rpartition(":")
    is_file = source.endswith(".py")
    is_module = all(part.isidentifier() for part in source.split("."))
    if not name or not (is_file or is_module):
        raise InputError(f"--reward {spec}: expected file.py:function or module:function")
    if is_file and not Path(source).is_file():
        raise InputError(f"--reward {spec}: there is no file {source}")
    return RewardProcess(source, name, timeout_s=timeout_s, on_error=on_error)


class RewardProcess:
    """A reward function whose calls run in a worker process.

    Global state of the user's file is lost when the worker is killed.
    """

    def __init__(self, source: str, name: str, *, timeout_s: float, on_error: str):
        """Start the worker. source: a Python file, or a module's name.

        timeout_s: limit of one call. on_error: "zero" forgives a few failed completions, "stop" none.
        Raises InputError if it cannot be run or has no such function.
        """
        self.__name__ = name
        self._source = source
        self._timeout_s = timeout_s
        self._on_error = on_error
        # The kinds of notes that were printed: each is printed once.
        self._printed_notes: set[str] = set()
        error = self._start()
        if error is not None:
            raise InputError(f"--reward {source}:{name}: {error}")

    def __call__(self, **arguments: list[Any]) -> list[float | None]:
        """Compute rewards; error messages do not name the rows. Raises as `compute`."""
        count = max(map(len, arguments.values()))
        texts = [str(completion) for completion in arguments.get("completions", [""] * count)]
        return self.compute(arguments, places=["?"] * count, texts=texts, seeds=[0] * count)

    def compute(
        self,
        arguments: dict[str, list[Any]],
        *,
        places: Sequence[str],
        texts: Sequence[str],
        seeds: Sequence[int],
    ) -> list[float | None]:
        """Compute the rewards of N completions; NaN where a failure is forgiven, None where it does not apply.

        Not collective.

        `arguments` has a list [N] per argument of the function; `places` are the origins of the rows and
        `texts` the completions, both for error messages. The worker is seeded with seeds[0], or with a
        completion's own seed when that is sent alone. Raises RewardError naming function, row, completion and
        what the user's code did.
        """
        max_forgiven = 0
        if self._on_error == "zero":
            max_forgiven = max(1, int(MAX_FORGIVEN_FRAC * len(texts)))
        answers = self._call(arguments, len(texts), seeds[0])
        if isinstance(answers, str):
            answers = self._call_one_at_a_time(arguments, seeds, error=answers, max_forgiven=max_forgiven)

        failures = []
        # There are fewer answers than completions if a failure was not forgiven.
        for answer, place, text in zip(answers, places, texts, strict=False):
            if isinstance(answer, str):
                where = f"reward {self.__name__} for the row at {place}, completion {text[:80]!r}"
                failures.append(_escaped(f"{where}: {answer}"))
        if len(failures) > max_forgiven:
            summary = ""
            if max_forgiven > 0:
                counts = f"{len(failures)} of {len(answers)} completions"
                summary = f"{counts}, --on-reward-error zero forgives {max_forgiven}; "
            raise RewardError(summary + failures[0])
        if failures:
            self._print_once("forgiven", f"{failures[0]}\nThe reward is 0, see reward/errors.")
        return [math.nan if isinstance(answer, str) else answer for answer in answers]

    def _call_one_at_a_time(
        self, arguments: dict[str, list[Any]], seeds: Sequence[int], *, error: str, max_forgiven: int
    ) -> list[float | str | None]:
        """Call the function for each completion alone, after the call of all of them failed with `error`.

        Returns rewards, with an error string in place of each failure, up to the first failure that is not
        forgiven. Raises RewardError if no completion fails alone.
        """
        if len(seeds) == 1:
            return [error]
        answers: list[float | str | None] = []
        num_failed = 0
        for i, seed in enumerate(seeds):
            single = {name: values[i : i + 1] for name, values in arguments.items()}
            answer = self._call(single, 1, seed)
            answers.extend([answer] if isinstance(answer, str) else answer)
            if isinstance(answers[-1], str):
                num_failed += 1
            if num_failed > max_forgiven:
                break
        if num_failed == 0:
            what = f"{len(seeds)} completions, none of which fails alone"
            raise RewardError(_escaped(f"reward {self.__name__} for {what}: {error}"))
        return answers

    def close(self) -> None:
        """Kill the worker and the other processes of its session; the next call starts a new worker."""
        self._kill()

    def _start(self) -> str | None:
        """Start a worker and ask which arguments the function takes. Returns an error string, or None."""
        self._process = subprocess.Popen(
            # -P: modules beside worker.py must not hide those of the user.
            [sys.executable, "-P", worker.__file__, self._source, self.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            # With a fixed hash seed, sets are in the same order again after a resume.
            env={"PYTHONHASHSEED": "0", **os.environ},
        )
        # Kills once: when called, when this object is deleted, or at the latest when this process exits.
        self._kill = weakref.finalize(self, _kill_session, self._process)
        answer = self._ask({"path": sys.path}, self._timeout_s + LOAD_TIMEOUT_S)
        if isinstance(answer, str):
            return answer
        if isinstance(answer.get("error"), str):
            self._kill()
            return _escaped(answer["error"])
        try:
            self.__signature__ = _signature(answer)
        except (KeyError, TypeError, ValueError):
            self._kill()
            return NO_ANSWER
        return None

    def _call(self, arguments: dict[str, list[Any]], count: int, seed: int) -> list[float | str | None] | str:
        """Call the function for `count` completions; starts a new worker if there is none.

        Returns as `worker.validate_rewards`; also a single error string if the function raised or the worker
        failed.
        """
        if not self._kill.alive or self._process.poll() is not None:
            self.close()
            error = self._start()
            if error is not None:
                return error
        answer = self._ask({"seed": seed, "arguments": arguments, "count": count}, self._timeout_s)
        if isinstance(answer, str):
            return answer
        error, rewards = answer.get("error"), answer.get("rewards")
        if error is None and isinstance(rewards, list) and len(rewards) == count:
            return [value if isinstance(value, str) else worker.validate_number(value) for value in rewards]
        text = rewards if error is None else error
        return text if isinstance(text, str) else NO_ANSWER

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | str:
        """Send a request and return the worker's answer, or an error string if it took too long or died."""
        request_id = secrets.token_hex(8)
        answer = None
        try:
            message = json.dumps({"id": request_id, **request}).encode() + b"\n"
            line = _exchange(self._process, message, deadline=time.monotonic() + timeout_s)
            failure = self._failure(line, timeout_s)
            if line is not None and failure is None:
                answer = _parsed(line, request_id)
        except BaseException:
            # An answer that comes late must not be taken for that of the next call.
            self._kill()
            raise
        if answer is None:
            self._kill()
            return failure or NO_ANSWER
        printed = answer.pop("printed")
        if printed and rank() == 0:
            self._print_once("printed", f"reward {self.__name__} printed (said once):\n{_escaped(printed)}")
        return answer

    def _failure(self, line: bytes | None, timeout_s: float) -> str | None:
        """Return why `_exchange` returned no whole line, or None if it did."""
        if line is None:
            return f"took more than {timeout_s:g} s and was killed; see --reward-timeout"
        if line.endswith(b"\n"):
            return None
        if len(line) > MAX_ANSWER:
            return NO_ANSWER
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        if code is None:
            return "closed the pipes of its process"
        if code < 0:
            return f"ended its process, {_signal_name(-code)}"
        return f"ended its process, exit code {code}"

    def _print_once(self, kind: str, text: str) -> None:
        """Print a note on this rank unless one of this kind was printed before."""
        if kind not in self._printed_notes:
            self._printed_notes.add(kind)
            print_here(f"note: {text}")


def _parsed(line: bytes, request_id: str) -> dict[str, Any] | None:
    """The answer in a line; None if the worker's own code has not sent it in answer to this request."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_answer = isinstance(answer, dict) and answer.get("id") == request_id
    return answer if is_answer and isinstance(answer.get("printed"), str) else None


def _signal_name(number: int) -> str:
    """SIGKILL, for example; most real-time signals have no name."""
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


def _signature(description: dict[str, Any]) -> inspect.Signature:
    """Return the signature of the user's function, as its worker describes the arguments."""
    parameters = []
    for name in description["required"]:
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
    for name in description["optional"]:
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    if description["takes_all"]:
        parameters.append(inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _exchange(process: subprocess.Popen[bytes], message: bytes, *, deadline: float) -> bytes | None:
    """Send a message and read one line.

    Returns less than a line if the process died, closed its pipes or sent more than MAX_ANSWER bytes, and None
    after the deadline. Both pipes are served in one loop that never blocks for longer than POLL_S: a message may
    be larger than a pipe holds, and the worker may neither read nor answer.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    request_fd = process.stdin.fileno()
    answer_fd = process.stdout.fileno()
    os.set_blocking(request_fd, False)
    poll = select.poll()
    poll.register(answer_fd, select.POLLIN)
    poll.register(request_fd, select.POLLOUT)
    unsent = memoryview(message)
    answer = bytearray()
    while not answer.endswith(b"\n") and len(answer) <= MAX_ANSWER:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return None
        # This wait is limited by the deadline, not by --hang-timeout.
        watchdog.heartbeat()
        # Looked up before the poll: what the worker wrote before its death is then read below.
        has_exited = process.poll() is not None
        ready = dict(poll.poll(1000 * min(seconds_left, POLL_S)))
        if request_fd in ready:
            try:
                num_sent = os.write(request_fd, unsent)
            except BrokenPipeError:
                # The worker will not read the rest, but may have written an answer.
                num_sent = len(unsent)
            unsent = unsent[num_sent:]
            if not unsent:
                poll.unregister(request_fd)
        received = b""
        is_closed = False
        if answer_fd in ready:
            received = os.read(answer_fd, 65536)
            is_closed = not received
        answer += received
        # When the worker dies its pipe is closed, unless a process that it forked holds it open.
        if is_closed or (has_exited and not received):
            break
    return bytes(answer)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all those that it started, unless they have left its session."""
    # Leaving the block closes the pipes and reaps the process.
    with process, contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _escaped(text: str) -> str:
    """Return the text with control characters (a terminal's escape codes, for example) spelt out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
