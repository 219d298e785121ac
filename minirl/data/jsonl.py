"""Tasks from JSONL files: one object with a prompt per line. The whole file is checked before the run starts."""

import codecs
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minirl.data.messages import read_prompt
from minirl.data.task import EPISODE_ARGUMENTS, STANDARD_ARGUMENTS, Row, Task
from minirl.errors import InputError, refuse

# Whitespace, and the byte order mark with which a file may begin.
BLANK = b" \t\r\n" + codecs.BOM_UTF8


def load_jsonl_task(data: str, eval_data: Sequence[str]) -> Task:
    """Load a task without rewards, whose prompts are texts or chats; the rows of the files `eval_data` are held out."""
    return Task(
        name="jsonl",
        train_rows=read_rows(data, _to_row),
        eval_sets={path: read_rows(path, _to_row) for path in eval_data},
        rewards={},
        max_new_tokens=256,
    )


def _to_row(fields: dict[str, Any], origin: str) -> Row:
    """Return the row of an object with a "prompt" and perhaps "tools"; its other fields become columns.

    Raises InputError naming the origin, also for a column named like an argument of reward functions.
    """
    refuse(
        "prompt" not in fields,
        f"{origin}: no field 'prompt', only {sorted(fields)}; rename the prompt's field",
    )
    prompt = read_prompt(fields.pop("prompt"), f"{origin}: field 'prompt'")
    tools = fields.pop("tools", None)
    for name in (*STANDARD_ARGUMENTS, *EPISODE_ARGUMENTS):
        refuse(
            name in fields,
            f"{origin}: field {name!r} has the name of an argument of reward functions; rename the field",
        )
    return Row(prompt, fields, origin, None if tools == [] else tools)


def read_rows(path: str, to_row: Callable[[dict[str, Any], str], Row]) -> list[Row]:
    """Read a JSONL file, one object per line; blank lines are skipped.

    to_row: makes a row of an object and its origin, "file:line", or raises InputError. Raises InputError naming file
    and line if the file is missing or empty, or a line is not an object.
    """
    refuse(not Path(path).is_file(), f"there is no file {path}")
    rows = []
    # The file is read as bytes, where only "\n" ends a line: text may contain other line separators.
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip(BLANK):
                origin = f"{path}:{number}"
                rows.append(to_row(_parse_object(line, origin), origin))
    refuse(not rows, f"{path}: no rows")
    return rows


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's fields. Raises InputError if two have the same name: `json` would drop one."""
    fields = dict(pairs)
    refuse(len(fields) < len(pairs), f"a field is repeated: {list(fields)}")
    return fields


def _parse_object(line: bytes, origin: str) -> dict[str, Any]:
    """Return the object of a line. Raises InputError naming the origin."""
    try:
        fields = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_reject_duplicate_keys)
    except json.JSONDecodeError as error:
        raise InputError(f"{origin}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        # For example another encoding, a number with thousands of digits, or lists nested thousands deep.
        raise InputError(f"{origin}: cannot be read: {error}") from None
    refuse(not isinstance(fields, dict), f"{origin}: expected an object, got {str(fields)[:60]}")
    return fields
