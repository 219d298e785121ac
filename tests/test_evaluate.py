"""Evaluations, whose scores do not depend on the number of ranks."""

import itertools
import json
import shutil
from statistics import fmean

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from minirl.data.task import Task
from minirl.extras.evaluate import (
    Config,
    bootstrap_interval,
    majority,
    parse_config,
    pass_at_k,
    values_by_prompt,
)
from minirl.generation.sampling import apply_top_k_top_p
from support.sampling import GRID, columns
from support.scripts import evaluated, read_metrics, read_rollouts, trained


def test_pass_at_k_majority_and_interval_match_their_definitions():
    """pass@k is compared with an enumeration of all subsets, and with a case whose binomials overflow floats.

    A tied vote scores the fraction of its samples that are correct; missing answers do not vote. If half of the scores
    are 1, the interval is 1.96 standard errors wide on each side.
    """
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(fmean(map(any, subsets)), abs=1e-15)
    assert pass_at_k(5000, 1, 2500) == 0.5
    assert majority(["7", "8", "7"], [False, True, False]) == 0
    assert majority(["7", "8", None, None, None], [False, True, False, False, False]) == 0.5
    assert majority([None, None], [False, False]) == 0
    low, high = bootstrap_interval([0.0, 1.0] * 200, seed=1)
    assert (low, high) == pytest.approx((0.5 - 0.049, 0.5 + 0.049), abs=0.006)


def record(ordinal, sample, reward, completion, *, row="a.jsonl:1", end="stop", num_tokens=2, **rewards):
    return {
        "id": [ordinal, sample],
        "row": row,
        "reward": reward,
        "rewards": rewards,
        "completion": completion,
        "num_tokens": num_tokens,
        "finish_reason": end,
    }


TASK = Task("jsonl", [], {"a.jsonl": [], "x/b:main": []}, {}, 4, extract_answer=str)


def test_an_evaluations_scores_are_means_over_prompts():
    """Completions without a reward do not count. Each reward and each file has its own mean.

    pass@k averages over the prompts with at least k scored completions. pass@k and majority need weighted rewards that
    are all 0 or 1.
    """
    records = [
        record(0, 0, 0.0, "7", row="x/b:main row 1", exact=0.0, short=-1.0),
        record(0, 1, None, "8", row="x/b:main row 1", exact=None, short=None),
        record(1, 0, 1.0, "7", exact=1.0, short=None),
        record(1, 1, 0.6, "8", exact=1.0, short=-2.0, end="length", num_tokens=6),
    ]
    values = values_by_prompt(records, TASK, weights={"exact": 1.0, "short": 0.0})
    judged = {"eval/pass@1": [0.0, 1.0], "eval/pass@2": [1.0], "eval/majority": [1.0]}
    assert values == judged | {
        "eval/reward": [0.0, 0.8],
        "eval/a/reward": [0.8],
        "eval/b:main/reward": [0.0],
        "eval/exact": [0.0, 1.0],
        "eval/short": [-1.0, -2.0],
        "eval/len_mean": [2.0, 4.0],
        "eval/truncated": [0.0, 0.5],
    }
    shaped = values_by_prompt(records, TASK, weights={"exact": 1.0, "short": 0.1})
    assert values.keys() - shaped.keys() == judged.keys()


def test_one_and_two_ranks_reproduce_the_evaluation_during_training(one_rank, two_ranks, runs):
    """The newest checkpoint scores as in the run's last evaluation; two ranks give the same JSON and rollouts.

    Sampling with top-k 1 is greedy at any temperature.
    """
    flags = "--samples 4 --eval-rows 8 --temperature 0.9"
    folder = trained(one_rank, runs / "trained", "train_grpo.py", "--num-steps 2 --save-every 1")
    one = evaluated(one_rank, f"--model trained --run-name one {flags}", runs=runs)
    assert one["scores"]["eval/pass@4"]["prompts"] == one["scores"]["eval/majority"]["prompts"] == 8
    assert one["model"].endswith("trained/checkpoints/000002")
    two = evaluated(two_ranks, f"--model {one['model']} --run-name two {flags}", runs=runs)
    assert json.dumps(two) == json.dumps(one)
    rollouts = read_rollouts(runs / "two", 0)
    assert rollouts == read_rollouts(runs / "one", 0)
    assert [r["id"] for r in rollouts] == [[i, j] for i in range(8) for j in range(4)]
    greedy, likeliest = (
        evaluated(one_rank, f"--model trained --eval-rows 8 {more}", runs=runs)["scores"]
        for more in ("", "--samples 1 --top-k 1 --temperature 3")
    )
    assert greedy == likeliest
    last_step = read_metrics(folder)[-1]
    assert {name: last_step[name] for name in last_step if "eval/" in name} == {
        "eval/reward": greedy["eval/reward"]["mean"]
    }


def test_an_evaluation_of_a_run_repeats_its_flags_for_data_rollouts_and_rewards(tmp_path):
    """The command line wins: --data also replaces the run's --eval-data. Seed and training flags are not inherited.

    A checkpoint belongs to the run whose folder contains it; a copy elsewhere is a plain model.
    """
    flags = {"eval_data": ["a.jsonl"], "data": "train.jsonl", "reward": ["mine.py:f"], "max_new_tokens": 9}
    (tmp_path / "args.json").write_text(json.dumps(flags | {"seed": 3, "lr": 1.0, "temperature": 0.5}))
    for step in ("000009", "000010"):
        (tmp_path / "checkpoints" / step / "resume").mkdir(parents=True)
    how = {"model": str(tmp_path / "checkpoints" / step), "max_new_tokens": 9}
    repeated = Config(eval_data=("a.jsonl",), reward=("mine.py:f",), **how)
    assert parse_config(["--model", str(tmp_path)]) == parse_config(["--model", how["model"]]) == repeated
    copied = shutil.copytree(how["model"], tmp_path / "copied" / step)
    assert parse_config(["--model", str(copied)]) == Config(model=str(copied))
    config = parse_config(["--model", str(tmp_path), *"--data c.jsonl --reward episode".split()])
    assert config == Config(data="c.jsonl", eval_data=(), reward=("episode",), **how)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--samples 2 --temperature 0", "must be greater than 0"),
        ("--model unsaved --task sorting", "unsaved has no checkpoint"),
        ("--run-name unsaved", "unsaved: contains a training run; choose another --run-name"),
        ("--top-p 0.9", "--top-p 0.9: .* require --top-k, .* add --top-k 256"),
        ("--top-k 257", "--top-k 257: must be between 0 and 256"),
    ],
)
def test_invalid_evaluations_are_rejected_before_anything_is_loaded(one_rank, runs, flags, message):
    """This includes a run without a checkpoint."""
    (runs / "unsaved").mkdir(exist_ok=True)
    (runs / "unsaved" / "lock").touch()
    (runs / "unsaved" / "args.json").write_text('{"seed": 0}')
    with pytest.raises(AssertionError, match=message):
        evaluated(one_rank, flags, runs=runs)


@pytest.mark.parametrize("vocab", [30, 3000])
def test_top_k_and_top_p_keep_the_same_tokens_as_transformers(vocab):
    """Covers top-k, top-p and their combinations on flat and peaked logits, with different rules in one batch."""
    generator = torch.Generator().manual_seed(vocab)
    scale = torch.tensor([0.5, 3.0] * (len(GRID) // 2))[:, None]
    logits = torch.randn(len(GRID), vocab, generator=generator) * scale
    masked = logits.clone()
    apply_top_k_top_p(masked, torch.ones(len(GRID)), *columns(GRID))
    for row, (top_k, top_p) in enumerate(GRID):
        expected = TopKLogitsWarper(top_k)(None, logits[row, None])
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        found = masked[row].log_softmax(-1)
        torch.testing.assert_close(found, expected[0].log_softmax(-1), atol=1e-6, rtol=0)
