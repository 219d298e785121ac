"""The program that runs a user's reward function: `python -P worker.py SOURCE FUNCTION` (see `worker_process`).

SOURCE is a Python file, or the name of a module that can be imported.

Protocol: one JSON object per line, requests on stdin, answers on stdout.

- The first request is {"id", "path"}: path is the sys.path of the trainer. The answer is {"required", "optional",
  "takes_all"}, the arguments that the function takes, or {"error"}.
- Every later request is {"id", "seed", "arguments", "count"}. The answer is {"rewards", "error"}.
- Every answer also has the "id" of its request, a random text without which the trainer takes no line for an
  answer, and "printed": the beginning of what the user's code printed.

User code cannot write into the protocol by accident: both pipes move to high file descriptors, fds 0, 1 and
2 become /dev/null, and sys.stdout and sys.stderr become a buffer of limited size. The functions that read and write
messages are bound before user code runs, which may put others into their modules. This prevents accidents; it is no
security boundary: the trainer checks what it gets.

Standard library only, so that the process starts quickly; it imports nothing of the package, not even
`minirl` itself.
"""

import fcntl
import importlib
import inspect
import io
import os
import random
import resource
import select
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence, Set
from json import dumps, loads
from math import isfinite, nan
from typing import Any, BinaryIO

# Of this package.
OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# How many characters of each the trainer receives.
MAX_OUTPUT = 2000
MAX_TRACEBACK = 4000
MAX_REPR = 80
# Of a reward, without its sign. Losses and gradients grow with it, and fp32 must hold their squares (up to 3e38).
MAX_REWARD = 1e12
# Below the limit of this process, if that is lower.
MAX_FILE_DESCRIPTOR = 4096


def validate_rewards(values: Any, count: int) -> list[float | str | None] | str:
    """Check that `values` is a list of `count` entries, each a number of up to MAX_REWARD or None.

    None means that the reward does not apply to the completion. Returns floats and Nones, with an error string
    in place of each invalid one; a single error string if `values` is no list or has another length. Numbers
    are bool, int, float, Decimal, and 0-d arrays and tensors. Lists are also tuples, arrays and tensors, but neither
    texts nor mappings nor sets. The error strings begin with "returned".
    """
    # 0-d arrays and tensors have a `__len__` too; it raises.
    has_length = hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0
    if not has_length or isinstance(values, str | bytes | Mapping | Set):
        return f"returned {shown(values)}; expected a list of {count} numbers"
    if len(values) != count:
        return f"returned {len(values)} values for {count} completions"
    return [validate_number(value) for value in values]


def validate_number(value: Any) -> float | str | None:
    """Return `value` as a float, None as it is, or an error string."""
    if value is None:
        return None
    number = nan
    is_text = isinstance(value, str | bytes | bytearray | memoryview)
    is_array = getattr(value, "ndim", 0) != 0
    if not is_text and not is_array:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = nan
    if not isfinite(number):
        return f"returned {shown(value)}; expected a finite number"
    if abs(number) > MAX_REWARD:
        return f"returned {shown(value)}; expected at most {MAX_REWARD:g}, the loss would overflow"
    return number


def shown(value: Any) -> str:
    """The beginning of the value's repr; of its type, where it has none (an int of thousands of digits)."""
    try:
        return repr(value)[:MAX_REPR]
    except Exception:
        return f"a value of {type(value)} that cannot be shown"


class _PrintBuffer(io.RawIOBase):
    """A file that keeps the beginning of what is written and drops the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        # A character takes at most 4 bytes in UTF-8.
        num_free = 4 * MAX_OUTPUT - len(self._kept)
        self._kept += bytes(data)[:num_free]
        return len(data)

    def take_text(self) -> str:
        """Return what was kept, and start again empty."""
        text = self._kept.decode("utf-8", "replace")
        self._kept = b""
        return text[:MAX_OUTPUT]


def main() -> None:
    """Load the function, then answer one request after another until stdin is closed."""
    source, name = sys.argv[1:]
    trainer = connect(source)
    if trainer is None:
        return
    loaded, error = run_user_code(load_function, source, name)
    if error is not None:
        trainer.send({"error": error})
        return
    function, description = loaded
    trainer.send(description)
    if function is None:
        return
    for line in trainer.requests:
        request = loads(line)
        rewards, error = run_user_code(_call, function, request)
        trainer.send({"id": request["id"], "rewards": rewards, "error": error})


class Trainer:
    """The process that sends requests and receives answers, both as lines."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO, first_id: str, printed: _PrintBuffer):
        """first_id: of the first request, and so of answers that do not say another one."""
        self.requests = requests
        self._answers = answers
        self._first_id = first_id
        self._printed = printed

    def send(self, answer: Mapping[str, Any]) -> None:
        """Send an answer, with what user code has printed."""
        line = dumps({"id": self._first_id, **answer, "printed": self._printed.take_text()})
        self._answers.write(line.encode() + b"\n")
        self._answers.flush()


def connect(source: str) -> Trainer | None:
    """Make this process ready for user code, and take the first request; None if the trainer has gone before it."""
    _start_guard()
    requests, answers = _take_pipes()
    printed = _PrintBuffer()
    sys.stdout = io.TextIOWrapper(printed, "utf-8", errors="backslashreplace", write_through=True)
    sys.stderr = sys.stdout
    first_line = requests.readline()
    if not first_line:
        return None
    first = loads(first_line)
    own_folder = os.path.dirname(os.path.abspath(source)) if source.endswith(".py") else os.getcwd()
    sys.path[:] = [*first["path"], own_folder]
    return Trainer(requests, answers, first["id"], printed)


def _start_guard() -> None:
    """Fork a process that kills this one's process group as soon as the trainer has gone, in whatever way it ended.

    The group has this process and what user code forks and starts, also programs. That the trainer has gone is
    seen by stdin, a pipe whose other end only the trainer holds. The guard is a child of nobody here: user code may
    wait for all children of its process.
    """
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        return
    if os.fork() != 0:
        os._exit(0)
    # The trainer must see the answers' pipe closed when the worker has ended.
    os.closerange(1, 3)
    hangup = select.poll()
    # Without a mask, poll reports nothing but the hangup: requests are not the guard's.
    hangup.register(0, 0)
    hangup.poll()
    os.killpg(0, signal.SIGKILL)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return stdin and stdout under high file descriptors, and put /dev/null in place of fds 0, 1 and 2.

    User code that closes all low descriptors, or writes to some, does not meet them; programs that it starts do not
    inherit them.
    """
    requests = os.fdopen(high_descriptor(0), "rb", 1 << 20)
    answers = os.fdopen(high_descriptor(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    return requests, answers


def high_descriptor(fd: int) -> int:
    """Another descriptor of the same file, in the upper half of those that this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit > MAX_FILE_DESCRIPTOR:
        limit = MAX_FILE_DESCRIPTOR
    lowest = random.SystemRandom().randrange(limit // 2, limit - 10)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)


def _call(function: Callable[..., Any], request: dict[str, Any]) -> list[float | str | None] | str:
    """Call the user's function for one request; returns as `validate_rewards`."""
    seed_everything(request["seed"])
    values = call_reward(function, request["arguments"])
    return validate_rewards(values, request["count"])


def call_reward(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a reward function and wait for its result if it is an `async def`.

    One that names `episodes` or `environments` gets them as objects.
    """
    objects = {"episodes": _as_object, "environments": Environment}
    for name in objects.keys() & arguments.keys() & inspect.signature(function).parameters.keys():
        arguments = {**arguments, name: list(map(objects[name], arguments[name]))}
    values = function(**arguments)
    if not inspect.isawaitable(values):
        return values
    # Imported late: it takes longer than all other imports of this file together.
    import asyncio

    async def wait() -> Any:
        return await values

    return asyncio.run(wait())


class Environment:
    """The attributes that an object of --environment had at its episode's end; the object was in another process."""

    def __init__(self, attributes: Mapping[str, Any]):
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        there = ", ".join(vars(self)) or "none"
        raise AttributeError(
            f"{name!r} is no attribute of the environment that can be seen here; there are: {there}. Reward functions "
            "see those that are numbers, texts, or lists and dicts of them: set one in `reset` or in a tool, or write "
            "`get_reward(self)` and add --reward episode"
        )


def _as_object(episode: Mapping[str, Any]) -> types.SimpleNamespace:
    """An episode of `minirl.rewards.functions.episode_facts`, with attributes."""
    turns = [types.SimpleNamespace(**turn) for turn in episode["turns"]]
    row = types.SimpleNamespace(**episode["row"])
    return types.SimpleNamespace(**{**episode, "turns": turns, "row": row})


def run_user_code(action: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """Return the action's result and None, or None and the traceback of what it raised.

    Restores the working directory. In a process that user code forked and let return, does not return at all.
    """
    pid = os.getpid()
    opened = os.open(".", os.O_RDONLY)
    folder = high_descriptor(opened)
    os.close(opened)
    result = None
    error = None
    try:
        result = action(*arguments)
    except BaseException as exception:
        # User code may raise anything, including SystemExit and KeyboardInterrupt.
        error = f"raised\n{users_traceback(exception)}"
    if os.getpid() != pid:
        # This is a fork of the worker: it must not send a second answer.
        os._exit(0)
    os.fchdir(folder)
    os.close(folder)
    return result, error


def load_function(source: str, name: str) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """Return the function `name` of a file or module with the description of its arguments, or None and {"error"}.

    Raises whatever the user's code raises when it is run.
    """
    function = find_function(source, name)
    if isinstance(function, str):
        return None, {"error": function}
    return _describe(function, name)


def find_function(source: str, name: str) -> Callable[..., Any] | str:
    """Return the function `name` of a file or module, or why there is none. Raises what the user's code raises."""
    found = find_functions(source, [name])
    return found if isinstance(found, str) else found[0]


def find_functions(source: str, names: Sequence[str]) -> list[Callable[..., Any]] | str:
    """Return functions of one file or module, or why there is none. Raises what the user's code raises."""
    if source.endswith(".py"):
        module = _run_file(source)
    else:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise
            return f"there is no module {error.name!r} here; is it installed?"
    missing = [name for name in names if not callable(getattr(module, name, None))]
    if missing:
        return f"{source} has no function {missing[0]}"
    return [getattr(module, name) for name in names]


def _run_file(file: str) -> types.ModuleType:
    """Run a Python file as a module."""
    module = types.ModuleType(f"user_file_{os.path.basename(file).removesuffix('.py')}")
    module.__file__ = file
    # dataclasses and pickle look a class's module up there.
    sys.modules[module.__name__] = module
    with open(file, "rb") as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


def _describe(function: Callable[..., Any], name: str) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """Return the function with the names of its arguments, or None and {"error"} if they cannot come by name."""
    required: list[str] = []
    optional: list[str] = []
    takes_all = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            error = f"{name} takes {parameter.name!r} by position only; arguments come by name"
            return None, {"error": error}
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            names = required if parameter.default is parameter.empty else optional
            names.append(parameter.name)
    return function, {"required": required, "optional": optional, "takes_all": takes_all}


def seed_everything(seed: int) -> None:
    """Seed the generators that user code may use, so that random rewards are the same after a resume."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def users_traceback(error: BaseException) -> str:
    """Return the traceback without its first frames, of this package; the middle of a very long one is left out."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(OWN_FOLDER):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    if len(text) <= MAX_TRACEBACK:
        return text
    half = MAX_TRACEBACK // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


if __name__ == "__main__":
    main()
