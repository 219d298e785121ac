"""The process that a user's reward function runs in: `python -P reward_worker.py FILE FUNCTION`, see `reward_process`.

One JSON object per line comes in on stdin and one goes out on stdout: first {"path", "parent"} for what the function
takes, then {"seed", "arguments", "count"} for its numbers. Everything that user code can reach is something else: fds
0, 1 and 2 are /dev/null, what it prints goes into a bounded buffer. It limits accidents, it is no security boundary.

Standard library only, so that it starts in a moment; nothing of the package, not even by `import minirl`.
"""

import ctypes
import functools
import inspect
import io
import json
import math
import os
import random
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Set
from typing import Any

MAX_OUTPUT, MAX_TRACEBACK, MAX_REPR = 2000, 4000, 80  # characters that the parent gets to see
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def validate_rewards(values: Any, count: int) -> list[float | str] | str:
    """`count` finite numbers; a text in the place of each that is none, or one text if the whole is no list of them.

    bool, int, float, and 0-d arrays and tensors are numbers. The texts say what was "returned ...".
    """
    is_list = hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0
    if not is_list or isinstance(values, str | bytes | Mapping | Set):
        return f"returned {repr(values)[:MAX_REPR]}; expected a list of {count} numbers"
    if len(values) != count:
        return f"returned {len(values)} values for {count} completions"
    return [_number(value) for value in values]


def _number(value: Any) -> float | str:
    try:
        number = (
            math.nan if isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0 else float(value)
        )
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    return number if math.isfinite(number) else f"returned {repr(value)[:MAX_REPR]}; expected a finite number"


class _FirstBytes(io.RawIOBase):
    """Keeps the beginning of what is written and drops the rest."""

    kept = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.kept += bytes(data)[: 4 * MAX_OUTPUT - len(self.kept)]
        return len(data)


def main() -> None:
    """Load the function and call it for each request until there are no more."""
    file, name = sys.argv[1:]
    requests, answers = (
        os.fdopen(os.dup(0), "rb", 1 << 20),
        os.fdopen(os.dup(1), "wb"),
    )  # dup: programs do not inherit
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    printed = _FirstBytes()
    sys.stdout = sys.stderr = io.TextIOWrapper(
        printed, "utf-8", errors="backslashreplace", write_through=True
    )
    if sys.platform == "linux":  # neither this nor what it forks must outlive a trainer that was killed
        die_with_parent = functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
        die_with_parent()
        os.register_at_fork(after_in_child=die_with_parent)
    start = json.loads(requests.readline() or "null")
    if start is None or os.getppid() != start["parent"]:
        return
    sys.path[:] = [*start["path"], os.path.dirname(os.path.abspath(file))]

    def send(answer: dict[str, Any]) -> None:
        printed_text, printed.kept = printed.kept.decode("utf-8", "replace")[:MAX_OUTPUT], b""
        answers.write(json.dumps({**answer, "printed": printed_text}).encode() + b"\n")
        answers.flush()

    loaded, error = _guarded(load_function, file, name)
    function, facts = loaded or (None, {"error": error})
    send(facts)
    while function is not None and (line := requests.readline()):
        rewards, error = _guarded(_call, function, json.loads(line))
        send({"rewards": rewards, "error": error})


def _call(function: Callable[..., Any], request: dict[str, Any]) -> list[float | str] | str:
    seed_everything(request["seed"])
    return validate_rewards(function(**request["arguments"]), request["count"])


def _guarded(act: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """What user code returns, or None and what it raised; afterwards process and working directory are as before."""
    pid, folder = os.getpid(), os.open(".", os.O_RDONLY)
    result, raised = None, None
    try:
        result = act(*arguments)
    except BaseException as error:  # user code may raise anything, sys.exit and KeyboardInterrupt included
        raised = f"raised\n{users_traceback(error)}"
    if os.getpid() != pid:  # a fork that user code let return: this is not the worker
        os._exit(0)
    os.fchdir(folder)
    os.close(folder)
    return result, raised


def load_function(file: str, name: str) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """What `file` calls `name`, and which arguments it takes, or what is wrong. Raises whatever the file raises."""
    module = types.ModuleType(f"reward_file_{os.path.basename(file).removesuffix('.py')}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    with open(file, "rb") as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    function = getattr(module, name, None)
    if not callable(function):
        return None, {"error": f"{file} has no function {name}"}
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if unnamed := [p.name for p in named if p.kind is p.POSITIONAL_ONLY]:
        return None, {"error": f"{name} takes {unnamed[0]!r} by position only; arguments come by name"}
    return function, {
        "required": [p.name for p in named if p.default is p.empty],
        "optional": [p.name for p in named if p.default is not p.empty],
        "takes_all": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


def seed_everything(seed: int) -> None:
    """Seed what user code may draw from, so that a random reward is the same again after a resume."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def users_traceback(error: BaseException) -> str:
    """The traceback without the frames of this file; the middle of a very long one is left out."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    half = MAX_TRACEBACK // 2
    return text if len(text) <= MAX_TRACEBACK else f"{text[:half]}\n...\n{text[-half:]}"


if __name__ == "__main__":
    main()
