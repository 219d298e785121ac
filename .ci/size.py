"""Print the size of the repository, and fail above its limits: CONTRIBUTING.md says what may enter.

Sizes are Python tokens without comments, docstrings and line ends, and words of the documentation. "Executed" are the
tokens in function bodies that two steps of `train_grpo.py` execute on one rank: what a reader of the default run must
know. A function is followed for its first calls only, so that tracing takes seconds.
"""

import ast
import contextlib
import io
import os
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPTS = [ROOT / "train_grpo.py", ROOT / "train_ppo.py"]
LIBRARY = sorted((ROOT / "minirl").rglob("*.py"))
LIMITS = {
    "library and scripts": 95_600,
    "core (without minirl/extras)": 78_200,
    "executed by two default steps": 28_300,
    "tests": 105_500,
    "benchmarks": 13_700,
    "words of README, AGENTS and docs": 7_500,
    "flags of a script": 60,
}
# What is written between statements, or ends one.
LAYOUT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
NUM_FOLLOWED_CALLS = 50


def tokens_by_line(path: Path) -> Counter[int]:
    """How many tokens begin on each line of a file."""
    counts: Counter[int] = Counter()
    is_start = True  # of a statement: a string there is a docstring
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL):
                continue
            is_docstring = is_start and token.type == tokenize.STRING
            is_start = token.type in LAYOUT
            if not is_start and not is_docstring:
                counts[token.start[0]] += 1
    return counts


def count_tokens(paths: Iterable[Path]) -> int:
    """How many tokens files have."""
    return sum(tokens_by_line(path).total() for path in paths)


def lines_in_functions(tree: ast.Module) -> dict[int, int]:
    """For each line of a function's body the line on which its statement begins."""
    first_lines: dict[int, int] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            # Outer statements come first in `walk`, so inner ones overwrite them.
            for statement in (node for part in function.body for node in ast.walk(part)):
                if isinstance(statement, ast.stmt):
                    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
                    is_block = hasattr(statement, "body")
                    first_lines |= {line: line if is_block else statement.lineno for line in lines}
    return first_lines


@contextlib.contextmanager
def executed_lines(paths: Iterable[Path]) -> Iterator[set[tuple[str, int]]]:
    """Collect the file and line of what these files execute, in all threads of this process."""
    names = set(map(str, paths))
    executed: set[tuple[str, int]] = set()
    num_calls: Counter[CodeType] = Counter()

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        executed.add((frame.f_code.co_filename, frame.f_lineno))
        return follow

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in names or num_calls[frame.f_code] == NUM_FOLLOWED_CALLS:
            return None
        num_calls[frame.f_code] += 1
        return follow

    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield executed
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def lines_of_default_run() -> set[tuple[str, int]]:
    """The file and line of what two steps of `train_grpo.py` execute on this process alone."""
    sys.path.insert(0, str(ROOT))
    import train_grpo

    with tempfile.TemporaryDirectory() as runs, contextlib.redirect_stdout(io.StringIO()):
        os.environ["MINIRL_RUNS"] = runs
        # Making the embedded model takes longer than two steps.
        train_grpo.main(train_grpo.Config(num_steps=1))
        with executed_lines([*SCRIPTS, *LIBRARY]) as executed:
            assert train_grpo.main(train_grpo.Config(num_steps=2)) == 0
    return executed


def measured() -> dict[str, int]:
    """The sizes by the names of `LIMITS`."""
    extras = [path for path in LIBRARY if (ROOT / "minirl" / "extras") in path.parents]
    documents = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "AGENTS.md"]
    library = count_tokens([*LIBRARY, *SCRIPTS])
    executed = lines_of_default_run()
    num_executed = 0
    for path in [*LIBRARY, *SCRIPTS]:
        lines = lines_in_functions(ast.parse(path.read_text()))
        for line, count in tokens_by_line(path).items():
            num_executed += count * (line in lines and (str(path), lines[line]) in executed)
    import train_grpo
    import train_ppo

    return {
        "library and scripts": library,
        "core (without minirl/extras)": library - count_tokens(extras),
        "executed by two default steps": num_executed,
        "tests": count_tokens((ROOT / "tests").rglob("*.py")),
        "benchmarks": count_tokens((ROOT / "benchmarks").rglob("*.py")),
        "words of README, AGENTS and docs": sum(len(path.read_text().split()) for path in documents),
        "flags of a script": max(len(fields(script.Config)) for script in (train_grpo, train_ppo)),
    }


def main() -> None:
    """Print the sizes; ends the process, with status 1 if one is above its limit."""
    sizes = measured()
    for name, limit in LIMITS.items():
        print(f"{sizes[name]:8,} of {limit:8,}  {name}")
    too_large = [name for name, limit in LIMITS.items() if sizes[name] > limit]
    if too_large:
        print(
            f"too large: {', '.join(too_large)}. Take out as much as you put in: CONTRIBUTING.md, What may enter."
        )
    sys.stdout.flush()
    os._exit(bool(too_large))  # gloo's threads now and then abort a process that ends otherwise


if __name__ == "__main__":
    main()
