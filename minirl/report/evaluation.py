"""The numbers of an evaluation: means over prompts, pass@k, majority votes, and bootstrap intervals."""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from minirl.data.task import Task
from minirl.rollouts import CUT_OFF

NUM_RESAMPLES = 1000
Record = Mapping[str, Any]  # of a completion, with `reward`, see `logger.rollout_records`
ROUNDING = 1e-9  # by which a sum of weighted rewards may miss the score of a correct completion


@functools.cache
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of k samples is correct, drawn without replacement (arXiv:2107.03374 eq. 1)."""
    # Of integers, which do not overflow: Python rounds their quotient once.
    num_subsets = math.comb(num_samples, k)
    return (num_subsets - math.comb(num_samples - num_correct, k)) / num_subsets


def majority(answers: Sequence[Any], is_correct: Sequence[bool]) -> float:
    """The share of correct samples among those with the most frequent answer, or answers; None does not count."""
    votes = Counter(answers)
    del votes[None]
    most = max(votes.values(), default=None)
    voted = [right for answer, right in zip(answers, is_correct, strict=True) if votes[answer] == most]
    return fmean(voted) if voted else 0.0


def values_by_prompt(
    records: Iterable[Record], task: Task, weights: Mapping[str, float], *, of_samples: bool = True
) -> dict[str, list[float]]:
    """For each metric its values, one for each prompt that has one. Not collective.

    records: all ranks' completions. weights: those of the rewards in `reward`. of_samples: include `sample_numbers`.
    """
    values: dict[str, list[float]] = defaultdict(list)
    in_order = sorted(records, key=lambda record: record["id"])
    for _, group in itertools.groupby(in_order, key=lambda record: record["id"][0]):
        samples = list(group)
        numbers = reward_numbers(samples, task)
        if of_samples:
            numbers |= sample_numbers(samples, task, weights)
        for name, value in numbers.items():
            values[f"eval/{name}"].append(value)
    return dict(values)


def reward_numbers(samples: Sequence[Record], task: Task) -> dict[str, float]:
    """The mean reward of a prompt's samples, also under its file's name, and that of each of several functions."""
    rewards = {"reward": [sample["reward"] for sample in samples]}
    names = samples[0]["rewards"]
    if len(names) > 1:
        rewards |= {name: [sample["rewards"][name] for sample in samples] for name in names}
    if len(task.eval_sets) > 1:
        file = Path(samples[0]["row"].rpartition(":")[0])
        rewards[f"{file.stem}/reward"] = rewards["reward"]
    numbers = {}
    for name, column in rewards.items():
        applying = [reward for reward in column if reward is not None]
        if applying:
            numbers[name] = fmean(applying)
    return numbers


def sample_numbers(samples: Sequence[Record], task: Task, weights: Mapping[str, float]) -> dict[str, float]:
    """The mean length, share cut off, pass@k and majority vote of a prompt's samples.

    A completion is correct if its reward is at least that of 1 from each reward that applies and has a positive weight.
    """
    numbers = {
        "len_mean": fmean([sample["num_tokens"] for sample in samples]),
        "truncated": fmean([sample["finish_reason"] in CUT_OFF for sample in samples]),
    }
    scored = [sample for sample in samples if sample["reward"] is not None]
    is_correct = [_is_correct(sample, weights) for sample in scored]
    for k in range(1, len(scored) + 1):
        numbers[f"pass@{k}"] = pass_at_k(len(scored), sum(is_correct), k)
    if task.answer_of is not None and len(scored) > 1:
        answers = [task.answer_of(sample["completion"]) for sample in scored]
        numbers["majority"] = majority(answers, is_correct)
    return numbers


def _is_correct(sample: Record, weights: Mapping[str, float]) -> bool:
    needed = [max(0.0, weights[name]) for name, reward in sample["rewards"].items() if reward is not None]
    return bool(sample["reward"] >= sum(needed) - ROUNDING)


def bootstrap_interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """The 95 % interval of the mean of these values: percentiles of the means of resampled values."""
    generator = torch.Generator().manual_seed(seed)
    drawn_from = torch.tensor(values, dtype=torch.float64)
    resampled = []
    for _ in range(NUM_RESAMPLES):
        index = torch.randint(len(values), drawn_from.shape, generator=generator)
        resampled.append(drawn_from[index].mean())
    limits = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.stack(resampled).quantile(limits).tolist()
    return low, high
