"""Step metrics over simulated ranks, what is written where, a tracker that fails, and the learning rate."""

import json
import math
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import minirl.metrics
from minirl.batch import Batch, Rollout, RolloutId
from minirl.metrics import Logger, StepMetrics, add_gap, add_rollouts, add_tokens, console_line, with_rates
from minirl.parallel import learning_rate
from minirl.tasks import Row

ORDINARY = {
    "reward/mean": 0.512,
    "policy/entropy": 0.31,
    "policy/kl_ref": 0.012,
    "policy/clip_frac": 0.12,
    "policy/logp_gap_max": 1.2e-7,
    "len/mean": 312.4,
    "len/truncated": 0.05,
    "optim/grad_norm": 0.45,
    "time/generate": 12.34,
    "time/update": 10.23,
    "perf/tok_s_gen": 12345.6,
    "eval/reward": 0.456,
}
LARGE = {
    "reward/mean": -1234.567,
    "policy/entropy": 11.93,
    "policy/kl_ref": 123.456,
    "policy/clip_frac": 1.0,
    "policy/logp_gap_max": 1.5e-7,
    "len/mean": 131072.0,
    "len/truncated": 1.0,
    "optim/grad_norm": 123456.789,
    "time/generate": 12345.678,
    "time/update": 12345.678,
    "perf/tok_s_gen": 1234567.8,
    "eval/reward": -1234.567,
}


@pytest.fixture
def reduce_over_ranks(monkeypatch):
    """What each rank's `reduce` returns, for the metrics of ranks that all live in this process."""

    def reduce_all(*ranks):
        states = []
        monkeypatch.setattr(minirl.metrics, "world_size", lambda: len(ranks))

        def collect(out, mine):
            states.append(mine)
            out[:] = [mine]

        def gather(out, mine):
            assert len(out) == len(ranks)
            out[:] = states

        monkeypatch.setattr(minirl.metrics.dist, "all_gather_object", collect)
        for metrics in ranks:
            metrics.reduce()
        monkeypatch.setattr(minirl.metrics.dist, "all_gather_object", gather)
        return [metrics.reduce() for metrics in ranks]

    return reduce_all


@pytest.fixture
def one_process(monkeypatch):
    """Rank 0 of 1, with the gathers of a group of one."""

    def gather(mine, out=None):
        out[:] = [mine]

    monkeypatch.setattr(minirl.metrics, "rank", lambda: 0)
    monkeypatch.setattr(minirl.metrics, "world_size", lambda: 1)
    monkeypatch.setattr(minirl.metrics.dist, "gather_object", gather)


def strict_json(line):
    """The line as any JSON parser reads it; Python's own extensions NaN and Infinity are refused."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON: {line}")

    return json.loads(line, parse_constant=refuse)


def make_rollout(num_prompt_tokens, num_sampled, finish_reason="stop"):
    length = num_prompt_tokens + num_sampled
    mask = torch.arange(length) >= num_prompt_tokens
    versions = torch.zeros(length, dtype=torch.int32)
    return Rollout(
        torch.arange(length), mask, torch.zeros(length), versions, num_prompt_tokens, RolloutId(4, 1), finish_reason
    )


def test_means_are_weighted_over_parts_and_ranks(reduce_over_ranks):
    """A mean is over observations, however unevenly they came: not a mean of means. All ranks agree."""
    first, second = StepMetrics(), StepMetrics()
    first.add_values("m", torch.tensor([1.0]))
    first.add_values("m", torch.tensor([2.0, 3.0, 6.0]))
    second.add("m", 8.0, 4.0)
    assert reduce_over_ranks(first, second) == [{"m": 20 / 8}] * 2


def test_maxima_and_totals_are_over_all_ranks(reduce_over_ranks):
    """The greatest of all, also when all are negative, and the sum of all; a rank may have none of either."""
    first, second, third = StepMetrics(), StepMetrics(), StepMetrics()
    first.add_max("max", torch.tensor([-5.0, -3.0]))
    first.add_max("max", torch.tensor([-4.0]))
    second.add_max("max", torch.tensor([-7.0]))
    second.add_max("max", torch.tensor([]))
    first.add_total("total", 2)
    first.add_total("total", torch.tensor(3))
    second.add_total("total", 4)
    assert reduce_over_ranks(first, second, third) == [{"max": -3.0, "total": 9.0}] * 3


def test_a_mean_without_observations_is_left_out(reduce_over_ranks):
    """No tokens is not 0 and not NaN: the metric is missing, unless another rank has some."""
    first, second = StepMetrics(), StepMetrics()
    first.add_values("none", torch.tensor([]))
    first.add_values("some", torch.tensor([]))
    first.add_max("max", torch.tensor([]))
    second.add_values("some", torch.tensor([2.0]))
    assert reduce_over_ranks(first, second) == [{"some": 2.0}] * 2


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("bad_first", [True, False])
def test_a_nan_is_not_hidden_by_a_maximum(reduce_over_ranks, bad_rank, bad_first):
    """The greatest gap of logprobs is NaN when one of them is, whichever rank and part had it."""
    ranks = [StepMetrics(), StepMetrics()]
    bad = torch.tensor([0.5, math.nan])
    for rank, metrics in enumerate(ranks):
        parts = [torch.tensor([1.0]), torch.tensor([2.0])]
        if rank == bad_rank:
            parts[0 if bad_first else 1] = bad
        for part in parts:
            metrics.add_max("max", part)
    assert math.isnan(reduce_over_ranks(*ranks)[0]["max"])


def test_sums_of_many_values_keep_their_digits(reduce_over_ranks):
    """Means are summed in double precision: a million fp32 values of 0.1 average to fp32's 0.1."""
    metrics = StepMetrics()
    for _ in range(10):
        metrics.add_values("m", torch.full((100_000,), 0.1))
    assert reduce_over_ranks(metrics)[0]["m"] == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)


def test_timers_add_up_within_a_rank_and_rates_follow(reduce_over_ranks):
    """Two blocks of one phase are both measured; the step's seconds are the phases' and rates are per second."""
    metrics = StepMetrics()
    with metrics.timer("generate"):
        time.sleep(0.02)
    measured = reduce_over_ranks(metrics)[0]
    assert 0.02 <= measured["time/generate"] < 2
    reduced = {"time/generate": 2.0, "time/update": 4.0, "time/report": 1.0, "count/tokens": 100.0, "other": 5.0}
    rates = {"time/step": 7.0, "perf/tok_s_gen": 50.0, "perf/tok_s_train": 25.0}
    assert with_rates(reduced) == {**reduced, **rates}


def test_rollouts_are_described_by_their_completions(reduce_over_ranks):
    """Lengths count sampled tokens, not the prompt's; a rank without rollouts changes nothing but is counted."""
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    first, second = StepMetrics(), StepMetrics()
    add_rollouts(first, [make_rollout(9, 2), make_rollout(1, 4, "length")], grouped_rewards=rewards)
    add_rollouts(second, [], grouped_rewards=rewards)
    assert reduce_over_ranks(first, second)[0] == {
        "len/mean": 3.0,
        "len/max": 4.0,
        "len/truncated": 0.5,
        "count/tokens": 6.0,
        "count/rollouts": 2.0,
        "reward/mean": 0.75,
        "reward/std": 0.5,
        "reward/frac_equal_groups": 0.5,
    }


def test_tokens_are_described_within_the_loss_mask(reduce_over_ranks):
    """Ratio, clip, KL, entropy and gap of sampled tokens only; an empty microbatch is no observation."""
    mask = torch.tensor([False, True, True])
    batch = Batch(
        (3,), torch.arange(3), mask, torch.tensor([9.0, -1.0, -2.0]), advantages=torch.tensor([0.0, 1.0, 1.0])
    )
    new, old, entropy = torch.tensor([5.0, -1.0, -1.0]), torch.tensor([0.0, -1.0, -2.0]), torch.tensor([7.0, 1.0, 2.0])
    metrics = StepMetrics()
    for part in (batch, batch.select([])):
        streams = [x[: len(part.tokens)] for x in (new, old, entropy)]
        add_tokens(metrics, part, *streams, clip_low=0.2, clip_high=0.2)
        add_gap(metrics, part, streams[0])
    reduced = reduce_over_ranks(metrics)[0]
    assert reduced.pop("policy/kl_old") == pytest.approx((math.e - 1 - 1) / 2, rel=1e-6)
    assert reduced.pop("policy/ratio_max") == pytest.approx(math.e, rel=1e-6)
    assert reduced == {
        "policy/entropy": 1.5,
        "policy/clip_frac": 0.5,
        "policy/logp_gap_mean": 0.5,
        "policy/logp_gap_max": 1.0,
        "policy/logp_equal_frac": 0.5,
    }
    reference = StepMetrics()
    add_tokens(reference, batch.replace(ref_logprobs=new), new, old, entropy, clip_low=0.2, clip_high=0.2)
    assert reduce_over_ranks(reference)[0]["policy/kl_ref"] == 0.0


@pytest.mark.parametrize(
    "metrics", [{}, ORDINARY, LARGE, dict.fromkeys(LARGE, 1e30), dict.fromkeys(LARGE, math.nan)], ids=range(5)
)
@pytest.mark.parametrize(("step", "num_steps"), [(1, 150), (99999, 100000)])
def test_a_console_line_fits_the_console(metrics, step, num_steps):
    """One line of at most 120 characters that begins with the step, whatever the numbers."""
    line = console_line(step, num_steps, metrics)
    assert line.startswith("step ")
    assert f"{step}/{num_steps}" in line
    assert "\n" not in line
    assert len(line) <= 120, f"{len(line)} characters: {line}"


def test_console_lines_say_what_was_measured():
    """Reward, KL, gap and evaluation are there to their digits; KL and evaluation only where they were made."""
    line = console_line(7, 150, ORDINARY)
    for part in ("step   7/150", "reward 0.512", "0.012", "1e-07", "0.456"):
        assert part in line
    without = console_line(7, 150, {k: v for k, v in ORDINARY.items() if k not in ("policy/kl_ref", "eval/reward")})
    assert "kl" not in without
    assert "eval" not in without


def test_metrics_and_arguments_are_json(one_process, tmp_path):
    """args.json takes any argument; metrics.jsonl has one object per step, in order, with the numbers unrounded."""
    logger = Logger(tmp_path, {"lr": 1e-6, "data": None, "folder": Path("/data")}, wandb_mode="off")
    logger.log(1, {"a": 1 / 3})
    logger.log(2, {"b": 2.0})
    logger.finish()
    assert json.loads((tmp_path / "args.json").read_text()) == {"lr": 1e-6, "data": None, "folder": "/data"}
    lines = [strict_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "a": 1 / 3}, {"step": 2, "b": 2.0}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_keeps_metrics_jsonl_valid(one_process, tmp_path, value):
    """An overflowed ratio must not make the file unreadable to other parsers; the other numbers stay."""
    Logger(tmp_path, {}, wandb_mode="off").log(1, {"policy/ratio_max": value, "a": 1.0})
    assert strict_json((tmp_path / "metrics.jsonl").read_text())["a"] == 1.0


def test_rollouts_are_written_with_what_one_wants_to_read(one_process, tmp_path):
    """One line per rollout with its id, row, texts, reward, advantage, length and end."""
    logger = Logger(tmp_path, {}, wandb_mode="off")
    chat = [{"role": "user", "content": "na\u00efve\n?"}]
    logger.log_rollouts(12, [make_rollout(2, 3)], [Row(chat, {}, "f:1")], ["yes\u2028"], [1.0], [0.5])
    lines = (tmp_path / "rollouts" / "000012.jsonl").read_text().split("\n")
    assert lines[1:] == [""]
    assert strict_json(lines[0]) == {
        "id": [4, 1],
        "row": "f:1",
        "prompt": chat,
        "completion": "yes\u2028",
        "reward": 1.0,
        "advantage": 0.5,
        "num_tokens": 3,
        "finish_reason": "stop",
    }


def test_other_ranks_write_nothing(monkeypatch, tmp_path):
    """Rank 1 neither makes files nor starts a tracker."""
    monkeypatch.setattr(minirl.metrics, "rank", lambda: 1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger = Logger(tmp_path, {}, wandb_mode="online")
    logger.log(1, {"a": 1.0})
    logger.finish()
    assert list(tmp_path.iterdir()) == []


def fail(*args, **kwargs):
    raise RuntimeError("no network")


@pytest.mark.parametrize("module", [types.SimpleNamespace(init=fail), None], ids=["init_raises", "not_installed"])
def test_wandb_that_does_not_start_is_one_line(one_process, monkeypatch, capsys, tmp_path, module):
    """Without wandb, or without its network, the run logs to files and says so once."""
    monkeypatch.setitem(sys.modules, "wandb", module)
    logger = Logger(tmp_path, {}, wandb_mode="online")
    logger.log(1, {"a": 1.0})
    logger.finish()
    assert strict_json((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": 1.0}
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1
    assert "wandb could not start" in printed[0]


@pytest.mark.parametrize("method", ["log", "finish"])
def test_wandb_that_fails_later_is_one_line_and_left_alone(one_process, monkeypatch, capsys, tmp_path, method):
    """The first failure is printed; no later step calls it again, and every step is in the file."""
    calls = []

    def broken(*args, **kwargs):
        calls.append(args)
        fail()

    run = types.SimpleNamespace(log=lambda *args, **kwargs: None, finish=lambda: None)
    setattr(run, method, broken)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kwargs: run))
    logger = Logger(tmp_path, {}, wandb_mode="online")
    for step in range(3):
        logger.log(step, {"a": 1.0})
    logger.finish()
    logger.finish()
    assert len(calls) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1
    assert "no network" in printed[0]


def test_wandb_gets_the_arguments_the_steps_and_the_mode(one_process, monkeypatch, tmp_path):
    """A tracker that works sees the same numbers as the file."""
    seen = {}
    run = types.SimpleNamespace(log=lambda metrics, step: seen.update({step: metrics}), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kwargs: seen.update(kwargs) or run))
    logger = Logger(tmp_path, {"lr": 0.1}, wandb_mode="offline")
    logger.log(3, {"a": 1.0})
    assert (seen["mode"], seen["config"], seen[3]) == ("offline", {"lr": 0.1}, {"a": 1.0})


def test_wandb_that_is_off_is_not_touched(one_process, monkeypatch, capsys, tmp_path):
    """Without the flag nothing of it is started or said."""
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=fail))
    logger = Logger(tmp_path, {}, wandb_mode="off")
    logger.log(1, {"a": 1.0})
    logger.finish()
    assert capsys.readouterr().out == ""


def schedule(num_updates, warmup_updates, name, peak=2.0):
    return [
        learning_rate(update, num_updates, peak=peak, warmup_updates=warmup_updates, schedule=name)
        for update in range(num_updates)
    ]


def test_learning_rate_warms_up_and_stays():
    """The first update already moves, the last of the warm-up reaches the peak, and constant stays there."""
    assert schedule(6, 4, "constant") == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert schedule(3, 0, "constant") == [2.0, 2.0, 2.0]


def test_linear_learning_rate_reaches_zero_after_the_last_update():
    """Equal steps down from the peak; the last update still moves and the one that is never made would not."""
    assert schedule(6, 2, "linear") == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    assert schedule(4, 0, "linear") == [2.0, 1.5, 1.0, 0.5]
    assert learning_rate(6, 6, peak=2.0, warmup_updates=2, schedule="linear") == 0.0


def test_learning_rate_of_a_run_within_the_warm_up_only_rises():
    """More warm-up than updates is no division by zero and no rate above the peak."""
    assert schedule(2, 4, "linear") == [0.5, 1.0]
    assert schedule(2, 2, "linear") == [1.0, 2.0]
