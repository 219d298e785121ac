"""The numbers of an evaluation: means over prompts, pass@k, majority votes, and bootstrap intervals."""

import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, multimode, quantiles
from typing import Any

from minirl.data.task import Task
from minirl.rollouts import CUT_OFF

NUM_RESAMPLES = 1000
Record = Mapping[str, Any]  # of a completion, with `reward`, see `records.rollout_records`


@functools.cache
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of k samples is correct, drawn without replacement (arXiv:2107.03374 eq. 1)."""
    # Of integers, which do not overflow: Python rounds their quotient once.
    num_subsets = math.comb(num_samples, k)
    return (num_subsets - math.comb(num_samples - num_correct, k)) / num_subsets


def majority(answers: Sequence[Any], is_correct: Sequence[bool]) -> float:
    """The share of correct samples among those with the most frequent answer, or answers; None does not count."""
    winners = multimode(answer for answer in answers if answer is not None)
    voted = [right for answer, right in zip(answers, is_correct, strict=True) if answer in winners]
    return fmean(voted) if voted else 0.0


def values_by_prompt(
    records: Iterable[Record], task: Task, weights: Mapping[str, float], *, of_samples: bool = True
) -> dict[str, list[float]]:
    """For each metric its values, one for each prompt that has one. Not collective.

    records: all ranks' completions. weights: those of the rewards in `reward`. of_samples: include `sample_numbers`,
    whose judges are the rewards with positive weights, if these are all 0 or 1.
    """
    values = defaultdict(list)
    in_order = sorted(records, key=lambda record: record["id"])
    judges = [name for name, weight in weights.items() if weight > 0]
    if any(record["rewards"][name] not in (0, 1, None) for record in in_order for name in judges):
        judges = []
    for _, group in itertools.groupby(in_order, key=lambda record: record["id"][0]):
        samples = list(group)
        numbers = mean_rewards(samples, task)
        if of_samples:
            numbers |= sample_numbers(samples, task, judges)
        for name, value in numbers.items():
            values[f"eval/{name}"].append(value)
    return values


def mean_rewards(samples: Sequence[Record], task: Task) -> dict[str, float]:
    """The mean reward of a prompt's samples, also under its file's name, and that of each of several functions."""
    given: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        rewards = {"reward": sample["reward"]}
        if len(sample["rewards"]) > 1:
            rewards |= sample["rewards"]
        if len(task.eval_sets) > 1:
            file = Path(sample["row"].rpartition(":")[0])
            rewards[f"{file.stem}/reward"] = sample["reward"]
        for name, reward in rewards.items():
            if reward is not None:
                given[name].append(reward)
    return {name: fmean(of_samples) for name, of_samples in given.items()}


def sample_numbers(samples: Sequence[Record], task: Task, judges: Sequence[str]) -> dict[str, float]:
    """The mean length and share cut off of a prompt's samples; with judges also pass@k and the majority vote.

    judges: rewards of 0 and 1. A completion is correct if all that apply are 1.
    """
    numbers = {
        "len_mean": fmean([sample["num_tokens"] for sample in samples]),
        "truncated": fmean([sample["finish_reason"] in CUT_OFF for sample in samples]),
    }
    scored = [sample for sample in samples if judges and sample["reward"] is not None]
    is_correct = [all(sample["rewards"][name] in (1, None) for name in judges) for sample in scored]
    for k in range(1, len(scored) + 1):
        numbers[f"pass@{k}"] = pass_at_k(len(scored), sum(is_correct), k)
    if task.answer_of is not None and len(scored) > 1:
        answers = [task.answer_of(sample["completion"]) for sample in scored]
        numbers["majority"] = majority(answers, is_correct)
    return numbers


def bootstrap_interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """The 95 % interval of the mean of these values: percentiles of the means of resampled values."""
    generator = random.Random(seed)
    means = [fmean(generator.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)]
    low, *_, high = quantiles(means, n=40, method="inclusive")
    return low, high
