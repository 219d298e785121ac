"""Evaluations: their numbers, the same on any number of ranks and after a kill, and as transformers' texts say."""

import itertools
import json
from statistics import fmean
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirl.data.task import Task
from minirl.extras.evaluate import parsed
from minirl.report.evaluation import bootstrap_interval, majority, pass_at_k, values_by_prompt
from minirl.run.config import RunConfig
from support.scripts import (
    evaluated,
    read_metrics,
    read_rollouts,
    read_rows,
    trained,
    words,
    write_rows,
)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    """By enumeration of all subsets of k samples; and for numbers of samples whose binomials exceed floats."""
    assert [pass_at_k(8, 2, k) for k in (1, 2, 4)] == pytest.approx([0.25, 0.464286, 0.785714], abs=1e-6)
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)
    assert pass_at_k(5000, 1, 2500) == 0.5
    assert (pass_at_k(5000, 0, 2500), pass_at_k(5000, 5000, 1)) == (0, 1)


def test_a_majority_vote_takes_the_most_frequent_answer():
    """A tie counts as the share of its answers that are right, and no answer does not vote."""
    assert majority(["7", "8", "7"], [False, True, False]) == 0
    assert majority(["7", "8", "8"], [False, True, True]) == 1
    assert majority(["7", "8", None, None, None], [False, True, False, False, False]) == 0.5
    assert majority([None, None], [False, False]) == 0


def test_a_bootstrap_interval_is_that_of_the_mean():
    """Of half ones it is the normal one, 1.96 standard errors; the same for the same seed."""
    values = [0.0, 1.0] * 200
    low, high = bootstrap_interval(values, seed=1)
    assert (low, high) == pytest.approx((0.5 - 0.049, 0.5 + 0.049), abs=0.006)
    assert bootstrap_interval(values, seed=1) == (low, high) != bootstrap_interval(values, seed=2)
    assert bootstrap_interval([0.25] * 3, seed=0) == (0.25, 0.25)


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


TASK = Task("jsonl", [], {"a.jsonl": [], "b.jsonl": []}, {}, 4, answer_of=str)


def test_the_numbers_of_an_evaluation_are_means_over_prompts():
    """A completion without a reward does not count; each reward has its mean, and each file in the order given.

    Another value than 0 or 1 of a reward with a weight, and there is neither pass@k nor a majority.
    """
    records = [
        record(0, 0, 0.0, "7", row="b.jsonl:1", exact=0.0, short=-1.0),
        record(0, 1, None, "8", row="b.jsonl:1", exact=None, short=None),
        record(1, 0, 1.0, "7", exact=1.0, short=None),
        record(1, 1, 0.6, "8", exact=1.0, short=-2.0, end="length", num_tokens=6),
    ]
    values = values_by_prompt(records, TASK, weights={"exact": 1.0, "short": 0.0})
    assert list(values)[:3] == ["eval/reward", "eval/a/reward", "eval/b/reward"]
    assert len(values["eval/pass@2"]) == len(values["eval/majority"]) == 1
    judged = {"eval/pass@1": 0.5, "eval/pass@2": 1.0, "eval/majority": 1.0}
    means = {name: fmean(of_prompts) for name, of_prompts in values.items()}
    assert means == judged | {
        "eval/reward": 0.4,
        "eval/a/reward": 0.8,
        "eval/b/reward": 0.0,
        "eval/exact": 0.5,
        "eval/short": -1.5,
        "eval/len_mean": 3.0,
        "eval/truncated": 0.25,
    }
    shaped = values_by_prompt(records, TASK, weights={"exact": 1.0, "short": 0.1})
    assert values.keys() - shaped.keys() == judged.keys()


def in_four_samples():
    """A fork that evaluates in samples."""
    return mock.patch.object(RunConfig, "eval_samples", 4)


def test_one_and_two_ranks_give_the_numbers_of_training(one_rank, two_ranks, runs):
    """Of its last evaluation, for its newest checkpoint and its task; the same JSON and rollouts on two ranks."""
    flags = "--samples 4 --eval-rows 8 --temperature 0.9"
    training = "--num-steps 2 --temperature 0.9"
    folder = trained(one_rank, runs / "trained", "train_grpo.py", training, under=in_four_samples)
    expected = {name: value for name, value in read_metrics(folder)[-1].items() if "eval/" in name}
    one = evaluated(one_rank, f"--model trained --run-name one {flags}", runs=runs)
    assert {name: score["mean"] for name, score in one["scores"].items()} == expected
    assert expected.keys() == {
        *("eval/reward", "eval/majority", "eval/len_mean", "eval/truncated"),
        *(f"eval/pass@{k}" for k in range(1, 5)),
    }
    assert one["model"].endswith("trained/checkpoints/000002")
    two = evaluated(two_ranks, f"--model {one['model']} --run-name two {flags}", runs=runs)
    assert json.dumps(two) == json.dumps(one)
    rollouts = read_rollouts(runs / "two", 0)
    assert rollouts == read_rollouts(runs / "one", 0)
    assert sorted(path.name for path in (runs / "two").iterdir()) == [
        *("args.json", "evaluation.json", "lock", "rollouts")
    ]
    assert [r["id"] for r in rollouts] == [[i, j] for i in range(8) for j in range(4)]


def test_an_evaluation_of_a_run_repeats_its_flags_for_data_rollouts_and_rewards(tmp_path):
    """Those on the command line win: --data replaces the run's --eval-data too. Its seed is not repeated."""
    flags = {
        "eval_data": ["a.jsonl"],
        "data": "train.jsonl",
        "chat": True,
        "seed": 3,
        "gone": 1,
        "task": "jsonl",
    }
    flags |= {"reward": ["mine.py:f"], "reward_weights": [2.0], "max_new_tokens": 9, "temperature": 0.5}
    (tmp_path / "args.json").write_text(json.dumps(flags))
    config = parsed(["--model", str(tmp_path)])
    assert (config.eval_data, config.data, config.task) == (("a.jsonl",), None, "jsonl")
    assert (config.chat, config.reward, config.reward_weights) == (True, ("mine.py:f",), (2.0,))
    assert (config.max_new_tokens, config.temperature, config.seed) == (9, 1.0, 0)
    config = parsed(words([f"--model {tmp_path} --no-chat --data c.jsonl --reward episode"]))
    assert (config.chat, config.eval_data, config.data) == (False, (), "c.jsonl")
    assert (config.reward, config.reward_weights) == (("episode",), (2.0,))


def texts_of_transformers(folder, prompts, max_new_tokens):
    """Greedy completions, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        tokens = model.generate(ids, do_sample=False, max_new_tokens=max_new_tokens)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sorting", "gsm8k"])
def test_greedy_texts_of_a_trained_model_are_those_of_transformers(one_rank, runs, tmp_path, request, task):
    """Of the embedded model, sampled at a high temperature from the likeliest token alone, and of a pretrained one.

    Each held-out file has its own metric, and all rows together are the score. Runs in tests use 8 rows of each.
    """
    flags, model, how = f"--task {task} --max-new-tokens 24", "", "--samples 1 --top-k 1 --temperature 3"
    if task == "gsm8k":
        data = request.getfixturevalue("data_folder")
        model, how = f"--model {data}/stories260K --lr 1e-3", ""
        rows = read_rows(data / "gsm8k/test.jsonl")
        write_rows(tmp_path / "few.jsonl", rows[:2])
        write_rows(tmp_path / "many.jsonl", rows[2:20])
        flags += f" --data {tmp_path}/many.jsonl --eval-data {tmp_path}/few.jsonl {tmp_path}/many.jsonl"
    # No answer to GSM8K is right: without a KL term no rollout would be trained on.
    more = "--num-steps 2 --prompts-per-step 4 --group-size 4 --kl-coef 0.01"
    folder = trained(one_rank, runs / task, "train_grpo.py", flags, model, more)
    line = read_metrics(folder)[-1]
    result = evaluated(
        one_rank, flags, how, f"--eval-rows 8 --model {task} --run-name greedy-{task}", runs=runs
    )
    scores = {name: score["mean"] for name, score in result["scores"].items()}
    assert {item for item in line.items() if item[0].startswith("eval/")} <= scores.items()
    rollouts = read_rollouts(runs / f"greedy-{task}", 0)
    texts = [rollout["completion"] for rollout in rollouts]
    prompts = [rollout["prompt"] for rollout in rollouts]
    assert texts == texts_of_transformers(folder / "checkpoints" / "000002", prompts, 24)
    rewards = [rollout["reward"] for rollout in rollouts]
    assert scores["eval/reward"] == fmean(rewards)
    if task == "sorting":
        assert (result["samples"], result["temperature"], result["top_k"]) == (1, 3.0, 1)
        assert 0 < fmean(rewards) < 1
        assert rewards == [
            text == "".join(sorted(prompt[:-1])) for text, prompt in zip(texts, prompts, strict=True)
        ]
    else:
        assert (result["prompts"], result["samples"], result["temperature"]) == (10, 1, 0.0)
        few = [rollout["reward"] for rollout in rollouts if "few.jsonl" in rollout["row"]]
        assert (len(few), fmean(few)) == (2, scores["eval/few/reward"])
        assert "eval/flexible" in scores


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--samples 2 --temperature 0", "must be greater than 0"),
        ("--eval-rows 0", "--eval-rows 0: must be greater than 0"),
        ("--model some/model", "--model needs --data"),
        ("--task gsm8k", "--task gsm8k needs --data"),
        ("--model unsaved --task sorting", "unsaved has no checkpoint"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_loaded(one_rank, runs, flags, message):
    """A run without a checkpoint too."""
    (runs / "unsaved").mkdir(exist_ok=True)
    (runs / "unsaved" / "args.json").write_text("{}")
    with pytest.raises(AssertionError, match=message):
        evaluated(one_rank, flags, runs=runs)


def test_an_evaluation_has_no_flags_of_training():
    for name in ("lr", "clip-low", "offload-optimizer", "num-steps"):
        with pytest.raises(SystemExit):
            parsed([f"--{name}", "1"])
