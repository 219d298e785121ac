"""JSON in files. In others' files a key that an object has twice is refused; json would take the last."""

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.errors import InputError


def _object_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {repeated!r} is there twice")
    return values


# json.loads would make one for each text, which takes longer than to read a row of data.
_DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for a key that an object has twice, or RecursionError."""
    return _DECODER.decode(text)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a run's file with one on each line, without lines that a kill cut off. Raises OSError."""
    objects = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            objects.append(json.loads(line))
    return objects


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises InputError naming the file if it holds something else."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise InputError(f"{path}: not JSON: {where}; fetch or save it again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}; fetch or save it again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {str(content)[:60]}; fetch or save it again")
    return content
