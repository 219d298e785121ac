"""Evaluations: their numbers, the same on any number of ranks and after a kill, and as transformers' texts say."""

import itertools
import json
import shutil
from statistics import fmean
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirl.data.task import Task
from minirl.errors import InputError
from minirl.extras.evaluate import main, parsed
from minirl.report.evaluation import bootstrap_interval, majority, pass_at_k, values_by_prompt
from minirl.run.config import RunConfig, StepFlags
from minirl.run.flags import flag_of
from support.collecting import Prompts, facts, make_collector
from support.collecting import evaluated as evaluated_here
from support.scripts import (
    evaluated,
    read_metrics,
    read_rollouts,
    read_rows,
    reward_of,
    trained,
    words,
    write_rows,
)


def refused(*flags):
    """The refusal of a command line, before anything is loaded."""
    with pytest.raises(InputError) as error:
        main(parsed(words(flags)))
    return str(error.value)


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
    """A completion without a reward does not count; each reward has its mean, and each file in the order given."""
    records = [
        record(0, 0, 0.0, "7", row="b.jsonl:1", exact=0.0, short=-1.0),
        record(0, 1, None, "8", row="b.jsonl:1", exact=None, short=None),
        record(1, 0, 1.0, "7", exact=1.0, short=None),
        record(1, 1, 0.6, "8", exact=1.0, short=-2.0, end="length", num_tokens=6),
    ]
    values = values_by_prompt(records, TASK, weights={"exact": 1.0, "short": 0.0})
    assert list(values)[:3] == ["eval/reward", "eval/a/reward", "eval/b/reward"]
    assert {name: fmean(of_prompts) for name, of_prompts in values.items()} == {
        "eval/reward": 0.4,
        "eval/pass@1": 0.5,
        "eval/pass@2": 1.0,
        "eval/majority": 1.0,
        "eval/a/reward": 0.8,
        "eval/b/reward": 0.0,
        "eval/exact": 0.5,
        "eval/short": -1.5,
        "eval/len_mean": 3.0,
        "eval/truncated": 0.25,
    }
    assert len(values["eval/pass@2"]) == len(values["eval/majority"]) == 1


def test_pass_at_k_and_the_majority_are_of_rewards_of_0_and_1_alone():
    """A single other value of a reward with a weight, and they are left out."""
    for reward, expected in ((1.0, {"eval/pass@1", "eval/pass@2", "eval/majority"}), (0.5, set())):
        records = [record(0, 0, 0.0, "7", exact=0.0), record(0, 1, reward, "7", exact=reward)]
        values = values_by_prompt(records, TASK, weights={"exact": 2.0})
        assert values.keys() - {"eval/reward", "eval/a/reward", "eval/len_mean", "eval/truncated"} == expected


def facts_by_id(parts):
    pairs = [pair for part in parts for pair in zip(part.rollouts, part.rewards, strict=True)]
    return {rollout.rollout_id: (facts(rollout), reward.tolist()) for rollout, reward in pairs}


def test_rollouts_come_in_parts_and_are_those_of_one_batch(monkeypatch):
    """With few open at a time."""
    monkeypatch.setattr("minirl.episodes.collector.JUDGED_TOGETHER", 2)
    prompts = Prompts()
    requests = [prompts.requests(ordinal, 1, group_size=2) for ordinal in range(5)]
    whole = evaluated_here(make_collector(prompts), list(itertools.chain(*requests)))
    for num_open in (1, 4, 100):
        collector = make_collector(prompts)
        parts = list(collector.run(requests, num_requests=10, num_open=num_open))
        assert all(len({r.rollout_id.prompt_ordinal for r in part.rollouts}) >= 2 for part in parts[:-1])
        assert facts_by_id(parts) == facts_by_id([whole])


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
        "eval_data": ["a.jsonl", "b.jsonl"],
        "data": "train.jsonl",
        "chat": True,
        "task": "auto",
        "seed": 3,
    }
    flags |= {
        "reward": ["mine.py:f"],
        "reward_weights": [2.0],
        "max_new_tokens": 9,
        "temperature": 0.5,
        "gone": 1,
    }
    (tmp_path / "args.json").write_text(json.dumps({"flags": flags, **flags, "task": "jsonl"}))
    config = parsed(["--model", str(tmp_path)])
    assert (config.eval_data, config.data, config.task) == (("a.jsonl", "b.jsonl"), None, "jsonl")
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
@pytest.mark.parametrize("task", ["sorting", "jsonl", "gsm8k"])
def test_greedy_texts_of_a_trained_model_are_those_of_transformers(one_rank, runs, tmp_path, request, task):
    """Of the embedded model, and of a pretrained one on files of stories and of GSM8K; rewards are those of the texts.

    Each held-out file has its own metric, and all rows together are the score. Runs in tests use 8 rows of each.
    """
    flags, model, num_rows = f"--task {task} --max-new-tokens 24", "", 8
    if task != "sorting":
        data = request.getfixturevalue("data_folder")
        model, num_rows = f"--model {data}/stories260K --lr 1e-3", 10
        rows = read_rows(data / ("gsm8k/test.jsonl" if task == "gsm8k" else "stories/prompts.jsonl"))
        write_rows(tmp_path / "few.jsonl", rows[:2])
        write_rows(tmp_path / "many.jsonl", rows[2:20])
        flags += f" --data {tmp_path}/many.jsonl --eval-data {tmp_path}/few.jsonl {tmp_path}/many.jsonl"
    if task == "jsonl":
        flags += f" {reward_of(tmp_path, 'float(len(c))')}"
    # No answer to GSM8K is right: without a KL term no rollout would be trained on.
    more = "--num-steps 2 --prompts-per-step 4 --group-size 4 --kl-coef 0.01"
    folder = trained(one_rank, runs / task, "train_grpo.py", flags, model, more)
    line = read_metrics(folder)[-1]
    assert line["policy/logp_gap_max"] <= 1e-5
    result = evaluated(one_rank, flags, f"--eval-rows 8 --model {task} --run-name greedy-{task}", runs=runs)
    scores = {name: score["mean"] for name, score in result["scores"].items()}
    assert {item for item in line.items() if item[0].startswith("eval/")} <= scores.items()
    assert (result["prompts"], result["samples"], result["temperature"]) == (num_rows, 1, 0.0)
    assert "eval/majority" not in scores
    assert ("eval/flexible" in scores) == (task == "gsm8k")
    rollouts = read_rollouts(runs / f"greedy-{task}", 0)
    texts = [rollout["completion"] for rollout in rollouts]
    prompts = [rollout["prompt"] for rollout in rollouts]
    assert texts == texts_of_transformers(folder / "checkpoints" / "000002", prompts, 24)
    rewards = [rollout["reward"] for rollout in rollouts]
    if task == "sorting":
        assert 0 < fmean(rewards) < 1
        assert rewards == [
            text == "".join(sorted(prompt[:-1])) for text, prompt in zip(texts, prompts, strict=True)
        ]
    else:
        few = [rollout["reward"] for rollout in rollouts if "few.jsonl" in rollout["row"]]
        assert (len(few), fmean(few)) == (2, scores["eval/few/reward"])
    if task == "jsonl":
        assert rewards == list(map(len, texts))
    assert scores["eval/reward"] == fmean(rewards)


@pytest.mark.slow
def test_samples_among_the_likeliest_token_alone_are_greedy(one_rank, runs):
    """By each of the two flags, however high the temperature; the JSON says which."""
    flags = "--eval-rows 8 --samples 1 --temperature 3"

    def answers(name, flags):
        result = evaluated(one_rank, flags, f"--run-name {name}", runs=runs)
        return [rollout["completion"] for rollout in read_rollouts(runs / name, 0)], result

    greedy, _ = answers("likeliest", "--eval-rows 8")
    assert answers("any", flags)[0] != greedy
    for truncation in ({"top_k": 1}, {"top_k": 256, "top_p": 1e-6}):
        added = " ".join(f"{flag_of(name)} {value}" for name, value in truncation.items())
        name = f"only-{'-'.join(truncation)}"
        texts, result = answers(name, f"{flags} {added}")
        assert texts == greedy
        assert result.items() >= truncation.items()


def test_what_cannot_be_evaluated_is_refused_before_anything_is_loaded(one_rank, runs):
    assert "must be greater than 0" in refused("--samples 2 --temperature 0")
    assert "--eval-rows 0: must be greater than 0" in refused("--eval-rows 0")
    assert "--model needs --data" in refused("--model some/model")
    with pytest.raises(SystemExit):
        refused("--lr 1")
    with pytest.raises(AssertionError, match=r"--task gsm8k needs --data"):
        evaluated(one_rank, "--task gsm8k", runs=runs)


def test_a_run_without_a_checkpoint_is_refused(one_rank, runs):
    """By the run's name."""
    flags = "--num-steps 1 --prompts-per-step 2"
    shutil.rmtree(trained(one_rank, runs / "unsaved", "train_grpo.py", flags) / "checkpoints")
    with pytest.raises(AssertionError, match="unsaved has no checkpoint"):
        evaluated(one_rank, "--model unsaved --task sorting", runs=runs)


def test_an_evaluation_has_no_flags_of_training(capsys):
    with pytest.raises(SystemExit):
        parsed(["--help"])
    shown = capsys.readouterr().out
    assert "--samples" in shown
    for name in ("lr", "resume", "clip-low", "offload-optimizer", *StepFlags.__dataclass_fields__):
        assert f"{flag_of(name)} " not in shown
