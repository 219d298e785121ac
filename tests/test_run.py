"""Runs around the training loop: resuming, references, old logprobs, missing rewards and zero gradients."""

import contextlib
import itertools
import shutil
from functools import partial
from pathlib import Path
from statistics import fmean
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
from minirl.errors import InputError
from minirl.generation import engine
from minirl.generation.sampling import sample
from minirl.run import setup
from support.marks import slow
from support.models import RAW_CONFIG, make_folder, moved_weights
from support.scripts import (
    SCRIPTS,
    read_metrics,
    read_rollouts,
    reward_of,
    run_in_pool,
    trained,
    untimed,
    write_rows,
)

TINY = "--num-steps 2 --prompts-per-step 4 --group-size 4 --save-every 1"


def test_the_reference_is_the_runs_initial_model(tmp_path):
    """Resuming with another --model would change the run's KL terms."""
    run = mock.Mock()
    run.config = train_grpo.Config(kl_coef=0.1)
    run.folder.args = {"reference_weights": 1}
    run._initial_model_folder.return_value = make_folder(tmp_path, RAW_CONFIG)
    with pytest.raises(
        InputError, match="not the run's initial model, which its KL terms use as the reference"
    ):
        setup.Setup.load_frozen(run, mock.Mock())
    run.folder.args = {"reference_weights": run._reference_weights}
    assert len(setup.Setup.load_frozen(run, mock.Mock())) == 1


@pytest.mark.slow
def test_row_51_a_finished_run_continues_with_more_steps_without_its_initial_model(
    one_rank, runs, embedded_model, tmp_path
):
    """With a constant learning rate, the metrics equal those of one run with all steps. A note lists changed flags.

    The first start finds a gap between sampled and training logprobs; the resume keeps the correction.

    Fault 13. The last lines name checkpoint, metrics and rollouts. The copy of the script in the run folder can resume
    the run.
    """
    model = shutil.copytree(embedded_model, tmp_path / "model")
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": f"{i}32=", "answer": "2"} for i in range(10)])
    flags = f"{TINY} --model {model} --lr 1e-3 --lr-schedule constant --eval-every 1 --data {data} --eval-data {data}"
    flags += f" --max-new-tokens 20 {reward_of(tmp_path, 'float(len(c))')}"

    def train(name, num_steps, **options):
        how = f"--run-name {name} --num-steps {num_steps}"
        return run_in_pool(one_rank, "train_grpo.py", flags, how, runs=runs, **options)

    with_gap = partial(mock.patch, "minirl.run.setup.is_batch_invariant", return_value=False)

    for line in train("whole", 3).splitlines()[-3:]:
        assert Path(line.split()[1]).exists()
    assert "bitwise: False, correction: token_truncate\n" in train("grown", 2, under=with_gap)
    shutil.rmtree(model)
    assert "already finished; raise --num-steps to continue the run" in train("grown", 2)
    copy = shutil.copy(tmp_path / "mine.py", runs / "grown")
    output = train("grown", 3, under=partial(mock.patch, "sys.argv", [copy]))
    assert "note: --num-steps is 3; the run last started with 2\n" in output
    grown, whole = ([untimed(line) for line in read_metrics(runs / name)] for name in ("grown", "whole"))
    assert len(grown) == 3
    assert grown == whole


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "auto sampled auto scored"),
        ({"correction": "none", "max_staleness": 8}, "sampled sampled sampled sampled"),
        ({"max_staleness": 8, "kl_coef": 0.1}, "auto scored auto scored"),
        ({"max_staleness": 8, "kl_reward_coef": 0.1}, "scored scored scored scored"),
        ({"teacher": "model"}, "auto sampled scored scored"),
    ],
)
def test_the_ratio_or_importance_weights_are_to_the_weights_that_sampled(fields, expected):
    """Old logprobs are scored only if neither the sampled logprobs nor the update's own logprobs can be used.

    The update's logprobs come too late for a KL term in the advantages. Cases: one or two updates per step, without or
    with a gap.
    """
    found = [
        setup.old_logprobs_source(
            train_grpo.Config(num_minibatches=number, **fields), logprobs_match=is_exact
        )
        for is_exact in (True, False)
        for number in (1, 2)
    ]
    assert found == expected.split()


@pytest.mark.parametrize("script", [SCRIPTS[0], slow(SCRIPTS[1])])
def test_a_completion_without_a_reward_has_no_advantage_and_no_part_in_the_loss(
    two_ranks, runs, tmp_path, script
):
    """The reward is null in the files, metrics stay finite, and GRPO's baseline is the mean of the other rewards.

    Pitfall 38: with one update per step, the ratio is exactly 1.
    """
    reward = reward_of(tmp_path, "None if c.endswith(tuple('13579')) else float(len(c))")
    flags = f"{TINY} --prompts-per-step 8 --num-minibatches 1 {reward}"
    folder = trained(two_ranks, runs / f"none-{script}", script, flags)
    for step, line in enumerate(read_metrics(folder), 1):
        assert None not in line.values()
        assert line["policy/ratio_max"] == 1
        rollouts = read_rollouts(folder, step)
        without = [rollout for rollout in rollouts if rollout["reward"] is None]
        assert 0 < len(without) == round(len(rollouts) * line["reward/not_applicable"])
        assert {rollout["advantage"] for rollout in without} == {0}
        rewards = [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]
        assert line["reward/mean"] == pytest.approx(fmean(rewards))
        assert line["count/sampled_tokens"] == sum(rollout["num_tokens"] for rollout in rollouts)
        assert 0 < line["perf/decode_occupancy"] <= 1, "must not count the evaluation before the step"
        for _, group in itertools.groupby(rollouts, lambda rollout: rollout["id"][0]):
            total = sum(rollout["advantage"] for rollout in group)
            assert script == "train_ppo.py" or total == pytest.approx(0, abs=1e-5)


def take_stop_token(*arguments):
    sampled = sample(*arguments)
    sampled[0] = 0
    return sampled


def ending_at_once():
    """Patch sampling so that every completion ends at once."""
    return mock.patch.object(engine, "sample", take_stop_token)


@pytest.mark.parametrize("script", ["train_grpo.py", slow("train_ppo.py")])
@pytest.mark.parametrize(
    ("row", "flags", "metric"),
    [
        ("row-28-equal-rewards", "", "reward/frac_equal_groups"),
        ("row-29-empty", "", "len/mean"),
        ("row-30-truncated", "--max-new-tokens 1", "len/truncated"),
    ],
)
def test_a_step_with_zero_gradient_is_finite(two_ranks, runs, tmp_path, script, row, flags, metric):
    """Ranks stay in sync. If all advantages or loss weights are 0 (GRPO), no weight moves.

    One rollout is still computed, to measure the logprob gap.
    """
    is_grpo = script == "train_grpo.py"
    if is_grpo and row == "row-30-truncated":
        flags += " --drop-truncated"
    under = ending_at_once if row == "row-29-empty" else contextlib.nullcontext
    reward = reward_of(tmp_path, "1.0")
    folder = trained(two_ranks, runs / f"{row}-{script}", script, TINY, flags, reward, under=under)
    lines = read_metrics(folder)
    assert [line[metric] for line in lines] == [1, 1]
    assert not any(None in line.values() for line in lines), "a metric is non-finite"
    first, last = sorted(folder.glob("checkpoints/*"))
    weights = load_file(last / "model.safetensors").values()
    assert all(bool(torch.isfinite(weight).all()) for weight in weights)
    if is_grpo:
        for line in lines:
            assert line["optim/grad_norm"] == 0
            assert "policy/logp_gap_max" in line
            assert 0.5 < line["perf/skipped_tokens"] < 1
        assert not any(moved_weights(first, last).values())


@pytest.mark.slow
def test_non_finite_weights_are_never_saved(two_ranks, runs):
    """The run ends at once with the reason, and earlier checkpoints stay intact. Fault 31."""
    flags = f"{TINY} --keep-checkpoints 0"
    folder = trained(two_ranks, runs / "ruined", "train_grpo.py", flags)
    with pytest.raises(AssertionError, match="after this update, the norm of the weights is inf"):
        run_in_pool(
            two_ranks, "train_grpo.py", f"{flags} --num-steps 6 --lr 9e18 --run-name ruined", runs=runs
        )
    saved = list(folder.glob("checkpoints/*/model.safetensors"))
    assert len(saved) >= 2
    assert all(bool(tensor.isfinite().all()) for path in saved for tensor in load_file(path).values())
