"""Read and write JSON and JSON Lines."""

import contextlib
import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from minirl.errors import InputError


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Serialize a value as JSON.

    Sets and arrays become lists, NumPy and torch scalars become numbers, and other objects become strings. Raises
    TypeError for keys that JSON does not support, and ValueError for a value that contains itself.
    """
    return json.dumps(value, indent=indent, default=_to_json_value)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Set):
        return sorted(value, key=repr)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line; skip all other lines, such as a truncated last line. Raises OSError."""
    parsed_lines = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            parsed_lines.append(json.loads(line))
    return [value for value in parsed_lines if isinstance(value, dict)]


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises InputError, naming the file, if the file contains no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}; fetch or save the file again") from None
    if not isinstance(content, dict):
        raise InputError(
            f"{path}: expected a JSON object, got {str(content)[:60]}; fetch or save the file again"
        )
    return content
