"""Step metrics over simulated ranks, the time breakdown and log files."""

import contextlib
import itertools
import json
import math
import sys
import threading
import types
from dataclasses import replace

import pytest
import torch

import minirl.report.logger
from minirl.errors import SaveError
from minirl.generation.engine_stats import EngineStats
from minirl.ranks import time_account
from minirl.ranks.time_account import spent_on
from minirl.report.logger import Logger
from minirl.report.metrics import (
    StepMetrics,
    add_clip_metrics,
    add_generation_metrics,
    add_reward_metrics,
    add_rollout_metrics,
    add_skipped_token_metrics,
    add_token_metrics,
    with_derived_metrics,
)
from minirl.rollouts import EpisodeRecord, RolloutId, TurnRecord, concat_tokens, make_token_stream
from minirl.training.batch import Batch, sequence_infos_from_lengths
from support.processes import file_limit
from support.rollouts import in_two_branches, rollout_of, sampled


@pytest.fixture
def reduce_over_ranks(monkeypatch):
    """Return a function that reduces the metrics of several ranks simulated in this process."""

    def reduce_all(*ranks):
        states = []
        gather = "minirl.report.metrics.gather_objects"
        monkeypatch.setattr(gather, lambda mine: states.append(mine) or [mine])
        for metrics in ranks:
            metrics.reduce()
        monkeypatch.setattr(gather, lambda mine: states)
        return [metrics.reduce() for metrics in ranks]

    return reduce_all


@pytest.mark.parametrize("order", itertools.permutations([[1.0], [0.5, math.nan], []]))
def test_a_maximum_propagates_nan_and_a_metric_without_values_is_missing(reduce_over_ranks, order):
    """This holds for every rank and order, so that the maximum logprob gap never hides a NaN."""
    first, second = ranks = StepMetrics(), StepMetrics()
    for metrics, values in zip((first, second, second), order, strict=True):
        metrics.add_max("nan", torch.tensor(values))
    second.add_max("max", torch.tensor([-5.0, -3.0]))
    first.add_max("none", torch.tensor([]))
    first.add_max("none", torch.tensor([1.0]), weight=0)
    first.add_values("none", torch.tensor([]))
    for reduced in reduce_over_ranks(*ranks):
        assert math.isnan(reduced.pop("nan"))
        assert reduced == {"max": -3.0}


def make_rollout(num_prompt_tokens, num_sampled, finish_reason="stop"):
    completion = concat_tokens(sampled(range(num_sampled), versions=8), make_token_stream([7]))
    return rollout_of(RolloutId(4, 1), range(num_prompt_tokens), completion, finish_reason)


def test_metrics_of_two_ranks_equal_numbers_computed_by_hand(reduce_over_ranks, monkeypatch):
    """Two rollouts (1 token and 3 turns; 5 tokens in 2 branches), and a microbatch of 4 sampled and 1 prompt token.

    Only sampled tokens count. All ranks have all rewards, one of which does not apply, and all lengths. Rank 1 has no
    rollout and an empty microbatch. Pitfall 58: each reward has its own metric. Pitfall 60: the gap is measured only on
    tokens that the current weights sampled.
    """
    monkeypatch.setattr("minirl.report.metrics.world_size", lambda: 2)
    ranks = StepMetrics(), StepMetrics()
    sequences = [
        one._replace(num_loss_tokens=one.num_tokens) for one in sequence_infos_from_lengths([6, 1, 1, 2])
    ]
    rollouts = [make_rollout(9, 1), in_two_branches(make_rollout(1, 5, "length"))]
    rollouts[0] = replace(rollouts[0], episode=EpisodeRecord([TurnRecord(0, 1, "stop")] * 3))
    correct = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    short = torch.tensor([[-1.0, -3.0], [math.nan, -5.0]]).double()
    for metrics, of_rank in zip(ranks, (rollouts, []), strict=True):
        add_rollout_metrics(metrics, of_rank, grouped_rewards=correct)
        add_reward_metrics(metrics, ["correct", "short"], torch.stack([correct, short], dim=2))
        add_skipped_token_metrics(metrics, sequences, [sequences[0], sequences[3]])
    # 8 requests decode for 5 steps, then 2 requests for 5 more steps.
    counts = {"decode_tokens": 50, "discarded_tokens": 3, "decode_steps": 10, "peak_running": 8}
    add_generation_metrics(ranks[0], EngineStats(**counts, preemptions=2, evictions=3))
    add_generation_metrics(ranks[1], EngineStats(preemptions=2))

    new = torch.tensor([5.0, -1.0, -1.0, -1.5, 1.0])
    # All sampled tokens but the last exceed their clip bound.
    ratio = torch.tensor([9.0, 1.31, 1.4, 0.79, 3.0])
    to_ref = [0.5, -0.25, 0.5, -0.25]
    micro = Batch(
        sequence_infos_from_lengths([5]),
        torch.arange(5),
        torch.arange(5) > 0,
        sample_logprobs=torch.tensor([0.0, -1.5, -1.0, math.nan, 1.25]),
        weight_version=torch.tensor([12, 12, 12, 11, 12]),
        advantages=torch.tensor([0.0, 1.0, 1.0, -1.0, -1.0]),
        old_logprobs=torch.tensor([0.0, -1.0, -2.0, -1.0, -1.0]),
        ref_logprobs=new - torch.tensor([9.0, *to_ref]),
    )
    entropy = torch.tensor([7.0, 1.0, 2.0, 3.0, 4.0])
    for metrics, part in zip(ranks, (micro, micro.select([])), strict=True):
        count = len(part.tokens)
        add_token_metrics(metrics, part, new[:count], ratio[:count], entropy[:count], weight_version=12)
        add_clip_metrics(metrics, part, ratio[:count], clip_low=0.2, clip_high=0.3)
    seconds = {"prefill": 0.5, "decode": 1.5, "update": 0.5, "wait_ranks": 1.0, "step": 8.0}
    for cause, spent in seconds.items():
        ranks[0].add_total(f"time/{cause}", spent)
    ranks[0].add_total("count/sampled_tokens", 50)

    reduced = with_derived_metrics(reduce_over_ranks(*ranks)[1])
    assert {name: value for name, value in reduced.items() if not name.startswith("time/")} == pytest.approx(
        {
            "len/mean": 3.0,
            "len/max": 5.0,
            "len/truncated": 0.5,
            "count/tokens": 6.0,
            "count/rollouts": 2.0,
            "finish/stop": 0.5,
            "env/turns_mean": 2.0,
            "env/tokens": 2.0,
            "finish/length": 0.5,
            "reward/mean": 0.75,
            "reward/std": 0.5,
            "reward/frac_equal_groups": 0.5,
            "reward/correct": 0.75,
            "reward/correct/std": 0.5,
            "reward/short": -3.0,
            "reward/short/std": 2.0,
            "perf/skipped_tokens": 0.8,
            "count/sampled_tokens": 50.0,
            "perf/decode_waste": 3 / 50,
            "perf/decode_occupancy": 5 / 8,
            "count/preempted": 4.0,
            "count/dropped": 3.0,
            "policy/entropy": 2.5,
            "policy/ratio_max": 3.0,
            "policy/clip_frac_low": 0.25,
            "policy/clip_frac_high": 0.5,
            "policy/kl_old_k3": sum(math.exp(x) - 1 - x for x in (0.0, 1.0, -0.5, 2.0)) / 4,
            "policy/kl_ref_k3": sum(math.exp(-x) - 1 + x for x in to_ref) / 4,
            "policy/logp_gap_mean": 0.25,
            "policy/logp_gap_max": 0.5,
            "policy/logp_equal_frac": 1 / 3,
            "perf/tok_s_gen": 25.0,
            "perf/tok_s_train": 0.2 * 6 / 0.5,
        },
        rel=1e-6,
    )


@pytest.fixture
def clock(monkeypatch):
    """Return a function that advances the time breakdown's clock by some seconds."""
    now = [0.0]
    monkeypatch.setattr(time_account, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    time_account.this_process.begin()

    def pass_by(seconds):
        now[0] += seconds

    yield pass_by
    monkeypatch.undo()
    time_account.this_process.begin()


def test_time_is_counted_once_under_the_innermost_cause_of_the_main_thread(
    clock, reduce_over_ranks, monkeypatch
):
    """An inner block pauses the outer block, even if the inner block raises. Time without a cause counts as "host".

    Other threads do not count, and a save includes all time inside it. Time after a step's end counts in the next step.
    The mean is over all ranks, including ranks that spent no time on a cause.
    """
    monkeypatch.setattr("minirl.report.metrics.world_size", lambda: 2)
    first, second = StepMetrics(), StepMetrics()  # two simulated ranks
    first.begin("generate")
    clock(1)
    with spent_on("decode"):
        clock(2)
        with contextlib.suppress(ValueError), spent_on("wait_ranks"):
            clock(4)
            raise ValueError
        clock(8)
    first.begin("update")
    clock(16)
    thread = threading.Thread(target=spent_on("save")(clock), args=(32,))
    thread.start()
    thread.join()
    first.end()
    clock(64)
    second.begin("generate")
    with spent_on("save"), spent_on("prefill"):
        clock(128)
    second.end()
    spent = {"step": (63, 192), "host": (1, 0), "decode": (10, 0), "wait_ranks": (4, 0)}
    spent |= {"update": (48, 64), "save": (0, 128)}
    expected = {f"time/{cause}": sum(seconds) / 2 for cause, seconds in spent.items()}
    assert reduce_over_ranks(first, second)[0] == expected


@pytest.fixture
def make_logger(monkeypatch, tmp_path):
    """Return a function that makes a logger on a single rank, writing to `tmp_path`, by default without wandb."""

    def gather_object(mine, gathered):
        gathered[0] = mine

    monkeypatch.setattr(minirl.report.logger.dist, "gather_object", gather_object)
    arguments = {"wandb_id": "4a", "lr": 0.1}
    return lambda wandb_mode="off", **options: Logger(tmp_path, arguments, wandb_mode=wandb_mode, **options)


def steps_in(folder):
    """Parse metrics.jsonl as strict JSON, which has no NaN or Infinity."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def said(capsys):
    """Return the output since the last call, without the steps' lines."""
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("step ")]


def test_console_lines_show_the_steps_metrics_and_the_time_left(make_logger, monkeypatch, capsys):
    """Missing metrics have no column, and waits over 10 % of the step are shown. Only steps since this start count."""
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(minirl.report.logger.time, "monotonic", lambda: next(clock))
    logger = make_logger(after_step=10)
    logger.log(11, {"reward/mean": 0.5123, "policy/logp_gap_max": 1.2e-7}, num_steps=20)
    later = {"policy/logp_gap_max": 0.0, "eval/reward": 0.456, "time/step": 2.0}
    logger.log(12, later | {"time/wait_rewards": 0.46, "time/wait_replies": 0.19}, num_steps=20)
    assert capsys.readouterr().out.splitlines() == [
        "step 11/20 0:01:30 left reward  0.512 gap 1e-07",
        "step 12/20 0:01:20 left gap 0e+00 eval 0.456 wait rewards 23%",
    ]


@pytest.mark.parametrize("method", ["import", "log", "table"])
def test_row_39_a_wandb_error_prints_one_line_and_turns_wandb_off(
    make_logger, monkeypatch, capsys, tmp_path, method
):
    """wandb is not installed, or exits without network, at the start or later. Every step is in metrics.jsonl."""
    calls = []

    def broken(*args, **kwargs):
        calls.append(args)
        raise SystemExit("no network")

    run = types.SimpleNamespace(log=broken, finish=broken)
    wandb = types.SimpleNamespace(init=lambda **kwargs: run, Table=broken)
    monkeypatch.setitem(sys.modules, "wandb", None if method == "import" else wandb)
    logger = make_logger(wandb_mode="online")
    record = {"id": [0, 0], "rewards": {}}
    logger.log_rollouts(0, [record], to_wandb=method == "table")
    for step in range(3):
        logger.log(step, {"a": 1.0}, num_steps=3)
    logger.finish()
    assert len(calls) == (method != "import")
    assert steps_in(tmp_path) == [{"step": step, "a": 1.0} for step in range(3)]
    (printed,) = said(capsys)
    assert "wandb failed; disabling it" in printed


def test_row_40_a_resumed_run_continues_its_files(make_logger, tmp_path):
    """Lines of later steps are deleted. A corrupt line does not affect other lines."""
    logger = make_logger()
    for step in (1, 2, 3):
        logger.log(step, {"a": step}, num_steps=3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\x00\x00\nnull\n{}\n{"step": null}\n' + path.read_bytes())
    make_logger(after_step=2)
    assert [line["step"] for line in steps_in(tmp_path)] == [1, 2]


def test_row_40_a_full_disk_neither_stops_the_run_nor_loses_metrics(make_logger, capsys, tmp_path):
    """Metrics are written later and rollouts dropped, each with a warning. No partial line or file remains.

    Numbers are not rounded, and non-finite numbers are null.
    """
    path = tmp_path / "metrics.jsonl"
    logger = make_logger()
    logger.log(1, {"a": 1 / 3}, num_steps=3)
    before = path.read_bytes()
    with file_limit(len(before) + 5):
        logger.log(2, {"a": 1.0}, num_steps=3)
        assert path.read_bytes() == before
        logger.log_rollouts(2, [{"id": [0, 0], "text": "longer than the limit"}])
        with pytest.raises(SaveError, match="metrics of the last 1 steps could not be written"):
            logger.finish()
    logger.log(3, {"b": math.nan, "c": -math.inf}, num_steps=3)
    assert steps_in(tmp_path) == [
        {"step": 1, "a": 1 / 3},
        {"step": 2, "a": 1.0},
        {"step": 3, "b": None, "c": None},
    ]
    assert list((tmp_path / "rollouts").iterdir()) == []
    for line, file in zip(said(capsys), (path, tmp_path / "rollouts" / "000002.jsonl", path), strict=True):
        assert line.startswith(f"warning: {file}: File too large")
