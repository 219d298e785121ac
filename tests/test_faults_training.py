"""Faults of what is sampled and rewarded: steps without a signal stay finite, change nothing, and say what to do."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minirl.generation import engine
from minirl.generation.sampling import sample
from support.scripts import run_in_pool

ROOT = Path(__file__).parent.parent
SHORT = "--num-steps 2 --prompts-per-step 3 --group-size 2 --eval-rows 2 --save-every 1 --eval-every 0"


def ends_at_once(sample):
    """A `sample` that takes the stop token first."""

    def stop(hidden, head, **options):
        tokens, logprobs = sample(hidden, head, **options)
        return torch.zeros_like(tokens), logprobs

    return stop


def end_at_once(rank: int, is_on: bool) -> None:
    """From here on every completion of this process ends at once, or no longer."""
    engine.sample = ends_at_once(sample) if is_on else sample


@pytest.mark.parametrize("script", ["train_grpo.py", pytest.param("train_ppo.py", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("row", "flags", "metric", "advice"),
    [
        ("row-28-equal-rewards", "", "reward/frac_equal_groups", "rewards of each prompt are all equal"),
        ("row-29-empty", "", "len/empty", "nearly every completion is empty"),
        (
            "row-30-truncated",
            "--max-new-tokens 1 --drop-truncated",
            "len/truncated",
            "raise --max-new-tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("row") else "",
)
def test_a_step_without_signal_is_finite_and_gives_advice(
    two_ranks, runs, tmp_path, script, row, flags, metric, advice
):
    """Ranks stay in step and say what to do; where all advantages or weights are 0 (GRPO), no weight moves."""
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [1.0] * len(completions)\n")
    if script == "train_ppo.py":
        flags = flags.replace("--drop-truncated", "")
    name = f"{row}-{script}"
    reward = ("--reward", f"{tmp_path}/mine.py:score")
    two_ranks.run(end_at_once, row == "row-29-empty")
    try:
        printed = run_in_pool(
            two_ranks, script, *SHORT.split(), *flags.split(), *reward, "--run-name", name, runs=runs
        )
    finally:
        two_ranks.run(end_at_once, False)
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


@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py"])
def test_weights_that_an_update_has_ruined_are_never_saved(two_ranks, runs, script):
    """The run ends at once and says why; the checkpoint before it is as it was, and goes on.

    The first steps may have no gradient, and so no update.
    """
    name = f"ruined-{script}"
    flags = [*SHORT.split(), "--run-name", name]
    run_in_pool(two_ranks, script, *flags, runs=runs)
    ruinous = ["--num-steps", "6", "--resume", "force", "--lr", "9e18"]
    with pytest.raises(AssertionError, match="after this update the norm of the weights is inf"):
        run_in_pool(two_ranks, script, *flags, *ruinous, runs=runs)
    for path in (runs / name / "checkpoints").rglob("*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())
    output = run_in_pool(two_ranks, script, *flags, "--num-steps", "7", "--resume", "force", runs=runs)
    assert "damaged" not in output
