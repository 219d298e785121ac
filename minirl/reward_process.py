"""A user's reward function in a process of its own: it can be killed, and what it does stays there.

The file is the user's own code and runs with the user's rights; the process keeps hangs, exits, prints, seeds and
changed directories away from training. It is no boundary against hostile code.
"""

import inspect
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from minirl import reward_worker
from minirl.distributed import print0
from minirl.errors import InputError, RewardError

MIN_START_S = 60.0  # to import the user's file


class RewardProcess:
    """The function that "file.py:name" names, called like it; every rank has its own process.

    `timeout_s`: of a call. `max_errors`: the share of the completions of a call whose reward may be 0 because they
    raised, hung or returned no number; `num_errors` counts them. The constructor imports the file. Raises InputError
    saying what is wrong with it.
    """

    def __init__(self, spec: str, *, timeout_s: float, max_errors: float = 0.0):
        path, _, name = spec.rpartition(":")
        if not path.endswith(".py") or not name:
            raise InputError(f"--reward {spec}: expected file.py:function")
        if not Path(path).is_file():
            raise InputError(f"--reward {spec}: there is no file {path}")
        self.__name__, self._path = name, path
        self._timeout_s, self._max_errors, self.num_errors = timeout_s, max_errors, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._has_printed = False
        reply = self._start()
        if "error" in reply:
            raise InputError(f"--reward {spec}: {reply['error']}")
        kinds = {kind.name: kind for kind in inspect._ParameterKind}
        parameters = [
            inspect.Parameter(name, kinds[kind], default=None if has_default else inspect.Parameter.empty)
            for name, kind, has_default in reply["parameters"]
        ]
        self.__signature__ = inspect.Signature(parameters)  # callers see the function's own

    def __call__(self, **arguments: Any) -> list[float]:
        """The rewards of one completion per element of the arguments. Raises RewardError without the row's place."""
        values = self.values(arguments, count=len(next(iter(arguments.values()))))
        if bad := [value for value in values if isinstance(value, str)]:
            raise RewardError(f"reward {self.__name__}: {bad[0]}")
        return [float(value) for value in values]

    def values(self, arguments: Mapping[str, Any], *, count: int, seed: str = "") -> list[float | str]:
        """The reward of each completion, or text that says what went wrong with it; up to and with the first such.

        A call that fails as a whole is made again for one completion at a time, to find the guilty; as many as
        `max_errors` allows get 0. `seed` is that of the function's own randomness. Raises RewardError when a call
        fails on all completions and on none alone, or returns no list of the right length.
        """
        reply = self._ask(arguments, count, seed)
        if "misshapen" in reply:
            raise RewardError(f"reward {self.__name__} {reply['misshapen']}")
        values: list[float | str] = list(reply.get("values", ()))
        allowed = int(max(1, self._max_errors * count)) if self._max_errors else 0
        for i in range(count if "error" in reply else 0):
            one = reply
            if count > 1:
                one = self._ask({name: column[i : i + 1] for name, column in arguments.items()}, 1, f"{seed} {i}")
            values += one.get("values") or [one.get("error") or one["misshapen"]]
            if _num_bad(values) > allowed:
                break
        if "error" in reply and not _num_bad(values):
            raise RewardError(f"reward {self.__name__}: {reply['error']} (for {count} completions, for none alone)")
        if _num_bad(values) <= allowed:
            self.num_errors += _num_bad(values)
            values = [0.0 if isinstance(value, str) else value for value in values]
        return values

    def close(self) -> None:
        """Kill the process and what it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _start(self) -> dict[str, Any]:
        command = [sys.executable, "-P", reward_worker.__file__, self._path, self.__name__, str(os.getpid())]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._process = subprocess.Popen(command, start_new_session=True, bufsize=0, **pipes)  # type: ignore[call-overload]
        reply = self._receive(max(MIN_START_S, self._timeout_s))
        if "error" in reply:
            self.close()
        return reply

    def _ask(self, arguments: Mapping[str, Any], count: int, seed: str) -> dict[str, Any]:
        if self._process is None and "error" in (reply := self._start()):
            return reply
        assert self._process is not None
        assert self._process.stdin is not None
        request = json.dumps(dict(arguments=dict(arguments), count=count, seed=seed)).encode() + b"\n"
        with suppress(BrokenPipeError):  # it is dead, as the answer will tell
            view = memoryview(request)
            while view:
                view = view[self._process.stdin.write(view) :]
        return self._receive(self._timeout_s)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line of the process, or an error; after one that is not its own, it is killed."""
        assert self._process is not None
        assert self._process.stdout is not None
        output, parts, deadline = self._process.stdout.fileno(), bytearray(), time.monotonic() + timeout_s
        while not parts.endswith(b"\n"):
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.close()
                return {"error": f"gave no answer within {timeout_s:g} s; see --reward-timeout"}
            if not (part := os.read(output, 1 << 16)):
                code = self._process.wait()
                self.close()
                return {
                    "error": f"ended its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
                }
            parts += part
        reply = json.loads(parts)
        if reply["printed"] and not self._has_printed:
            self._has_printed = True
            print0(f"reward {self.__name__} printed (said once): {reply['printed']!r}")
        return reply


def _num_bad(values: list[float | str]) -> int:
    return sum(isinstance(value, str) for value in values)
