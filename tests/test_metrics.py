"""Step metrics over simulated ranks, signs of trouble, the files of a log, and the learning rate."""

import contextlib
import itertools
import json
import math
import resource
import shutil
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

import minirl.report.logger
from minirl.data.task import Row
from minirl.errors import SaveError
from minirl.generation.engine_stats import EngineStats
from minirl.ranks import time_account
from minirl.ranks.time_account import WHOLE, spent_on
from minirl.report.logger import Logger, console_line, rollout_records
from minirl.report.metrics import (
    StepMetrics,
    add_clip,
    add_gap,
    add_generation,
    add_rewards,
    add_rollouts,
    add_skipped,
    add_staleness,
    add_tokens,
    derived,
)
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import Rollout, RolloutId
from minirl.training.batch import Batch
from minirl.training.learning_rate import learning_rate
from support.rollouts import in_two_branches
from support.worked import OLD, SAMPLED

ORDINARY = {
    "reward/mean": 0.512,
    "policy/entropy": 0.31,
    "policy/loss": -0.03,
    "policy/kl_old_k3": 0.001,
    "policy/kl_ref_k3": 0.012,
    "policy/clip_frac_low": 0.05,
    "policy/clip_frac_high": 0.07,
    "policy/logp_gap_mean": 1e-8,
    "value/explained_var": 0.61,
    "reward/frac_equal_groups": 0.25,
    "policy/logp_gap_max": 1.2e-7,
    "len/mean": 312.4,
    "len/truncated": 0.05,
    "optim/grad_norm": 0.45,
    "time/decode": 12.34,
    "time/update": 10.23,
    "perf/idle_frac": 0.07,
    "perf/tok_s_gen": 12345.6,
    "eval/reward": 0.456,
}


@pytest.fixture
def reduce_over_ranks(monkeypatch):
    """Each rank's result of `reduce`, for ranks that all live in this process."""

    def reduce_all(*ranks):
        states = []
        gather = "minirl.report.metrics.gather_objects"
        monkeypatch.setattr(gather, lambda mine: states.append(mine) or [mine])
        for metrics in ranks:
            metrics.reduce()
        monkeypatch.setattr(gather, lambda mine: states)
        return [metrics.reduce() for metrics in ranks]

    return reduce_all


@pytest.fixture
def make_logger(monkeypatch, tmp_path):
    """`make_logger(arguments, **options)`: a logger into `tmp_path`, of rank 0 of 1; wandb is off unless asked for."""

    def gather_objects(mine, out=None):
        out[:] = [mine]

    monkeypatch.setattr(minirl.report.logger, "rank", lambda: 0)
    monkeypatch.setattr(minirl.report.logger, "world_size", lambda: 1)
    monkeypatch.setattr(minirl.report.logger.dist, "gather_object", gather_objects)
    return lambda arguments=(), wandb_mode="off", **options: Logger(
        tmp_path, dict(arguments), wandb_mode=wandb_mode, **options
    )


@pytest.fixture
def set_wandb(monkeypatch):
    """`set_wandb(init)`: what `import wandb` gives has this function only."""
    return lambda init: monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))


def strict_json(line):
    """The line as any JSON parser reads it; Python's own extensions NaN and Infinity are refused."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON: {line}")

    return json.loads(line, parse_constant=refuse)


def steps_in(folder):
    """The lines of metrics.jsonl."""
    return [strict_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def make_rollout(num_prompt_tokens, num_sampled, finish_reason="stop", sample=1):
    length = num_prompt_tokens + num_sampled
    tokens = torch.arange(length)
    streams = (tokens >= num_prompt_tokens, torch.zeros(length), torch.zeros(length, dtype=torch.int32))
    return Rollout(tokens, *streams, num_prompt_tokens, RolloutId(4, sample), finish_reason)


def judged(rollouts, rows=(), texts=(), rewards=None):
    rewards = torch.zeros(len(rollouts), 1) if rewards is None else rewards
    return RewardedRollouts(rollouts, list(rows), list(texts), rewards)


def test_means_maxima_and_totals_are_over_parts_and_ranks(reduce_over_ranks):
    """A mean is over observations, however unevenly they came: not a mean of means. A rank may have none.

    Without an observation anywhere a metric is missing, not 0 and not NaN.
    """
    first, second, third = StepMetrics(), StepMetrics(), StepMetrics()
    nothing = torch.tensor([])
    for values in ([1.0], [2.0, 3.0, 6.0], []):
        first.add_values("m", torch.tensor(values))
    second.add("m", 8.0, 4.0)
    second.add("m", torch.tensor(1.0, requires_grad=True), 2)
    for values in ([-5.0, -3.0], [-4.0]):
        first.add_max("max", torch.tensor(values))
    for values in ([-7.0], []):
        second.add_max("max", torch.tensor(values))
    for name in ("none", "some"):
        first.add_values(name, nothing)
    first.add_max("no max", nothing)
    second.add_values("some", torch.tensor([2.0]))
    first.add_total("total", 2)
    first.add_total("total", torch.tensor(3))
    second.add_total("total", 4)
    expected = {"m": 21 / 10, "some": 2.0, "max": -3.0, "total": 9.0}
    assert reduce_over_ranks(first, second, third) == [expected] * 3


def test_sums_keep_their_digits(reduce_over_ranks):
    """Those of integers all of them; a million fp32 values of 0.1 average to fp32's 0.1."""
    metrics = StepMetrics()
    for _ in range(10):
        metrics.add_values("m", torch.full((100_000,), 0.1))
    metrics.add_total("count", torch.tensor([2**53 - 40]))
    for _ in range(19):
        metrics.add_total("count", torch.tensor(1))
    (reduced,) = reduce_over_ranks(metrics)
    assert reduced["m"] == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)
    assert reduced["count"] == 2**53 - 21


@pytest.mark.parametrize("order", itertools.permutations([[1.0], [0.5, math.nan], [2.0]]))
def test_a_nan_is_not_hidden_by_a_maximum(reduce_over_ranks, order):
    """The greatest gap of logprobs is NaN when one of them is, whichever rank and part had it."""
    ranks = [StepMetrics(), StepMetrics()]
    for metrics, values in zip((ranks[0], *ranks), order, strict=True):
        metrics.add_max("max", torch.tensor(values))
    assert math.isnan(reduce_over_ranks(*ranks)[0]["max"])


@pytest.fixture
def clock(monkeypatch):
    """The account of time with a clock that only the test moves: call it with seconds that pass."""
    now = [0.0]
    monkeypatch.setattr(time_account, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    time_account.this_process.begin()

    def pass_by(seconds):
        now[0] += seconds

    yield pass_by
    monkeypatch.undo()
    time_account.this_process.begin()


def test_time_is_counted_once_under_the_innermost_cause_of_the_main_thread(clock):
    """A block within a block takes its time from the outer one, which goes on after an error.

    Time without a cause is the host's, and so is that of other threads: a checkpoint's, or CUDA's backward.
    """
    clock(1)
    with spent_on("decode"):
        clock(2)
        with contextlib.suppress(ValueError), spent_on("wait_ranks"):
            clock(4)
            raise ValueError
        clock(8)
    thread = threading.Thread(target=spent_on("save")(clock), args=(16,))
    thread.start()
    thread.join()
    assert time_account.this_process.take() == (31, {"host": 17, "decode": 10, "wait_ranks": 4})
    clock(32)
    assert time_account.this_process.take() == (32, {"host": 32})


@pytest.mark.parametrize("cause", WHOLE)
def test_an_evaluation_a_save_and_a_refresh_are_counted_whole(clock, cause):
    """Time inside counts as theirs: an evaluation generates and waits, and none of it counts for the step."""

    @spent_on("prefill")
    def generate():
        clock(2)

    with spent_on(cause):
        generate()
        clock(1)
    generate()
    assert time_account.this_process.take() == (5, {"host": 0, cause: 3, "prefill": 2})


def test_a_step_is_all_of_its_causes_and_lasts_from_the_step_before(clock, reduce_over_ranks, monkeypatch):
    """Repeated phases add up; time after a step's end counts in the next one.

    The largest of all ranks, and means over all of them, also over those that have spent nothing on a cause.
    """
    monkeypatch.setattr("minirl.report.metrics.world_size", lambda: 2)
    first, second = StepMetrics(), StepMetrics()
    for _ in range(2):
        first.begin("generate")
        clock(1)
        with spent_on("decode"):
            clock(2)
        first.begin("update")
        clock(4)
    first.begin("own")
    clock(6)
    first.end()
    clock(8)
    second.end()  # in this process too, as if it were one rank
    largest = {"step": 20, "host": 2, "decode": 4, "update": 8, "own": 8}
    means = {"step": 14, "host": 1, "decode": 2, "update": 4, "own": 7}
    expected = {f"time_max/{cause}": spent for cause, spent in largest.items()}
    expected |= {f"time/{cause}": spent for cause, spent in means.items()}
    assert reduce_over_ranks(first, second)[0] == expected


def test_rates_are_per_second_of_what_makes_the_tokens():
    """Of generation and of the update, without waits; the share of waiting; nothing else changes.

    A step of a fork that generates or trains nothing, as one that replays rollouts, has no rate.
    """
    reduced = {"time/prefill": 0.5, "time/decode": 1.5, "time/update": 3.0, "time/update_comm": 1.0}
    reduced |= {"time/wait_ranks": 1.0, "time/wait_rewards": 0.5, "time/host": 0.5, "time/step": 8.0}
    reduced |= {"other": 5.0, "count/tokens": 100.0, "count/sampled_tokens": 120.0}
    rates = {
        "perf/idle_frac": 1.5 / 8,
        "perf/tok_s_gen": 60.0,
        "perf/tok_s_train": 25.0,
        "perf/tok_s_rank": 12.5,
    }
    assert derived(reduced) == {**reduced, **rates}
    assert derived({**reduced, "perf/skipped_tokens": 0.25})["perf/tok_s_train"] == 0.75 * 25
    counts = {"time/step": 1.0, "count/tokens": 100.0, "count/sampled_tokens": 0.0}
    assert derived(counts) == {**counts, "perf/idle_frac": 0, "perf/tok_s_rank": 100}


def test_occupancy_is_of_the_largest_decode_step_and_dropped_requests_are_counted(reduce_over_ranks):
    """8 requests, of which 2 run on alone for as many steps again: 5 of 8. A rank without decode steps has none.

    Requests that the cache dropped within a turn and between two are counted separately, on all ranks.
    """
    ranks = StepMetrics(), StepMetrics()
    counts = {"decode_tokens": 50, "discarded_tokens": 3, "decode_steps": 10, "most_running": 8}
    add_generation(ranks[0], 50, EngineStats(**counts, preemptions=2, drops=3))
    add_generation(ranks[1], 0, EngineStats(preemptions=2))
    (reduced, _) = reduce_over_ranks(*ranks)
    assert reduced["perf/decode_occupancy"] == 5 / 8
    assert (reduced["count/preempted"], reduced["count/dropped"]) == (4, 3)


def test_the_share_that_is_left_out_of_the_update_is_of_completion_tokens(reduce_over_ranks):
    """Every rank knows of all rollouts: the share of the whole step, by tokens and not by rollouts."""
    ranks = StepMetrics(), StepMetrics()
    for metrics in ranks:
        add_skipped(metrics, torch.tensor([6, 1, 1, 2]), [None, 0, 1, None])
    for reduced in reduce_over_ranks(*ranks):
        assert reduced == {"perf/skipped_tokens": 0.8}


def test_rollouts_are_described_by_their_completions(reduce_over_ranks):
    """Lengths count sampled tokens, not the prompt's; a rank without rollouts changes nothing but is counted.

    A rollout of several branches is one completion: its length is that of all, and its end that of the last one.
    """
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    several = in_two_branches(make_rollout(1, 5, "length"))
    assert [branch.finish_reason for branch in several.branches] == ["stop", "length"]
    first, second = StepMetrics(), StepMetrics()
    for metrics, rollouts in ((first, [make_rollout(9, 1), several]), (second, [])):
        add_rollouts(metrics, rollouts, grouped_rewards=rewards)
    assert reduce_over_ranks(first, second)[0] == {
        "len/mean": 3.0,
        "len/max": 5.0,
        "len/truncated": 0.5,
        "len/empty": 0.5,
        "count/tokens": 6.0,
        "count/rollouts": 2.0,
        "finish/stop": 1.0,
        "finish/length": 1.0,
        "env/turns": 2.0,
        "env/tokens": 0.0,
        "reward/mean": 0.75,
        "reward/std": 0.5,
        "reward/frac_equal_groups": 0.5,
    }


def test_rewards_are_told_apart_where_there_are_several(reduce_over_ranks):
    """One mean per function, over all groups; a single one has no separate metric. Pitfall 58."""
    ranks = StepMetrics(), StepMetrics(), StepMetrics()
    correct = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    short = torch.tensor([[-1.0, -3.0], [math.nan, -5.0]])
    rewards = torch.stack([correct, short, torch.full((2, 2), math.nan)], dim=2)
    for metrics in ranks:
        add_rewards(metrics, ["correct", "short", "inapplicable"], rewards)
        add_rewards(metrics, ["correct"], torch.ones(1, 5, 1))
    assert reduce_over_ranks(*ranks)[1] == {"reward/correct": 0.5, "reward/short": -3.0}


def test_tokens_are_described_within_the_loss_mask(reduce_over_ranks):
    """Ratio, clip on each side, KL and entropy of sampled tokens only; an empty microbatch does not count.

    The distance to the reference has its sign, k1 = mean(new - ref), and its low-variance form k3.
    """
    new = torch.tensor([5.0, -1.0, -1.0, -1.5, 1.0])
    entropy = torch.tensor([7.0, 1.0, 2.0, 3.0, 4.0])
    # All sampled ones but the last are beyond their side's bound.
    ratio = torch.tensor([9.0, 1.31, 1.4, 0.79, 3.0])
    to_ref = [0.5, -0.25, 0.5, -0.25]
    batch = Batch(
        (5,),
        torch.arange(5),
        torch.arange(5) > 0,
        torch.zeros(5),
        advantages=torch.tensor([0.0, 1.0, 1.0, -1.0, -1.0]),
        old_logprobs=torch.tensor([0.0, -1.0, -2.0, -1.0, -1.0]),
        ref_logprobs=new - torch.tensor([9.0, *to_ref]),
    )
    metrics = StepMetrics()
    for part in (batch, batch.select([])):
        count = len(part.tokens)
        add_tokens(metrics, part, new[:count], ratio[:count], entropy[:count], sampled_version=None)
        add_clip(metrics, part, ratio[:count], clip_low=0.2, clip_high=0.3)
    (reduced,) = reduce_over_ranks(metrics)
    assert reduced == pytest.approx(
        {
            "policy/entropy": 2.5,
            "policy/ratio_max": 3.0,
            "policy/clip_frac_low": 0.25,
            "policy/clip_frac_high": 0.5,
            "policy/kl_old_k3": sum(math.exp(x) - 1 - x for x in (0.0, 1.0, -0.5, 2.0)) / 4,
            "policy/kl_ref_k1": 0.125,
            "policy/kl_ref_k3": sum(math.exp(-x) - 1 + x for x in to_ref) / 4,
        },
        rel=1e-6,
    )


def test_the_gap_between_sampling_and_training_equals_the_worked_numbers(reduce_over_ranks):
    """Of four responses on two ranks. Pitfall 60."""
    ranks = StepMetrics(), StepMetrics()
    prompt = torch.tensor([8.0])
    for metrics, part in zip(ranks, (slice(0, 8), slice(8, 14)), strict=True):
        old, sampled = (torch.cat([prompt, stream[part].float()]) for stream in (OLD, SAMPLED))
        mask = torch.arange(len(old)) > 0
        micro = Batch((len(old),), mask.long(), mask, torch.where(mask, sampled, -5.0), mask.int())
        add_gap(metrics, micro, old, version=1)
        add_gap(metrics, micro.select([]), old[:0], version=1)
    reduced, _ = reduce_over_ranks(*ranks)
    counts = {"time/step": 1.0, "count/tokens": 14.0, "count/sampled_tokens": 14.0}
    found = {k: v for k, v in derived(reduced | counts).items() if k.startswith("policy/")}
    expected = {
        "policy/logp_gap_mean": 0.135714,
        "policy/logp_gap_max": 0.9,
        "policy/logp_equal_frac": 5 / 14,
    }
    assert found == pytest.approx(expected, abs=6e-7)


def test_the_gap_is_that_of_the_tokens_which_the_present_weights_sampled(reduce_over_ranks):
    """Whatever the logprobs of the others, not finite ones too; a rank without such tokens adds nothing."""
    generator = torch.Generator().manual_seed(0)
    sampled, training = -torch.randint(1, 9, (2, 12), generator=generator) / 8
    versions = torch.tensor([0, 0, 0, 7, 7, 5, 7, 6, 7, 5, 7, 7], dtype=torch.int32)
    is_present = versions == 7
    training[~is_present] = torch.tensor([math.nan, math.inf, -99.0, 99.0, 0.0, -math.inf])
    chosen, whole, none = StepMetrics(), StepMetrics(), StepMetrics()
    micro = Batch((12,), torch.arange(12), versions > 0, sampled, versions)
    add_gap(chosen, micro, training, version=7)
    chosen.refuse_nonfinite(update=0)
    add_gap(whole, micro.replace(loss_mask=is_present), training, version=7)
    for version in (0, 8):
        add_gap(none, micro, training, version=version)
    assert reduce_over_ranks(none)[0] == {}
    (expected,) = reduce_over_ranks(whole)
    assert len(expected) == 3
    assert reduce_over_ranks(chosen, none)[0] == pytest.approx(expected, rel=1e-12)


def test_staleness_is_the_age_of_sampled_tokens_in_steps(reduce_over_ranks):
    """The mean over the ranks; prompts and appended tokens do not count, nor does a rank without rollouts."""

    def staleness_of(*all_versions):
        rollouts = []
        for versions in all_versions:
            version = torch.tensor(versions, dtype=torch.int32)
            tokens = torch.arange(len(versions))
            streams = (version > 0, -tokens, version)
            rollouts.append(Rollout(tokens, *streams, 1, RolloutId(0, 0), "stop"))
        metrics = StepMetrics()
        add_staleness(metrics, rollouts, 12, updates_per_step=4)
        return metrics

    ranks = staleness_of([0, 8, 8, 0, 12], [0, 12]), staleness_of([0, 2, 12, 12, 12]), staleness_of()
    reduced = reduce_over_ranks(*ranks)[0]
    assert reduced == {"stale/age_mean": (1 + 1 + 2.5) / 8}


def said(capsys):
    """The output since the last call, without the steps' lines."""
    return "".join(line for line in capsys.readouterr().out.splitlines(True) if not line.startswith("step "))


def test_console_lines_say_what_was_measured_and_their_columns_do_not_shift():
    """The gap is on every line. A metric of other steps leaves a blank, one of no step has no column."""
    lines = {}
    for name in ("", "reward/mean", "policy/logp_gap_max", "eval/reward"):
        metrics = {key: value for key, value in ORDINARY.items() if key != name}
        lines[name] = console_line(7, 150, metrics, measured=ORDINARY, left_s=216.0)
    assert lines[""].startswith(
        "step   7/150 0:03:36 left reward  0.512 gap 1e-07 kl 0.012 ent 0.31 ev  0.61 "
    )
    assert lines[""].endswith(" eval 0.456")
    assert lines["eval/reward"].endswith(" gnorm  0.45 tok/s  12,346")
    assert lines["reward/mean"].startswith("step   7/150 0:03:36 left reward      - gap 1e-07 kl 0.012 ")
    assert lines["policy/logp_gap_max"].startswith(
        "step   7/150 0:03:36 left reward  0.512 gap     - kl 0.012 "
    )
    few = {"policy/logp_gap_max": 0.0, "teacher/kl_k1": 0.07}
    line = console_line(7, 150, few, measured=few, left_s=3723)
    assert line == "step   7/150 1:02:03 left gap 0e+00 kl 0.070"


def test_console_lines_say_which_wait_takes_over_a_tenth_of_a_step():
    times = {"time/step": 2.0, "time/wait_rewards": 0.46, "time/wait_replies": 0.19}
    assert console_line(7, 150, times, measured={}, left_s=1).endswith(" left wait rewards 23%")


@pytest.mark.parametrize(("seconds", "advice"), [(2.0, "takes 30% of the time: raise --workers"), (0.1, "")])
def test_a_slow_run_is_told_once_which_flag_would_help(make_logger, monkeypatch, capsys, seconds, advice):
    """After 20 steps, by the cause that takes most; a fast run is not."""
    monkeypatch.setattr(minirl.report.logger.time, "monotonic", itertools.count(step=seconds).__next__)
    logger = make_logger()
    times = {"time/step": seconds, "time/wait_rewards": 0.3 * seconds, "time/eval": 0.25 * seconds}
    for step in range(1, 42):
        logger.log(step, times, num_steps=50)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == ([f"note: wait_rewards {advice}"] if advice else [])


def test_the_time_left_is_by_the_steps_of_this_start(make_logger, monkeypatch, capsys):
    """After a resume at step 10, two steps in 20 s leave 80 s for the other eight."""
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(minirl.report.logger.time, "monotonic", lambda: next(clock))
    logger = make_logger(after_step=10)
    logger.log(11, {}, num_steps=20)
    logger.log(12, {}, num_steps=20)
    first, second = capsys.readouterr().out.splitlines()
    assert "step 11/20 0:01:30 left" in first
    assert "step 12/20 0:01:20 left" in second


def test_metrics_and_arguments_are_json(make_logger, set_wandb, capsys, tmp_path):
    """args.json takes any argument; metrics.jsonl has one object per step, in order, with the numbers unrounded.

    Numbers that are not finite keep it readable to other parsers. wandb that is off is not touched.
    """
    set_wandb(fail)
    logger = make_logger({"lr": 1e-6, "data": None, "folder": Path("/data")})
    logger.log(1, {"a": 1 / 3}, num_steps=3)
    logger.log(2, {"b": 2.0}, num_steps=3)
    logger.log(3, {"a": 1.0, "b": math.nan, "c": math.inf, "d": -math.inf}, num_steps=3)
    logger.finish()
    args = json.loads((tmp_path / "args.json").read_text())
    assert args == {"lr": 1e-6, "data": None, "folder": "/data", "wandb_id": args["wandb_id"]}
    *steps, last = steps_in(tmp_path)
    assert steps == [{"step": 1, "a": 1 / 3}, {"step": 2, "b": 2.0}]
    assert last["a"] == 1.0
    assert said(capsys) == ""


def test_rollouts_are_written_with_what_one_wants_to_read(make_logger, tmp_path):
    """One line per rollout in order of ids, with its row, texts, every reward by name, further numbers and its end."""
    logger = make_logger()
    chat = [{"role": "user", "content": "na\u00efve\n?"}]
    rows = [Row(chat, {}, "f:1"), Row("1+1=", {}, "f:2")]
    rewarded = judged(
        [make_rollout(2, 3), make_rollout(1, 1, "length", sample=0)],
        rows,
        ["yes\u2028", "2"],
        torch.tensor([[0.25, 1 / 3], [2.0, -1.0]], dtype=torch.float64),
    )
    episode = {"messages": chat, "segments": [{"kind": "sampled", "text": "2"}], "turns": [{"start": 0}]}
    numbers = {"reward": rewarded.rewards.sum(1), "advantage": torch.tensor([0.5, -0.5]).double()}
    logger.log_rollouts(12, rollout_records(rewarded, ["a", "b"], views=[{}, episode], **numbers))
    logger.log_rollouts(13, rollout_records(judged([]), ["a"], reward=torch.zeros(0)))
    files = {path.name: path.read_text() for path in (tmp_path / "rollouts").iterdir()}
    assert files.keys() == {"000012.jsonl", "000013.jsonl"}
    assert files["000013.jsonl"] == ""
    lines = files["000012.jsonl"].split("\n")
    assert lines[2:] == [""]
    assert strict_json(lines[0]).items() >= {"id": [4, 0], **episode}.items()
    assert strict_json(lines[1]) == {
        "id": [4, 1],
        "row": "f:1",
        "prompt": chat,
        "completion": "yes\u2028",
        "reward": 0.25 + 1 / 3,
        "advantage": 0.5,
        "rewards": {"a": 0.25, "b": 1 / 3},
        "num_tokens": 3,
        "finish_reason": "stop",
    }


def test_other_ranks_write_nothing(monkeypatch, tmp_path):
    """Rank 1 neither makes files nor starts a tracker."""
    monkeypatch.setattr(minirl.report.logger, "rank", lambda: 1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger = Logger(tmp_path, {}, wandb_mode="online")
    logger.log(1, {"a": 1.0}, num_steps=3)
    logger.finish()
    assert list(tmp_path.iterdir()) == []


def fail(*args, **kwargs):
    raise RuntimeError("no network")


def leave(*args, **kwargs):
    raise SystemExit("no network")


@pytest.mark.parametrize("failure", [fail, leave])
@pytest.mark.parametrize("method", ["import", "init", "log", "finish"])
def test_row_39_wandb_that_fails_is_one_line_and_left_alone(
    make_logger, set_wandb, monkeypatch, capsys, tmp_path, method, failure
):
    """Not installed, or without its network, at the start or later: every step is in the file, and it is said once.

    No later step calls it again.
    """
    calls = []

    def broken(*args, **kwargs):
        calls.append(args)
        failure()

    run = types.SimpleNamespace(log=lambda *args, **kwargs: None, finish=lambda: None)
    setattr(run, method, broken)
    set_wandb(broken if method == "init" else lambda **kwargs: run)
    if method == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    logger = make_logger(wandb_mode="online")
    for step in range(3):
        logger.log(step, {"a": 1.0}, num_steps=3)
    logger.finish()
    logger.finish()
    assert len(calls) == (method != "import")
    assert steps_in(tmp_path) == [{"step": step, "a": 1.0} for step in range(3)]
    (printed,) = said(capsys).splitlines()
    assert ("wandb failed and is off" if method in ("import", "init") else "no network") in printed


def test_wandb_gets_arguments_steps_and_mode(make_logger, set_wandb):
    """A tracker that works sees the same numbers as the file."""
    seen = {}
    run = types.SimpleNamespace(log=lambda metrics, step: seen.update({step: metrics}))
    set_wandb(lambda **kwargs: seen.update(kwargs) or run)
    make_logger({"lr": 0.1}, "offline").log(3, {"a": 1.0}, num_steps=3)
    assert (seen["mode"], seen["config"]["lr"], seen[3]) == ("offline", 0.1, {"a": 1.0})


def test_row_40_a_resumed_run_goes_on_in_its_files_and_its_wandb_run(make_logger, set_wandb, tmp_path):
    """The same id; numbers of later steps, half a line of a crash among them, are gone; rollouts beyond `keep` too."""
    started = []
    set_wandb(lambda **kwargs: started.append(kwargs))
    logger = make_logger(wandb_mode="offline")
    for step in (1, 2, 3):
        logger.log(step, {"a": step}, num_steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')
    for after_step in (2, 0):
        make_logger(wandb_mode="offline", after_step=after_step)
        assert steps_in(tmp_path) == [{"step": step, "a": step} for step in range(1, after_step + 1)]
    assert len({kwargs["id"] for kwargs in started}) == 1
    assert {kwargs["resume"] for kwargs in started} == {"allow"}


@pytest.mark.parametrize("damage", [b'{"step": 4, "a"', b"\x00\x00", b'{"a": 1.0}', b'{"step": 4, "a": "1"}'])
def test_row_40_a_damaged_line_costs_no_other_line(make_logger, capsys, tmp_path, damage):
    """Its place is named; a blank line is nothing."""
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps({"step": step, "a": None}).encode() for step in (1, 2, 3)]
    path.write_bytes(b"\n".join([good[0], b"", damage, *good[1:], b""]))
    make_logger(after_step=2)
    assert [line["step"] for line in steps_in(tmp_path)] == [1, 2]
    assert f"{path}:3: " in said(capsys)


@pytest.fixture
def file_limit():
    """`file_limit(n)`: no file of this process grows beyond n bytes; None: as before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes):
        soft = before[0] if num_bytes is None else num_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    limit(None)


def test_row_40_metrics_that_cannot_be_written_are_written_later(make_logger, capsys, tmp_path, file_limit):
    """A full disk costs neither the run nor a line, nor leaves half a line; it is said at each step."""
    path = tmp_path / "metrics.jsonl"
    logger = make_logger()
    logger.log(1, {"a": 1.0}, num_steps=5)
    file_limit(path.stat().st_size + 5)
    before = path.read_bytes()
    for step in (2, 3):
        logger.log(step, {"a": 1.0}, num_steps=5)
        assert path.read_bytes() == before
    with pytest.raises(SaveError, match="metrics of the last 2 steps were not written"):
        logger.finish()
    file_limit(None)
    logger.log(4, {"a": 1.0}, num_steps=5)
    logger.finish()
    assert [line["step"] for line in steps_in(tmp_path)] == [1, 2, 3, 4]
    printed = said(capsys).splitlines()
    assert len(printed) == 3
    assert all(line.startswith(f"warning: {path}: File too large") for line in printed)


def test_row_40_rollouts_that_cannot_be_written_do_not_end_the_run(make_logger, capsys, tmp_path, file_limit):
    """No half file stays; the warning names it. So too where the folder has gone."""
    logger = make_logger()
    records = rollout_records(judged([make_rollout(1, 1)], [Row("1+1=", {}, "f:1")], ["2"]), ["a"])
    file_limit(20)
    logger.log_rollouts(1, records)
    file_limit(None)
    logger.log_rollouts(2, records)
    folder = tmp_path / "rollouts"
    assert [path.name for path in folder.iterdir()] == ["000002.jsonl"]
    shutil.rmtree(folder)
    logger.log_rollouts(3, records)
    first, second = said(capsys).splitlines()
    assert f"{folder}/000001.jsonl: File too large" in first
    assert f"{folder}/000003.jsonl: No such file" in second


@pytest.mark.parametrize(
    ("schedule", "num_updates", "warmup_updates", "rates"),
    [
        ("constant", 6, 4, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        ("linear", 6, 2, [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0]),
        ("linear", 4, 0, [2.0, 1.5, 1.0, 0.5]),
        ("linear", 2, 4, [0.5, 1.0]),
        ("linear", 2, 2, [1.0, 2.0]),
    ],
)
def test_the_learning_rate_warms_up_and_stays_or_sinks(schedule, num_updates, warmup_updates, rates):
    """The first update already moves; the last of the warm-up reaches the peak, of which a longer one only has a part.

    `linear` then sinks in equal steps: the last update still moves, the one that is never made would not.
    """
    how = {"peak": 2.0, "warmup_updates": warmup_updates, "schedule": schedule}
    assert [learning_rate(update, num_updates, **how) for update in range(len(rates))] == rates
