"""Tasks from JSONL files: one object with a prompt per line. Files are checked before the run starts."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minirl.data.task import STANDARD_ARGUMENTS, Row, Task
from minirl.errors import InputError
from minirl.files.json_files import parse_json


def load_jsonl_task(data: str, eval_data: Sequence[str], *, prompt_field: str) -> Task:
    """Load a task without rewards; `prompt_field` has text or chat prompts, the files `eval_data` are held out."""
    return Task(
        name=Path(data).stem,
        train_rows=read_rows(data, prompt_field),
        eval_sets={path: read_rows(path, prompt_field) for path in eval_data},
        rewards={},
        max_new_tokens=256,
    )


def read_rows(path: str, prompt_field: str) -> list[Row]:
    """Read all rows of a file; other fields become columns.

    Raises InputError naming file, line and field of the first bad row.
    """
    rows = []
    for place, fields in read_objects(path):
        if prompt_field not in fields:
            raise InputError(f"{place}: no field {prompt_field!r}, only {sorted(fields)}; see --prompt-field")
        prompt = fields[prompt_field]
        if not _is_prompt(prompt):
            found = f"{place}: field {prompt_field!r} is {str(prompt)[:60]!r}"
            expected = "expected text, or messages with role and content"
            others = f"the row has {sorted(fields)}, see --prompt-field"
            raise InputError(f"{found}; {expected}; {others}")
        reserved = [name for name in STANDARD_ARGUMENTS if name in fields and name != prompt_field]
        if reserved:
            raise InputError(
                f"{place}: field {reserved[0]!r} has the name of an argument that every reward function gets; "
                "rename the field"
            )
        columns = {name: value for name, value in fields.items() if name != prompt_field}
        rows.append(Row(prompt, columns, place))
    return rows


def read_objects(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file, each after its place "file:line". Blank lines are skipped.

    Raises InputError naming file and line if the file is missing or empty, or a line is not an object.
    """
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}")
    num_objects = 0
    # Read as bytes: only "\n" ends a line, while a text may contain other line separators.
    with open(path, "rb") as file:
        for number, raw_line in enumerate(file, 1):
            place = f"{path}:{number}"
            # A file may begin with a byte order mark.
            encoding = "utf-8-sig" if number == 1 else "utf-8"
            try:
                line = raw_line.decode(encoding)
            except UnicodeDecodeError as error:
                raise InputError(f"{place}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
            if line.strip():
                yield place, _parse_object(line, place)
                num_objects += 1
    if num_objects == 0:
        raise InputError(f"{path}: no rows")


def _parse_object(line: str, place: str) -> dict[str, Any]:
    try:
        fields = parse_json(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        # For example a key that is there twice, a number of thousands of digits, lists nested thousands deep.
        raise InputError(f"{place}: cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise InputError(f"{place}: expected an object, got {line.strip()[:60]}")
    return fields


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(_is_message(message) for message in prompt)
    return isinstance(prompt, str) and bool(prompt.strip())


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
