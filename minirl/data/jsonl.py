"""Any JSONL file with prompts: one object per line, checked as a whole before anything expensive starts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minirl.data.task import Row, Task
from minirl.errors import InputError


def load_jsonl_task(data: str, eval_data: str | None, *, prompt_field: str) -> Task:
    """A task of `data` (and held-out `eval_data`) with a text or chat prompt in `prompt_field`; without a reward."""
    train_rows = read_rows(data, prompt_field)
    eval_rows = read_rows(eval_data, prompt_field) if eval_data else []
    return Task(Path(data).stem, train_rows, eval_rows, {}, max_new_tokens=256)


def read_rows(path: str, prompt_field: str) -> list[Row]:
    """All rows of a file. Raises InputError naming file, line and field of the first bad one."""
    rows = []
    for place, fields in read_objects(path):
        if prompt_field not in fields:
            raise InputError(f"{place}: no field {prompt_field!r}, only {sorted(fields)}; see --prompt-field")
        if not _is_prompt(prompt := fields[prompt_field]):
            what = f"{place}: field {prompt_field!r} is {str(prompt)[:60]!r}"
            others = f"the row has {sorted(fields)}, see --prompt-field"
            raise InputError(f"{what}; expected text, or messages with role and content; {others}")
        rows.append(Row(prompt, {k: v for k, v in fields.items() if k != prompt_field}, place))
    return rows


def read_objects(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file with their places, "file:line"; blank lines are skipped."""
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}")
    count = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start + 1}"
                ) from None
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
            except (
                ValueError,
                RecursionError,
            ) as error:  # a number of thousands of digits, lists in lists in lists
                raise InputError(f"{path}:{number}: cannot be read: {error}") from None
            if not isinstance(fields, dict):
                raise InputError(f"{path}:{number}: expected an object, got {line.strip()[:60]}")
            count += 1
            yield f"{path}:{number}", fields
    if not count:
        raise InputError(f"{path}: no rows")


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(_is_message(message) for message in prompt)
    return isinstance(prompt, str) and bool(prompt.strip())


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
