"""Faults of samples and rewards: steps without a signal stay finite, change nothing, and advise."""

import contextlib
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from minirl.generation import sampling
from minirl.generation.sampling import sample
from support.marks import slow
from support.scripts import read_metrics, reward_of, run_in_pool, trained

SHORT = "--num-steps 2 --prompts-per-step 3 --group-size 2 --save-every 1 --eval-every 0"


def take_stop_token(hidden, head, **options):
    tokens, logprobs = sample(hidden, head, **options)
    return torch.zeros_like(tokens), logprobs


def ending_at_once():
    """A patch under which every completion ends at once."""
    return mock.patch.object(sampling, "sample", take_stop_token)


@pytest.mark.parametrize("script", ["train_grpo.py", slow("train_ppo.py")])
@pytest.mark.parametrize(
    ("row", "flags", "metric"),
    [
        ("row-28-equal-rewards", "", "reward/frac_equal_groups"),
        ("row-29-empty", "", "len/empty"),
        ("row-30-truncated", "--max-new-tokens 1 --drop-truncated", "len/truncated"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("row") else "",
)
def test_a_step_without_signal_is_finite(two_ranks, runs, tmp_path, script, row, flags, metric):
    """Ranks stay in step; where all advantages or weights are 0 (GRPO), no weight moves.

    Then one rollout is computed, which shows the gap.
    """
    if script == "train_ppo.py":
        flags = flags.replace("--drop-truncated", "")
    folder = runs / f"{row}-{script}"
    flags += f" {reward_of(tmp_path, '1.0')} --run-name {folder.name}"
    under = ending_at_once if row == "row-29-empty" else contextlib.nullcontext
    run_in_pool(two_ranks, script, SHORT, flags, runs=runs, under=under)
    lines = read_metrics(folder)
    assert len(lines) == 2
    for line in lines:
        assert all(value is not None for value in line.values()), "something is not finite"
        assert line[metric] == 1
    first, last = map(load_file, sorted(folder.glob("checkpoints/*/model.safetensors")))
    assert all(bool(torch.isfinite(x).all()) for x in last.values())
    if script == "train_grpo.py":
        for line in lines:
            assert line["optim/grad_norm"] == 0
            assert "policy/logp_gap_max" in line
            assert 0.5 < line["perf/skipped_tokens"] < 1
        assert all(torch.equal(first[key], last[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py"])
def test_weights_that_an_update_has_ruined_are_never_saved(two_ranks, runs, script):
    """The run ends at once and says why; the checkpoint before it is as it was, and goes on.

    The first steps may have no gradient, and so no update. Fault 31.
    """
    name = f"ruined-{script}"
    flags = f"{SHORT} --keep-checkpoints 0"
    folder = trained(two_ranks, runs / name, script, flags)
    flags += f" --run-name {name}"
    with pytest.raises(AssertionError, match="after this update the norm of the weights is inf"):
        run_in_pool(two_ranks, script, flags, "--num-steps 6 --lr 9e18", runs=runs)
    for path in (folder / "checkpoints").glob("[0-9]*/**/*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())
    run_in_pool(two_ranks, script, f"{flags} --num-steps 7", runs=runs)
