"""Print the size of the repository, and fail above its limits (CONTRIBUTING.md, "What to add where").

Code is measured in Python tokens without comments, docstrings and line ends; documentation in words. "Executed" counts
the tokens in function bodies that two steps of `train_grpo.py` execute on one rank: the code that a reader of the
default run must know. Only the first calls of each function are traced, so that tracing takes seconds.
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
    "library and scripts": 95_500,
    "core (without minirl/extras)": 77_275,
    "executed by two default steps": 27_950,
    "tests": 105_340,
    "benchmarks": 13_700,
    "words of README, AGENTS and docs": 7_500,
    "flags of a script": 60,
}
# Tokens between statements, or at the end of one.
LAYOUT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
NUM_FOLLOWED_CALLS = 50


def tokens_by_line(path: Path) -> Counter[int]:
    """Count the tokens that begin on each line of a file."""
    counts: Counter[int] = Counter()
    is_start = True  # at the start of a statement, a string is a docstring
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
    """Count the tokens of files."""
    return sum(tokens_by_line(path).total() for path in paths)


def lines_in_functions(tree: ast.Module) -> dict[int, int]:
    """Map each line of a function body to the first line of its statement."""
    first_lines: dict[int, int] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            # `walk` visits outer statements first, so inner ones overwrite them.
            for statement in (node for part in function.body for node in ast.walk(part)):
                if isinstance(statement, ast.stmt):
                    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
                    is_block = hasattr(statement, "body")
                    first_lines |= {line: line if is_block else statement.lineno for line in lines}
    return first_lines


@contextlib.contextmanager
def executed_lines(paths: Iterable[Path]) -> Iterator[set[tuple[str, int]]]:
    """Collect the lines that these files execute, in all threads of this process, as (file, line)."""
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
    """Return the lines that two steps of `train_grpo.py` execute in a single process, as (file, line)."""
    sys.path.insert(0, str(ROOT))
    import train_grpo

    with tempfile.TemporaryDirectory() as runs, contextlib.redirect_stdout(io.StringIO()):
        os.environ["MINIRL_RUNS"] = runs
        # The first run creates the embedded model, which takes longer than two steps.
        train_grpo.main(train_grpo.Config(num_steps=1))
        with executed_lines([*SCRIPTS, *LIBRARY]) as executed:
            assert train_grpo.main(train_grpo.Config(num_steps=2)) == 0
    return executed


def measured() -> dict[str, int]:
    """Measure the sizes named in `LIMITS`."""
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
    """Print the sizes and exit, with status 1 if one is above its limit."""
    sizes = measured()
    for name, limit in LIMITS.items():
        print(f"{sizes[name]:8,} of {limit:8,}  {name}")
    too_large = [name for name, limit in LIMITS.items() if sizes[name] > limit]
    if too_large:
        print(
            f"too large: {', '.join(too_large)}; remove as much as you add, see CONTRIBUTING.md, What to add where"
        )
    sys.stdout.flush()
    os._exit(bool(too_large))  # gloo's threads occasionally abort a normal interpreter exit


if __name__ == "__main__":
    main()
