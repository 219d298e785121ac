"""The tables in docs/ are those of the code: metrics, exit codes, presets."""

import inspect
import json
import re
from pathlib import Path

import pytest

import train_grpo
import train_ppo
from minirl import errors
from minirl.collect.collector import Collector
from minirl.collect.episode import Episode, Turns
from minirl.run.flags import flag_of
from support.models import RAW_CONFIG, make_folder
from support.scripts import run_in_pool
from support.texts import TOKENS, save_tokenizer

DOCS = Path(__file__).parent.parent / "docs"
TINY = "--num-steps 2 --prompts-per-step 4 --eval-rows 4 --group-size 4".split()
RUNS = {
    "grpo": ("train_grpo.py", "--kl-coef 0.1"),
    "ppo": ("train_ppo.py", "--kl-reward-coef 0.1 --kl-target 6"),
}
REWARDS = """
def some(completions):
    return [None if len(c) % 2 else 1.0 for c in completions]
def few(completion_ids):
    return [None if len(ids) % 2 else -float(len(ids)) for ids in completion_ids]
"""


def table(name):
    """The rows of all tables of a page, as lists of cells."""
    rows = [
        line.strip("|").split("|") for line in (DOCS / name).read_text().splitlines() if line.startswith("|")
    ]
    return [[cell.strip() for cell in row] for row in rows if not row[0].startswith("---")]


@pytest.mark.parametrize("name", RUNS)
def test_every_metric_of_a_run_is_documented(one_rank, runs, tmp_path, name):
    """With KL terms, several rewards that do not always apply, and an evaluation."""
    (tmp_path / "mine.py").write_text(REWARDS)
    script, flags = RUNS[name]
    rewards = ("--reward", f"{tmp_path}/mine.py:some", f"{tmp_path}/mine.py:few")
    run_in_pool(one_rank, script, *TINY, *flags.split(), *rewards, "--run-name", name, runs=runs)
    documented = {
        metric for row in table("metrics.md") for metric in re.findall(r"`([a-z]+/[\w<>/]+)`", row[0])
    }
    documented |= {name.replace("time/", "time_max/") for name in documented}
    own = {f"{prefix}/{function}" for prefix in ("reward", "eval") for function in ("some", "few", "exact")}
    for line in map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines()):
        assert None not in line.values()
        assert line.keys() - {"step"} - own <= documented
        assert 0 <= line.get("reward/not_applicable", 0) <= 1


def test_every_exit_code_is_documented():
    """Those of the errors that a run ends with on purpose, and no other number below 128."""
    codes = {
        error.exit_code
        for _, error in inspect.getmembers(errors, inspect.isclass)
        if hasattr(error, "exit_code")
    }
    documented = {int(code) for row in table("operation.md") for code in re.findall(r"^\d+$", row[0])}
    assert documented == codes | {1}


def test_the_table_of_algorithms_has_the_presets_and_what_they_set():
    """Name by name and flag by flag; each flag that a page names exists."""
    rows = {row[0].strip("`"): row[2] for row in table("algorithms.md")[1:]}
    assert list(rows) == list(train_grpo.ALGORITHMS)
    for name, preset in train_grpo.ALGORITHMS.items():
        if name == "default":
            continue
        flags = dict(re.findall(r"(--[\w-]+)(?: ([^\s`-][^\s`]*))?", rows[name]))
        assert flags.keys() == {flag_of(field) for field in preset}
        for field, value in preset.items():
            text = flags[flag_of(field)]
            assert text == ("" if value is True else text)
            assert value is True or type(value)(text) == value


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_every_flag_that_a_page_names_exists(page):
    """Of the scripts, of torchrun, of pytest or of the commands that show a run."""
    known = {
        flag_of(field)
        for config in (train_grpo.Config, train_ppo.Config)
        for field in config.__dataclass_fields__
    }
    known |= {
        "--standalone",
        "--nproc-per-node",
        "--nnodes",
        "--signals-to-handle",
        "--max-restarts",
        "--output",
        "--num",
        "--best",
        "--worst",
        "--help",
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", page.read_text()))
    negated = {flag.replace("--no-", "--", 1) for flag in named if flag.startswith("--no-")}
    assert {flag for flag in named if not flag.startswith("--no-")} | negated <= known


def test_the_rollouts_and_the_notebook_of_a_page_run(tmp_path, monkeypatch, capsys):
    """The functions too, on the notebook's engine."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(make_folder(tmp_path / "model", RAW_CONFIG | {"vocab_size": len(TOKENS)}), None)
    *functions, notebook = re.findall(r"```python\n(.*?)```", (DOCS / "rollouts.md").read_text(), re.DOTALL)
    names = {"Episode": Episode, "Turns": Turns, "look_up": str.upper}
    exec(notebook, names)
    assert len(capsys.readouterr().out.splitlines()) == 2 * 4
    assert len(functions) == 2
    for function in functions:
        exec(function, names)
        rewards = {"brevity": names["brevity"]}
        collector = Collector(
            names["engine"], names["prompts"], rewards, rollout=names["rollout"], group_size=2
        )
        assert len(collector.collect(2).rewarded.rollouts) == 4
