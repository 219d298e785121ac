"""The user's reward functions, each in a worker process (`reward_worker`) that is killed when it takes too long.

What fails is found: after a call that raised, hung, died or returned no list of numbers, each completion is judged
alone. The worker runs with the user's rights: this contains accidents, not attacks. Nothing is pickled.
"""

import contextlib
import inspect
import json
import math
import os
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
from minirl.ranks.process_group import rank
from minirl.rewards import worker

LOAD_TIMEOUT_S = 60.0  # for the file's own imports, beside the time of a call
MAX_FORGIVEN_FRAC = 0.05  # of the completions of a call; one always is


def load_reward(spec: str, *, timeout_s: float = 60.0, on_error: str = "stop") -> "RewardProcess":
    """The function that "file.py:name" names, in its worker. Raises InputError saying what is wrong with it."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise InputError(f"--reward {spec}: expected file.py:function")
    if not Path(path).is_file():
        raise InputError(f"--reward {spec}: there is no file {path}")
    return RewardProcess(path, name, timeout_s=timeout_s, on_error=on_error)


class RewardProcess:
    """A reward function whose calls run in a worker process. State in the user's file does not survive a kill."""

    def __init__(self, file: str, name: str, *, timeout_s: float, on_error: str):
        """Starts the worker. `timeout_s` limits a call; on_error "zero" forgives few failures, "stop" none.

        Raises InputError if the file does not run or has no such function.
        """
        self.__name__, self._file, self._timeout_s, self._on_error = name, file, timeout_s, on_error
        self._told: set[str] = set()
        if error := self._start():
            raise InputError(f"--reward {file}:{name}: {error}")

    def __call__(self, **arguments: list[Any]) -> list[float]:
        """Rewards of the completions, without the rows' places in errors. Raises as `compute`."""
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
    ) -> list[float]:
        """Rewards of N completions, of rows at `places`; nan where a failure is forgiven. A call has its first's seed.

        `arguments` are lists [N]. Raises RewardError naming function, row, completion and what the user's code did.
        """
        forgiven = max(1, int(MAX_FORGIVEN_FRAC * len(texts))) if self._on_error == "zero" else 0
        answers = self._call(arguments, len(texts), seeds[0])
        if isinstance(answers, str):
            answers = self._one_at_a_time(arguments, seeds, whole=answers, forgiven=forgiven)
        faults = {i: answer for i, answer in enumerate(answers) if isinstance(answer, str)}
        for i, fault in faults.items():
            said = _escaped(
                f"reward {self.__name__} for the row at {places[i]}, completion {texts[i][:80]!r}: {fault}"
            )
            if len(faults) > forgiven:
                many = f"{len(faults)} of {len(answers)} completions, --on-reward-error zero forgives {forgiven}; "
                raise RewardError(f"{many if forgiven else ''}{said}")
            self._tell("forgiven", f"{said}\nThe reward is 0, see reward/errors.")
        return [math.nan if isinstance(answer, str) else answer for answer in answers]

    def _one_at_a_time(
        self, arguments: dict[str, list[Any]], seeds: Sequence[int], *, whole: str, forgiven: int
    ) -> list[float | str]:
        """As `_call` of each completion alone, after `whole` went wrong; up to the first that is not forgiven."""
        answers: list[float | str] = [whole] if len(seeds) == 1 else []
        for i in range(len(answers), len(seeds)):
            alone = self._call({name: values[i : i + 1] for name, values in arguments.items()}, 1, seeds[i])
            answers.extend([alone] if isinstance(alone, str) else alone)
            if sum(isinstance(answer, str) for answer in answers) > forgiven:
                break
        if not any(isinstance(answer, str) for answer in answers):
            what = f"{len(seeds)} completions, none of which fails alone"
            raise RewardError(_escaped(f"reward {self.__name__} for {what}: {whole}"))
        return answers

    def close(self) -> None:
        """Kill the worker with the processes of its session; the next call starts another."""
        self._kill()

    def _start(self) -> str | None:
        """Start a worker and learn what the function takes; what is wrong with it, if anything."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", worker.__file__, self._file, self.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={"PYTHONHASHSEED": "0", **os.environ},  # sets in the same order after a resume
        )
        self._kill = weakref.finalize(
            self, _kill_session, self._process
        )  # at the latest when this process exits
        start = {"path": sys.path, "parent": os.getpid()}
        facts = self._ask(start, self._timeout_s + LOAD_TIMEOUT_S)
        if isinstance(facts, str) or "error" in facts:
            self._kill()
            return facts if isinstance(facts, str) else _escaped(facts["error"])
        kinds = inspect.Parameter
        parameters = [kinds(name, kinds.KEYWORD_ONLY) for name in facts["required"]]
        parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in facts["optional"]]
        parameters += [kinds("others", kinds.VAR_KEYWORD)] if facts["takes_all"] else []
        self.__signature__ = inspect.Signature(parameters)
        return None

    def _call(self, arguments: dict[str, list[Any]], count: int, seed: int) -> list[float | str] | str:
        """The numbers of `count` completions, a text in the place of each bad one, or a text: what went wrong."""
        if not self._kill.alive or self._process.poll() is not None:
            self.close()
            if error := self._start():
                return error
        answer = self._ask({"seed": seed, "arguments": arguments, "count": count}, self._timeout_s)
        return answer if isinstance(answer, str) else answer["error"] or answer["rewards"]

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | str:
        """The worker's answer, or a text: it took too long, or died."""
        with (
            contextlib.ExitStack() as unless_answered
        ):  # a late answer must not pass as that of the next call
            unless_answered.callback(self._kill)
            line = _exchange(
                self._process, json.dumps(message).encode() + b"\n", time.monotonic() + timeout_s
            )
            if line is None:
                return f"took more than {timeout_s:g} s and was killed; see --reward-timeout"
            if not line.endswith(b"\n"):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
                code = self._process.returncode
                if code is None:
                    return "closed the pipes of its process"
                return f"ended its process, {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
            unless_answered.pop_all()
        answer = json.loads(line)
        if printed := answer.pop("printed"):
            self._tell("printed", f"reward {self.__name__} printed (said once):\n{_escaped(printed)}")
        return answer

    def _tell(self, what: str, text: str) -> None:
        """Print it if nothing of the kind was printed before: failures on every rank, the user's own prints on one."""
        if what not in self._told and (what == "forgiven" or rank() == 0):
            self._told.add(what)
            print(f"note: {text}", flush=True)


def _exchange(process: subprocess.Popen[bytes], message: bytes, deadline: float) -> bytes | None:
    """Send a message and read a line: less than a line if the process died, None after the deadline.

    Neither direction blocks. A process that it forked may hold the pipe open after its death: hence the look at it.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    into, out = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(into, False)
    poll, left, line = select.poll(), memoryview(message), b""
    poll.register(out, select.POLLIN)
    poll.register(into, select.POLLOUT)
    while not line.endswith(b"\n"):
        if (seconds := deadline - time.monotonic()) <= 0:
            return None
        watchdog.heartbeat()  # the deadline says how long to wait, not --hang-timeout
        has_ended = process.poll() is not None
        ready = dict(poll.poll(1000 * min(seconds, 0.5)))
        if into in ready:
            try:
                left = left[os.write(into, left) :]
            except BrokenPipeError:
                left = left[len(left) :]
            if not left:
                poll.unregister(into)
        part = os.read(out, 65536) if out in ready else b""
        line += part
        if not part and (out in ready or has_ended):
            break
    return line


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and those that it started, as far as they have not left its session."""
    with process, contextlib.suppress(ProcessLookupError, PermissionError):  # closes its pipes and reaps it
        os.killpg(process.pid, signal.SIGKILL)


def _escaped(text: str) -> str:
    """The text, with control characters (of a terminal, say) spelt out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
