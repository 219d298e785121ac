"""Load user functions and format their exceptions. Imports only the standard library, so that workers start quickly."""

import builtins
import contextlib
import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from minirl.errors import InputError, refuse

# Folder of this package. Leading frames from this folder are stripped from tracebacks of user code.
PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Maximum lengths, in characters, of a traceback and of a value's repr in a message.
MAX_TRACEBACK = 4000
MAX_REPR = 80


def source_and_name(flag: str, spec: str, expected: str = "function") -> tuple[str, str]:
    """Split a flag's value, "file.py:name" or "module:name", into the file or module and the name.

    expected: kind of object that the name denotes, for the error message. Raises InputError for a malformed value or a
    missing file.
    """
    source, _, name = spec.rpartition(":")
    is_file = source.endswith(".py")
    is_module = all(part.isidentifier() for part in source.split("."))
    refuse(
        not name or not (is_file or is_module),
        f"{flag} {spec}: expected file.py:{expected} or module:{expected}",
    )
    refuse(is_file and not os.path.isfile(source), f"{flag} {spec}: file {source} does not exist")
    return source, name


@contextlib.contextmanager
def loading_user_code(what: str) -> Iterator[None]:
    """If loading user code in the block fails, re-raise the error as an InputError whose message begins with `what`."""
    try:
        yield
    except InputError as reason:
        raise InputError(f"{what}: {reason}") from None
    except (Exception, SystemExit) as error:
        raise InputError(f"{what}: raised\n{users_traceback(error)}") from None


def find_functions(source: str, *names: str) -> list[Callable[..., Any]]:
    """Return functions from a file or module. Raises InputError if one is missing; errors in user code propagate."""
    module = _import_file(source) if source.endswith(".py") else importlib.import_module(source)
    for name in names:
        refuse(not callable(getattr(module, name, None)), f"{source} has no function {name}")
    return [getattr(module, name) for name in names]


def _import_file(file: str) -> types.ModuleType:
    """Run a Python file as a module, once per process; its imports search its own folder first."""
    path = os.path.abspath(file)
    name = f"user_file:{path}".replace(".", ":")  # a dot would mean a submodule
    if name in sys.modules:
        return sys.modules[name]
    sys.path.append(os.path.dirname(path))  # for importing packages
    module = types.ModuleType(name)
    module.__file__ = path
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": partial(_import_sibling, path)}
    # dataclasses and pickle look up a class's module in sys.modules.
    sys.modules[name] = module
    try:
        with open(path, "rb") as source:
            code = compile(source.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_sibling(file: str, name: str, *arguments: Any, **options: Any) -> Any:
    """Import a module on behalf of a user's file.

    Modules in the file's folder are keyed by path, because module names may repeat.
    """
    path = os.path.join(os.path.dirname(file), f"{name}.py")
    is_loaded = getattr(sys.modules.get(name), "__file__", None) == path  # for example by the script
    if path == file or is_loaded or not os.path.isfile(path):
        return builtins.__import__(name, *arguments, **options)
    return _import_file(path)


def short_repr(value: Any) -> str:
    """Return the start of a value's repr, or its type if repr fails (as for an int with thousands of digits)."""
    try:
        return repr(value)[:MAX_REPR]
    except Exception:
        return f"a value of {type(value)} whose repr failed"


def users_traceback(error: BaseException) -> str:
    """Format a traceback without this package's leading frames, and without the middle if it is very long."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    if len(text) <= MAX_TRACEBACK:
        return text
    half_length = MAX_TRACEBACK // 2
    return f"{text[:half_length]}\n...\n{text[-half_length:]}"
