"""The numbered rows of tests/faults.md and tests/pitfalls.md have tests, and tests name rows that exist.

A test names the rows that it covers: `row_12` in its name, `row-12` in a parameter's id, or "Fault 12" or "Pitfall 17"
in its docstring. Tests may therefore move between files.
"""

import re
from pathlib import Path

import pytest

from support.jobs import ROOT

NUMBERS = r" (\d+(?:(?:, | and )\d+)*)"
NAMED = {
    "tests/faults.md": [r"(?i)\bfaults?" + NUMBERS, r"(?<![a-z])rows?[-_](\d\d(?:_and_\d\d)?)(?!\d)"],
    "tests/pitfalls.md": [r"(?i)\bpitfalls?" + NUMBERS],
}
COUNTS = {"tests/faults.md": 59, "tests/pitfalls.md": 66}
WITHOUT_A_TEST = {"tests/faults.md": {45}, "tests/pitfalls.md": {52}}
REASONS = ("out of scope", "does not apply")


def rows_of(document: str) -> dict[int, str]:
    """Return the numbered rows of a document's tables."""
    lines = (ROOT / document).read_text().splitlines()
    rows = [(int(line.split("|")[1]), line) for line in lines if re.match(r"\| *\d+ *\|", line)]
    assert len(rows) == len(dict(rows)), f"{document} has a number twice"
    return dict(rows)


def named_by_tests(document: str) -> set[int]:
    """Return the numbers of the rows that test files name."""
    files = {*(ROOT / "tests").rglob("test_*.py")} - {Path(__file__)}
    text = " ".join(" ".join(path.read_text().split()) for path in files)
    lists = [found for pattern in NAMED[document] for found in re.findall(pattern, text)]
    return set(map(int, re.findall(r"\d+", " ".join(lists))))


@pytest.mark.parametrize("document", COUNTS)
def test_every_row_has_a_test_or_says_why_not(document):
    """Each number occurs once, with three cells. Renaming or removing a row's last test fails here."""
    rows = rows_of(document)
    assert len(rows) == COUNTS[document]
    assert [line for line in rows.values() if line.count("|") != 4] == []
    left_out = {number for number, line in rows.items() if any(reason in line for reason in REASONS)}
    assert left_out == WITHOUT_A_TEST[document]
    assert set(rows) ^ named_by_tests(document) == left_out
