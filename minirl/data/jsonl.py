"""Tasks from data files, such as JSONL, in which each row has a prompt. All rows are checked before the run starts."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from minirl.data.messages import read_prompt
from minirl.data.task import EPISODE_ARGUMENTS, STANDARD_ARGUMENTS, Row, Task
from minirl.errors import InputError, refuse

# Whitespace, plus the UTF-8 byte order mark that may start a file.
BLANK = b" \t\r\n\xef\xbb\xbf"


def load_jsonl_task(data: str, eval_data: Sequence[str]) -> Task:
    """Load a task without reward functions. Prompts are text or messages; the rows of `eval_data` are held out."""
    return Task(
        name="jsonl",
        train_rows=read_rows(data, _to_row),
        eval_sets={path: read_rows(path, _to_row) for path in eval_data},
        rewards={},
        max_new_tokens=512,
    )


def _to_row(fields: dict[str, Any], origin: str) -> Row:
    """Convert an object with a "prompt", and optionally "tools", to a row. All other fields become columns.

    Raises InputError, naming the origin, if the prompt is invalid or a column's name is reserved for a reward function
    argument.
    """
    refuse(
        not isinstance(fields.get("prompt"), str | list),
        f"{origin}: no field 'prompt' with text or messages among {sorted(fields)}; rename the field with the prompt",
    )
    prompt = read_prompt(fields.pop("prompt"), f"{origin}: field 'prompt'")
    tools = fields.pop("tools", None) or None
    for name in (*STANDARD_ARGUMENTS, *EPISODE_ARGUMENTS):
        refuse(
            name in fields,
            f"{origin}: field {name!r} clashes with a reward-function argument; rename the field",
        )
    return Row(prompt, fields, origin, tools)


def read_rows(source: str, to_row: Callable[[dict[str, Any], str], Row]) -> list[Row]:
    """Read the rows of a JSONL, JSON or Parquet file, a dataset folder or a dataset on the Hub.

    to_row: function that converts an object and its origin, "file:line" or "source row N", to a row, or raises
    InputError. Raises InputError, naming the source and origin, if the source is missing or has no rows, or if a row is
    not an object.
    """
    path = Path(source)
    if path.is_file() and path.suffix != ".parquet":
        origins_and_objects = _json_objects(path)
    else:
        from minirl.extras.hub_data import dataset_objects

        origins_and_objects = dataset_objects(source)
    rows = []
    for origin, fields in origins_and_objects:
        refuse(not isinstance(fields, dict), f"{origin}: expected an object, got {str(fields)[:60]}")
        rows.append(to_row(fields, origin))
    refuse(not rows, f"{source}: no rows")
    return rows


def _json_objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the origin and value of each item of a JSON array, or of each non-blank line."""
    content = path.read_bytes()
    if content.lstrip(BLANK).startswith(b"["):
        for number, item in enumerate(_parse_json(content, str(path)), 1):
            yield f"{path} row {number}", item
        return
    # Split lines only at "\n", because text may contain other line separators.
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip(BLANK):
            origin = f"{path}:{number}"
            yield origin, _parse_json(line, origin)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's fields. Raises InputError for a repeated field, because `json` would drop a value."""
    fields = dict(pairs)
    refuse(len(fields) < len(pairs), f"a field is repeated: {list(fields)}")
    return fields


def _parse_json(text: bytes, origin: str) -> Any:
    """Parse a file or line as JSON. Raises InputError, naming the origin."""
    try:
        return json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        # The causes include other encodings, numbers with thousands of digits and lists nested thousands deep. Drop
        # "line 1" from the message, because its line numbers are not the file's.
        raise InputError(f"{origin}: cannot be read as JSON: {str(error).replace('line 1 ', '')}") from None
