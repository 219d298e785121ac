"""The numbers of an evaluation: means over prompts, pass@k, majority votes, and bootstrap intervals."""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from minirl.data.task import Task
from minirl.rollouts import CUT_OFF

NUM_RESAMPLES = 1000
ROUNDING = 1e-9  # by which a sum of weighted rewards may miss the score of a correct completion


@functools.cache
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of k samples is correct, drawn without replacement (arXiv:2107.03374 eq. 1)."""
    # Of integers, which do not overflow: Python rounds their quotient once.
    num_subsets = math.comb(num_samples, k)
    return (num_subsets - math.comb(num_samples - num_correct, k)) / num_subsets


def majority(answers: Sequence[Any], is_correct: Sequence[bool]) -> float:
    """The share of correct samples among those with the most frequent answer, or answers; None is no answer."""
    counts = Counter(answer for answer in answers if answer is not None)
    most = max(counts.values(), default=0)
    voted = [right for answer, right in zip(answers, is_correct, strict=True) if counts[answer] == most > 0]
    return _mean(voted) if voted else 0.0


def values_by_prompt(
    records: Sequence[Mapping[str, Any]], task: Task, weights: Mapping[str, float]
) -> dict[str, list[float]]:
    """For each metric its values, one for each prompt that has one. Not collective.

    records: of all ranks' completions, in order of their ids (`logger.rollout_records`, with `reward`). weights: of the
    rewards in `reward`. A completion is correct if its reward is at least that of 1 from each that applies and has a
    positive weight.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for _, group in itertools.groupby(records, key=lambda record: record["id"][0]):
        samples = list(group)
        of_prompt: dict[str, float] = {}
        scored = [sample for sample in samples if sample["reward"] is not None]
        if scored:
            of_prompt["reward"] = _mean([sample["reward"] for sample in scored])
            is_correct = [_is_correct(sample, weights) for sample in scored]
            for k in range(1, len(scored) + 1):
                of_prompt[f"pass@{k}"] = pass_at_k(len(scored), sum(is_correct), k)
            if task.answer_of is not None and len(scored) > 1:
                answers = [task.answer_of(sample["completion"]) for sample in scored]
                of_prompt["majority"] = majority(answers, is_correct)
            if len(task.eval_sets) > 1:
                file = Path(samples[0]["row"].rpartition(":")[0])
                of_prompt[f"{file.stem}/reward"] = of_prompt["reward"]
        for name in samples[0]["rewards"] if len(samples[0]["rewards"]) > 1 else ():
            applying = [sample["rewards"][name] for sample in samples if sample["rewards"][name] is not None]
            if applying:
                of_prompt[name] = _mean(applying)
        of_prompt["len_mean"] = _mean([sample["num_tokens"] for sample in samples])
        of_prompt["truncated"] = _mean([sample["finish_reason"] in CUT_OFF for sample in samples])
        for name, value in of_prompt.items():
            values[f"eval/{name}"].append(value)
    return dict(values)


def means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean of each metric over the prompts that have a value."""
    return {name: _mean(of_prompts) for name, of_prompts in values.items()}


def bootstrap_interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """The 95 % interval of the mean of these values: percentiles of the means of resampled values."""
    generator = torch.Generator().manual_seed(seed)
    drawn_from = torch.tensor(values, dtype=torch.float64)
    resampled = [
        drawn_from[torch.randint(len(values), (len(values),), generator=generator)].mean()
        for _ in range(NUM_RESAMPLES)
    ]
    low, high = torch.stack(resampled).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _is_correct(sample: Mapping[str, Any], weights: Mapping[str, float]) -> bool:
    needed = [max(0.0, weights[name]) for name, reward in sample["rewards"].items() if reward is not None]
    return bool(sample["reward"] >= sum(needed) - ROUNDING)


def _mean(values: Sequence[float]) -> float:
    # fsum rounds once: the mean does not depend on the order.
    return math.fsum(values) / len(values)
