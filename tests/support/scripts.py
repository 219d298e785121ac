"""The training scripts as users start them, and what their runs leave."""

import contextlib
import difflib
import importlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from minirl.run import setup
from minirl.run.config import RunConfig
from minirl.run.flags import parse
from support.jobs import ROOT
from support.rank_pool import RankPool

SCRIPTS = ("train_grpo.py", "train_ppo.py")
FAST_LEARNING = "--num-steps 40 --prompts-per-step 32 --num-minibatches 4"


def extended_fork(folder: Path, script: str, text: str, *, name: str) -> Path:
    """A copy of the script with more text before its last lines, which run it."""
    fork = folder / f"{name}_{script}"
    head, guard, tail = (ROOT / script).read_text().partition('if __name__ == "__main__":')
    fork.write_text(head + text + guard + tail)
    return fork


def changed_fork(folder: Path, name: str, *changes: dict[str, str]) -> str:
    """A copy of train_grpo.py with these lines replaced; at most 10 are new and not blank."""
    original = (ROOT / "train_grpo.py").read_text()
    changed = original
    for old, new in itertools.chain(*(change.items() for change in changes)):
        assert changed.count(old) == 1, old
        changed = changed.replace(old, new)
    lines = list(difflib.ndiff(original.splitlines(), changed.splitlines()))
    assert sum(line.startswith("+ ") and line.strip() != "+" for line in lines) <= 10
    fork = folder / f"{name}.py"
    fork.write_text(changed)
    return str(fork)


def objectives() -> dict[str, str]:
    """The items of docs/objectives.md, by the names of their diffs."""
    page = (ROOT / "docs" / "objectives.md").read_text()
    items = map(" ".join, map(str.split, page.split("\n- ")[1:]))
    return {re.findall(r"\[(.*?)\]", item)[0]: item for item in items}


def objective_fork(folder: Path, name: str) -> str:
    """The script that an item of docs/objectives.md makes with its patch; at most 15 lines are new."""
    (path,) = re.findall(r"\]\((objectives/\w+\.diff)\)", objectives()[name])
    patch = ROOT / "docs" / path
    added = re.findall(r"^\+(?!\+\+ ) *\S", patch.read_text(), re.MULTILINE)
    assert len(added) <= 15
    return patched_fork(folder, patch, name=f"objective_{patch.stem}")


def patched_fork(folder: Path, patch: Path, *, name: str) -> str:
    """The script that a patch changes, patched, under this name."""
    script = re.search(r"^--- (?:a/)?(train_\w+\.py)", patch.read_text(), re.MULTILINE)
    assert script is not None, f"{patch} changes no script"
    fork = folder / f"{name}.py"
    subprocess.run(["patch", "-s", "-o", fork, ROOT / script[1], patch], check=True)
    return str(fork)


def words(flags: Iterable[str]) -> list[str]:
    """The command line of several texts."""
    return " ".join(flags).split()


def run_in_pool(
    pool: RankPool,
    script: str,
    *flags: str,
    runs: Path,
    under: Callable[[], Any] = contextlib.nullcontext,
) -> str:
    """Run a script's main on every rank of a pool; what rank 0 printed.

    script: the name of one of the original ones, or the path of a fork, under a name that no other fork has.
    flags: of the command line; here and below a text may have several, such as "--lr 1 --seed 2".
    under: makes a context to run it in.
    """
    return pool.run(_run_main, script, str(runs), flags, under)[0]


def load_script(script: str) -> Any:
    """The module of an original script or a fork, named as for `run_in_pool`."""
    path = ROOT / script
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def read_config(module: Any, flags: Iterable[str]) -> Any:
    """The config of a script's module by the command line of several texts."""
    presets = getattr(module, "ALGORITHMS", None)
    return parse(module.Config, description="", presets=presets, arguments=words(flags))


def _run_main(
    rank: int,
    script: str,
    runs: str,
    flags: tuple[str, ...],
    under: Callable[[], Any] = contextlib.nullcontext,
) -> str:
    os.environ["MINIRL_RUNS"] = runs
    module = load_script(script)
    config = read_config(module, flags)
    with under(), contextlib.redirect_stdout(io.StringIO()) as printed:
        code = module.main(config)
    assert code == 0, f"exit code {code}"
    return printed.getvalue()


def evaluated(pool: RankPool, *flags: str, runs: Path, **variables: str) -> dict[str, Any]:
    """The JSON that an evaluation on every rank of a pool prints on rank 0. variables: environment variables."""
    first, *others = pool.run(_evaluate, str(runs), flags, variables)
    assert not any(others), "only rank 0 prints"
    return json.loads(first)


def _evaluate(rank: int, runs: str, flags: tuple[str, ...], variables: dict[str, str]) -> str:
    os.environ.update(variables, MINIRL_RUNS=runs)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        from minirl.extras import evaluate

        assert evaluate.main(evaluate.parse_config(words(flags))) == 0
    return printed.getvalue()


def trained(
    pool: RankPool, folder: Path, script: str, *flags: str, under: Any = contextlib.nullcontext
) -> Path:
    """The folder of a run by `run_in_pool`, made once for all tests that read it."""
    if not folder.exists():
        run_in_pool(pool, script, *flags, f"--run-name {folder.name}", runs=folder.parent, under=under)
    return folder


def all_held_out() -> Any:
    """As many held-out rows as outside of tests."""
    return mock.patch.object(RunConfig, "eval_rows", 256)


def scored_before_the_update() -> Any:
    """A scoring pass gives the old logprobs, whatever the sampled ones are."""
    return mock.patch.object(setup, "old_logprobs_source", return_value="scored")


def reward_of(folder: Path, text: str) -> str:
    """The flag of a new reward, `mine`, which is this expression of each completion `c`."""
    (folder / "mine.py").write_text(f"def mine(completions):\n    return [{text} for c in completions]\n")
    return f"--reward {folder}/mine.py:mine"


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict]:
    return list(map(json.loads, path.read_text().splitlines()))


def read_metrics(folder: Path) -> list[dict]:
    return read_rows(folder / "metrics.jsonl")


def read_rollouts(folder: Path, step: int) -> list[dict]:
    return read_rows(folder / f"rollouts/{step:06d}.jsonl")


def untimed(line: dict) -> dict:
    """The numbers of a step that a second run must repeat: all but seconds and numbers computed from them."""
    return {k: v for k, v in line.items() if not k.startswith(("time", "perf/tok_s_", "perf/idle"))}
