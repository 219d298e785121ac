"""JSON in files."""

import contextlib
import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from minirl.errors import InputError


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON: sets and arrays as lists, numbers of numpy and torch as numbers, other objects as text.

    Raises TypeError or ValueError for keys that are not text, and for a value that contains itself.
    """
    return json.dumps(value, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Set):
        return sorted(value, key=repr)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a run's file of one object per line, and skip other lines, such as a kill leaves. Raises OSError."""
    values = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises InputError naming the file if it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}; fetch or save it again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {str(content)[:60]}; fetch or save it again")
    return content
