"""The program that `reward_process` starts to run a user's reward function. Standard library only: it starts quickly.

    python -P reward_worker.py file.py function parent_pid

One JSON object per line in, one out, over descriptors that the user's code does not see; what it prints is kept, up to
a limit, and sent along. This keeps accidents away from training; it is no boundary against hostile code.
"""

import ctypes
import importlib.util
import inspect
import io
import json
import math
import os
import random
import signal
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MAX_PRINTED = 2000  # characters of a call
MAX_SHOWN = 200  # characters of a value
PR_SET_PDEATHSIG = 1


def main(path: str, name: str, parent: int) -> None:
    """Load the function, say what it takes, then answer requests until there are no more."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    own, folder = os.getpid(), os.getcwd()

    def answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        sys.stdout = sys.stderr = printed = _Printed()
        try:
            reply = work()
        except BaseException as error:  # sys.exit too: whatever user code raises is an answer
            reply = {"error": _user_traceback(error)}
        if os.getpid() != own:  # user code has forked, and its child came back
            os._exit(0)
        os.chdir(folder)
        answers.write(json.dumps(reply | {"printed": printed.getvalue()}).encode() + b"\n")
        answers.flush()
        return reply

    found: list[Callable[..., Any]] = []
    answer(lambda: _load(path, name, found))
    for line in requests if found else ():
        request = json.loads(line)
        answer(lambda request=request: _call(found[0], **request))  # type: ignore[misc]
    os.killpg(0, signal.SIGKILL)  # with all that the function has started


class _Printed(io.StringIO):
    """Keeps the first characters and drops the rest."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, MAX_PRINTED - self.tell())])
        return len(text)


def _load(path: str, name: str, found: list[Callable[..., Any]]) -> dict[str, Any]:
    """Import the file as if it were run from its folder; returns the function's parameters."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        return {"error": f"{path} has no function {name}"}
    found.append(function)
    parameters = inspect.signature(function).parameters.values()
    return {"parameters": [(p.name, p.kind.name, p.default is not p.empty) for p in parameters]}


def _call(function: Callable[..., Any], *, arguments: dict[str, Any], count: int, seed: str) -> dict[str, Any]:
    """What the function makes of the arguments, as `checked`; its randomness is a function of the seed."""
    number = zlib.crc32(seed.encode())
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)
    return checked(function(**arguments), count)


def checked(returned: Any, count: int) -> dict[str, Any]:
    """What a reward function has returned.

    `values`, each a finite number or text that says what it is; or `misshapen`, text, when it is no list of that many.
    """
    is_list = hasattr(returned, "__len__") and getattr(returned, "ndim", 1) > 0
    if not is_list or isinstance(returned, str | bytes | Mapping):
        return {"misshapen": f"returned {_shown(returned)}; expected a list of {count} numbers"}
    if len(returned) != count:
        return {"misshapen": f"returned {len(returned)} values for {count} completions"}
    return {"values": [_number(value) for value in returned]}


def _number(value: Any) -> float | str:
    """Finite numbers, also of numpy and torch, as they are; else what it is."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    return number if math.isfinite(number) else f"returned {_shown(value)}; return a finite number for every completion"


def _shown(value: Any) -> str:
    try:
        return repr(value)[:MAX_SHOWN]
    except Exception as error:  # repr is user code, too
        return f"a {type(value).__name__} without repr ({type(error).__name__})"


def _user_traceback(error: BaseException) -> str:
    """The traceback without this file's frames."""
    trace = traceback.TracebackException.from_exception(error)
    trace.stack = traceback.StackSummary.from_list(
        [frame for frame in trace.stack if frame.filename != __file__ and "importlib" not in frame.filename]
    )
    return "".join(trace.format()).strip()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
