"""The numbered rows of tests/faults.md and tests/pitfalls.md have tests, and tests name rows that exist.

A test says which rows it holds: `row_12` in its name, `row-12` in a parameter's id, or "Fault 12" or "Pitfall 17" in
its docstring. So tests may move from file to file.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
COUNTS = {"tests/faults.md": 58, "tests/pitfalls.md": 66}
WITHOUT_A_TEST = {"tests/faults.md": {45}, "tests/pitfalls.md": {52}}
REASONS = ("out of scope", "does not apply")
FAULTS_IN_A_NAME = re.compile(r"(?:^|_)rows?[-_](\d\d)(?:_and_(\d\d))?(?!\d)")
IN_A_TEXT = {"tests/faults.md": r"(?i)\bfaults?", "tests/pitfalls.md": r"(?i)\bpitfalls?"}

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> list[ast.Module]:
    """Every test file of the repository, parsed."""
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def functions_in(tree: ast.Module) -> Iterator[FunctionDef]:
    """The test functions of a file, those in classes too."""
    for node in ast.walk(tree):
        if isinstance(node, FunctionDef) and node.name.startswith("test_"):
            yield node


def name_and_ids(function: FunctionDef) -> Iterator[str]:
    """The name of a test and the texts in its decorators, which include the ids of its parameters."""
    yield function.name
    for decorator in function.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def docstring(node: ast.Module | ast.ClassDef | FunctionDef) -> str:
    """On one line; empty if the node has none."""
    return " ".join((ast.get_docstring(node) or "").split())


def faults_in(name: str) -> set[int]:
    """The numbers of the faults in a test's name or id."""
    return {int(number) for match in FAULTS_IN_A_NAME.findall(name) for number in match if number}


def numbers_in(text: str, document: str) -> set[int]:
    """The rows of a document that a docstring names."""
    lists = re.findall(IN_A_TEXT[document] + r" (\d+(?:(?:, | and )\d+)*)", text)
    return set(map(int, re.findall(r"\d+", " ".join(lists))))


def rows_of(document: str) -> dict[int, str]:
    """The numbered rows of a document's tables."""
    lines = (ROOT / document).read_text().splitlines()
    rows = [(int(line.split("|")[1]), line) for line in lines if re.match(r"\| *\d+ *\|", line)]
    assert len(rows) == len(dict(rows)), f"{document} has a number twice"
    return dict(rows)


def rows_with_a_test(document: str) -> set[int]:
    """The rows that some test function names."""
    found: set[int] = set()
    for function in (function for tree in trees() for function in functions_in(tree)):
        found |= numbers_in(docstring(function), document)
        if document == "tests/faults.md":
            found |= {number for name in name_and_ids(function) for number in faults_in(name)}
    return found


@pytest.mark.parametrize("document", COUNTS)
def test_a_list_has_every_number_once(document):
    """No row is lost, and every row has its three cells."""
    rows = rows_of(document)
    assert len(rows) == COUNTS[document]
    for line in rows.values():
        assert line.count("|") == 4, line


@pytest.mark.parametrize("document", COUNTS)
def test_every_row_has_a_test_or_says_why_not(document):
    """A row whose last test is renamed or removed is noticed; a row without a test says why."""
    rows = rows_of(document)
    left_out = {number for number, line in rows.items() if any(reason in line for reason in REASONS)}
    assert left_out == WITHOUT_A_TEST[document]
    assert set(rows) - rows_with_a_test(document) == left_out


@pytest.mark.parametrize("document", COUNTS)
def test_every_row_that_a_docstring_names_is_in_the_list(document):
    """A reader can look up the number that a test, a class or a test file names."""
    documented = (ast.Module, ast.ClassDef, *FunctionDef.__args__)
    nodes = (node for tree in trees() for node in ast.walk(tree) if isinstance(node, documented))
    named = {number for node in nodes for number in numbers_in(docstring(node), document)}
    assert named, "the reader found no number"
    assert named - set(rows_of(document)) == set()
