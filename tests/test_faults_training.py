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
        ("row-29-empty", "", "len/mean"),
        ("row-30-truncated", "--max-new-tokens 1", "len/truncated"),
    ],
)
def test_a_step_without_signal_is_finite(two_ranks, runs, tmp_path, script, row, flags, metric):
    """Ranks stay in step; where all advantages or weights are 0 (GRPO), no weight moves.

    Then one rollout is computed, which shows the gap.
    """
    is_grpo = script == "train_grpo.py"
    if is_grpo and row == "row-30-truncated":
        flags += " --drop-truncated"
    under = ending_at_once if row == "row-29-empty" else contextlib.nullcontext
    reward = reward_of(tmp_path, "1.0")
    folder = trained(two_ranks, runs / f"{row}-{script}", script, SHORT, flags, reward, under=under)
    lines = read_metrics(folder)
    assert [line[metric] for line in lines] == [1, 1]
    assert not any(None in line.values() for line in lines), "something is not finite"
    first, last = map(load_file, sorted(folder.glob("checkpoints/*/model.safetensors")))
    assert all(bool(torch.isfinite(x).all()) for x in last.values())
    if is_grpo:
        for line in lines:
            assert line["optim/grad_norm"] == 0
            assert "policy/logp_gap_max" in line
            assert 0.5 < line["perf/skipped_tokens"] < 1
        assert all(torch.equal(first[key], last[key]) for key in first)


@pytest.mark.slow
def test_weights_that_an_update_has_ruined_are_never_saved(two_ranks, runs):
    """The run ends at once and says why; the checkpoints before it are as they were. Fault 31."""
    flags = f"{SHORT} --keep-checkpoints 0"
    folder = trained(two_ranks, runs / "ruined", "train_grpo.py", flags)
    with pytest.raises(AssertionError, match="after this update the norm of the weights is inf"):
        run_in_pool(
            two_ranks, "train_grpo.py", f"{flags} --num-steps 6 --lr 9e18 --run-name ruined", runs=runs
        )
    saved = list(folder.glob("checkpoints/*/model.safetensors"))
    assert len(saved) >= 2
    assert all(bool(tensor.isfinite().all()) for path in saved for tensor in load_file(path).values())
