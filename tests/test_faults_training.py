"""Faults of what is sampled and rewarded: steps without a signal stay finite, change nothing, and say what to do."""

import contextlib
import io
import json
import os
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minirl.generation import engine

ROOT = Path(__file__).parent.parent
SHORT = dict(num_steps=2, prompts_per_step=3, group_size=2, eval_rows=2, save_every=1, eval_every=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One folder of runs for the module, so that the embedded model is made once."""
    return tmp_path_factory.mktemp("runs")


def ends_at_once(sample):
    """A `sample` that takes the stop token first."""

    def stop(hidden, head, **options):
        tokens, logprobs = sample(hidden, head, **options)
        return torch.zeros_like(tokens), logprobs

    return stop


def train(rank: int, script: str, runs: Path, name: str, options: dict, is_empty: bool) -> str:
    """The script's main in this process; what it prints. `is_empty`: every completion ends at once."""
    os.environ["MINIRL_RUNS"] = str(runs)
    module, sample = runpy.run_path(str(ROOT / script), run_name="imported"), engine.sample
    engine.sample = ends_at_once(sample) if is_empty else sample
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert module["main"](module["Config"](run_name=name, **SHORT | options)) == 0
    finally:
        engine.sample = sample
    return printed.getvalue()


@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py"])
@pytest.mark.parametrize(
    ("row", "options", "metric", "advice"),
    [
        ("row-28-equal-rewards", {}, "reward/frac_equal_groups", "rewards of each prompt are all equal"),
        ("row-29-empty", {}, "len/empty", "nearly every completion is empty"),
        (
            "row-30-truncated",
            dict(max_new_tokens=1, drop_truncated=True),
            "len/truncated",
            "raise --max-new-tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("row") else "",
)
def test_a_step_without_signal_is_finite_and_gives_advice(
    two_ranks, runs, tmp_path, script, row, options, metric, advice
):
    """Ranks stay in step and say what to do; where all advantages or weights are 0 (GRPO), no weight moves."""
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [1.0] * len(completions)\n")
    if script == "train_ppo.py":
        options = {k: v for k, v in options.items() if k != "drop_truncated"}
    options = dict(options, reward=(f"{tmp_path}/mine.py:score",))
    name = f"{row}-{script}"
    printed, _ = two_ranks.run(train, script, runs, name, options, row == "row-29-empty")
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert all(value is not None for value in line.values()), "something is not finite"
        assert line[metric] == 1
    assert printed.count(advice) == 1
    folders = sorted((runs / name / "checkpoints").iterdir())
    first, last = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(bool(torch.isfinite(x).all()) for x in last.values())
    if script == "train_grpo.py":
        assert all(line["optim/grad_norm"] == 0 for line in lines)
        assert all(torch.equal(first[key], last[key]) for key in first)
