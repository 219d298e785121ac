"""Run the training scripts and their forks as users do, and read the files of their runs."""

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


def extended_fork(folder: Path, text: str, *, name: str) -> Path:
    """Make a copy of train_grpo.py with text added before its main guard."""
    fork = folder / f"{name}_train_grpo.py"
    head, guard, tail = (ROOT / "train_grpo.py").read_text().partition('if __name__ == "__main__":')
    fork.write_text(head + text + guard + tail)
    return fork


def changed_fork(folder: Path, name: str, *changes: dict[str, str]) -> str:
    """Make a copy of train_grpo.py with these lines replaced; at most 10 non-blank lines may be new."""
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
    """Return the items of docs/objectives.md, keyed by the names of their diffs."""
    page = (ROOT / "docs" / "objectives.md").read_text()
    items = map(" ".join, map(str.split, page.split("\n- ")[1:]))
    return {re.findall(r"\[(.*?)\]", item)[0]: item for item in items}


def objective_fork(folder: Path, name: str) -> str:
    """Make the fork of an item in docs/objectives.md with its patch; at most 15 lines may be new."""
    (path,) = re.findall(r"\]\((objectives/\w+\.diff)\)", objectives()[name])
    patch = ROOT / "docs" / path
    added = re.findall(r"^\+(?!\+\+ ) *\S", patch.read_text(), re.MULTILINE)
    assert len(added) <= 15
    return patched_fork(folder, patch, name=f"objective_{patch.stem}")


def patched_fork(folder: Path, patch: Path, *, name: str) -> str:
    """Apply a patch to a copy of its script, under this name."""
    script = re.search(r"^--- (?:a/)?(train_\w+\.py)", patch.read_text(), re.MULTILINE)
    assert script is not None, f"{patch} changes no script"
    fork = folder / f"{name}.py"
    subprocess.run(["patch", "-s", "-o", fork, ROOT / script[1], patch], check=True)
    return str(fork)


def words(flags: Iterable[str]) -> list[str]:
    """Split several texts into command-line words."""
    return " ".join(flags).split()


def run_in_pool(
    pool: RankPool,
    script: str,
    *flags: str,
    runs: Path,
    under: Callable[[], Any] = contextlib.nullcontext,
) -> str:
    """Run a script's main on all ranks of a pool; return rank 0's output.

    script: name of an original script, or path of a fork with a unique name.
    flags: command-line flags; here and below, one string may hold several flags, such as "--lr 1 --seed 2".
    under: makes the context manager for the run.
    """
    return pool.run(_run_main, script, str(runs), flags, under)[0]


def load_script(script: str) -> Any:
    """Load the module of an original script or a fork; see `run_in_pool`."""
    path = ROOT / script
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def read_config(module: Any, flags: Iterable[str]) -> Any:
    """Parse the config of a script's module from flags."""
    presets = getattr(module, "ALGORITHMS", None)
    return parse(module.Config, description="", presets=presets, arguments=words(flags))


def _run_main(rank: int, script: str, runs: str, flags: tuple[str, ...], under: Callable[[], Any]) -> str:
    os.environ["MINIRL_RUNS"] = runs
    module = load_script(script)
    config = read_config(module, flags)
    with under(), contextlib.redirect_stdout(io.StringIO()) as printed:
        code = module.main(config)
    assert code == 0, f"exit code {code}"
    return printed.getvalue()


def evaluated(pool: RankPool, *flags: str, runs: Path) -> dict[str, Any]:
    """Evaluate on all ranks of a pool; return rank 0's JSON result."""
    first, *others = pool.run(_evaluate, str(runs), flags)
    assert not any(others), "only rank 0 prints"
    return json.loads(first)


def _evaluate(rank: int, runs: str, flags: tuple[str, ...]) -> str:
    os.environ["MINIRL_RUNS"] = runs
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        from minirl.extras import evaluate

        assert evaluate.main(evaluate.parse_config(words(flags))) == 0
    return printed.getvalue()


def trained(
    pool: RankPool, folder: Path, script: str, *flags: str, under: Any = contextlib.nullcontext
) -> Path:
    """Return a run's folder; if the folder does not exist, run the script first."""
    if not folder.exists():
        run_in_pool(pool, script, *flags, f"--run-name {folder.name}", runs=folder.parent, under=under)
    return folder


def all_held_out() -> Any:
    """Use the default number of held-out rows, which tests reduce."""
    return mock.patch.object(RunConfig, "eval_rows", 256)


def scored_before_the_update() -> Any:
    """Take old logprobs from a scoring pass instead of using sampled logprobs."""
    return mock.patch.object(setup, "old_logprobs_source", return_value="scored")


def reward_of(folder: Path, text: str) -> str:
    """Write a reward function, `mine`, that evaluates an expression of each completion `c`; return its flag."""
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
    """Return the metrics of a step that a second run must reproduce: all except times and values derived from them."""
    return {k: v for k, v in line.items() if not k.startswith(("time", "perf/tok_s_", "perf/idle"))}
