"""The numbered lists in docs/ and the tests agree: a number has a test or a reason, a named test exists.

Tests are looked for by name in all of tests/, so they may move from file to file.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
NUM_FAULTS = 61
NUM_PITFALLS = 61
OUT_OF_SCOPE = "out of scope"
REASONS = ("does not apply", "not tested")
FAULTS_IN_A_NAME = re.compile(r"(?:^|_)rows?[-_](\d\d)(?:_and_(\d\d))?(?!\d)")
PITFALLS_IN_A_TEXT = re.compile(r"\bpitfalls? (\d+(?:(?:, | and )\d+)*)", re.IGNORECASE)

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


def trees() -> Iterator[ast.Module]:
    """Every test file of the repository, parsed."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        yield ast.parse(path.read_text())


def functions_in(tree: ast.Module) -> Iterator[FunctionDef]:
    """The test functions of a file, those in classes too."""
    for node in ast.walk(tree):
        if isinstance(node, FunctionDef) and node.name.startswith("test_"):
            yield node


def name_and_ids(function: FunctionDef) -> Iterator[str]:
    """The name of a test and the texts in its decorators, among which are the ids of its parameters."""
    yield function.name
    for decorator in function.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def docstrings_in(tree: ast.Module) -> Iterator[str]:
    """The docstrings of a file, its classes and its functions, each on one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FunctionDef):
            yield " ".join((ast.get_docstring(node) or "").split())


def faults_in(name: str) -> set[int]:
    """The numbers of the faults in a test's name or id."""
    return {int(number) for match in FAULTS_IN_A_NAME.findall(name) for number in match if number}


def pitfalls_in(text: str) -> set[int]:
    """The numbers of the pitfalls in a docstring."""
    return {int(number) for match in PITFALLS_IN_A_TEXT.findall(text) for number in re.findall(r"\d+", match)}


def indices_of(document: str) -> list[tuple[int, str]]:
    """The numbered rows of a document's tables: number and line, in order."""
    lines = (ROOT / "docs" / document).read_text().splitlines()
    return [(int(line.split("|")[1]), line) for line in lines if re.match(r"\| *\d+ *\|", line)]


def named_tests(text: str) -> set[str]:
    """The test functions that a text names."""
    return set(re.findall(r"\btest_\w+", text))


def existing_tests() -> set[str]:
    """The names of all test functions."""
    return {function.name for tree in trees() for function in functions_in(tree)}


def faults_with_a_test() -> set[int]:
    """The numbers of faults that some test has in its name or an id."""
    names = (name for tree in trees() for function in functions_in(tree) for name in name_and_ids(function))
    return {number for name in names for number in faults_in(name)}


def test_numbers_are_read_from_names_and_docstrings():
    """The readers that the other tests rely on find what is there, and no other digits."""
    assert faults_in("test_row_02_200_kills_leave_a_checkpoint") == {2}
    assert faults_in("test_rows_43_and_44_a_wrong_flag") == {43, 44}
    assert faults_in("row-24-0-d") == {24}
    assert faults_in("test_overlong_penalty_is_the_reference_row_of_32") == set()
    assert pitfalls_in("Pitfalls 22, 28 and 39 among them; 5 others pass.") == {22, 28, 39}
    assert pitfalls_in("Logged; pitfall 27: those that were cut off. Pitfall 4: all.") == {4, 27}
    assert pitfalls_in("A pitfall of 3 kinds") == set()


@pytest.mark.parametrize(("document", "count"), [("faults.md", NUM_FAULTS), ("pitfalls.md", NUM_PITFALLS)])
def test_a_list_has_every_number_once_and_in_order(document, count):
    """No number is lost or taken twice, and every row has its four cells."""
    rows = indices_of(document)
    assert [number for number, _ in rows] == list(range(1, count + 1))
    for _, line in rows:
        assert line.count("|") == 5, line


def test_every_fault_is_in_the_name_of_a_test_or_out_of_scope():
    """A fault whose test is renamed or removed is noticed, and so is one that is tested after all."""
    rows = indices_of("faults.md")
    left_out = {number for number, line in rows if OUT_OF_SCOPE in line.lower()}
    tested = faults_with_a_test()
    assert tested & left_out == set()
    assert tested | left_out == {number for number, _ in rows}


def test_every_fault_names_a_test_or_is_out_of_scope():
    """A row leads to the tests that hold it."""
    for _, line in indices_of("faults.md"):
        assert named_tests(line) or OUT_OF_SCOPE in line.lower(), line


def test_every_pitfall_of_a_docstring_is_in_the_list():
    """A reader of a test can look up the number that its docstring names."""
    found = {number for tree in trees() for text in docstrings_in(tree) for number in pitfalls_in(text)}
    listed = {number for number, _ in indices_of("pitfalls.md")}
    assert found, "the reader found no pitfall"
    assert found - listed == set()


def test_every_pitfall_names_a_test_or_says_why_not():
    """No row of the list claims something that nothing defends."""
    for _, line in indices_of("pitfalls.md"):
        assert named_tests(line) or any(reason in line.lower() for reason in REASONS), line


@pytest.mark.parametrize("document", ["faults.md", "pitfalls.md"])
def test_every_test_that_a_list_names_exists(document):
    """A test that is renamed or removed takes its name in the list along."""
    named = named_tests((ROOT / "docs" / document).read_text())
    assert named, "the reader found no test"
    assert named - existing_tests() == set()
