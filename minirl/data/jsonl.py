"""Tasks from JSONL files: one object with a prompt per line. Files are checked before the run starts."""

import json
import os
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

from minirl.data.task import STANDARD_ARGUMENTS, Row, Task, is_prompt
from minirl.errors import InputError, refuse
from minirl.files.json_files import parse_json


def load_jsonl_task(data: str, eval_data: Sequence[str]) -> Task:
    """Load a task without rewards; its rows have text or chat prompts, the files `eval_data` are held out."""
    return Task(
        name=Path(data).stem,
        train_rows=read_rows(data),
        eval_sets={path: read_rows(path) for path in eval_data},
        rewards={},
        max_new_tokens=256,
    )


def read_rows(path: str) -> "JsonlRows":
    """The rows of a file. Raises like `JsonlRows`."""
    return JsonlRows(path, _to_row)


def _to_row(fields: dict[str, Any], place: str) -> Row:
    """The row of an object: fields other than "prompt" become columns. Raises InputError naming the place."""
    refuse(
        "prompt" not in fields,
        f"{place}: no field 'prompt', only {sorted(fields)}; rename the prompt's field",
    )
    columns = dict(fields)
    prompt = columns.pop("prompt")
    if not is_prompt(prompt):
        found = f"{place}: field 'prompt' is {str(prompt)[:60]!r}"
        raise InputError(f"{found}; expected text, or messages with role and content")
    reserved = [name for name in STANDARD_ARGUMENTS if name in columns]
    if reserved:
        raise InputError(
            f"{place}: field {reserved[0]!r} has the name of an argument that every reward function gets; "
            "rename the field"
        )
    return Row(prompt, columns, place)


class JsonlRows(Sequence[Row]):
    """The rows of a JSONL file, one object per line. Blank lines are skipped.

    The constructor checks all rows and keeps only the places of the lines, 20 bytes a row; each access reads its row
    from the file again. The file stays open, so a file renamed over it is not read.
    """

    def __init__(self, path: str, to_row: Callable[[dict[str, Any], str], Row]):
        """`to_row` makes the row of an object and its place, "file:line", or raises InputError.

        Raises InputError naming file and line if the file is missing or empty, or a line is not an object.
        """
        if not Path(path).is_file():
            raise InputError(f"there is no file {path}")
        self._path = path
        self._to_row = to_row
        self._line_numbers = array("q")
        self._starts = array("q")
        # A hash of each line's bytes: the file may change while the run reads it.
        self._checksums = array("L")
        # Read as bytes: only "\n" ends a line, while a text may contain other line separators.
        self._file = open(path, "rb")  # noqa: SIM115, it stays open
        start = 0
        for number, line in enumerate(self._file, 1):
            text = self._decode(line, number)
            if text.strip():
                self._parse(text, number)
                self._line_numbers.append(number)
                self._starts.append(start)
                self._checksums.append(zlib.crc32(line.rstrip(b"\n")))
            start += len(line)
        self._starts.append(start)
        if not self._line_numbers:
            raise InputError(f"{path}: no rows")

    def __len__(self) -> int:
        return len(self._line_numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Raises InputError naming the line if it has changed since the check."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = self._line_numbers[index]
        place = range(len(self))[index]
        start, end = self._starts[place : place + 2]
        # Blank lines may follow.
        line, _, _ = os.pread(self._file.fileno(), end - start, start).partition(b"\n")
        if zlib.crc32(line) != self._checksums[index]:
            raise InputError(
                f"{self._path}:{number}: has changed since the run began; restore the file and resume, "
                "or start another run with the new data"
            )
        return self._parse(self._decode(line, number), number)

    def _decode(self, line: bytes, number: int) -> str:
        # A file may begin with a byte order mark.
        encoding = "utf-8-sig" if number == 1 else "utf-8"
        try:
            return line.decode(encoding)
        except UnicodeDecodeError as error:
            place = f"{self._path}:{number}"
            raise InputError(f"{place}: not UTF-8: {error.reason} at byte {error.start + 1}") from None

    def _parse(self, text: str, number: int) -> Row:
        place = f"{self._path}:{number}"
        return self._to_row(_parse_object(text, place), place)


def _parse_object(line: str, place: str) -> dict[str, Any]:
    try:
        fields = parse_json(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        # For example a repeated key, a number of thousands of digits, lists nested thousands deep.
        raise InputError(f"{place}: cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise InputError(f"{place}: expected an object, got {line.strip()[:60]}")
    return fields
