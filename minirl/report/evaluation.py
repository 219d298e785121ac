"""The numbers of an evaluation during training; `minirl.extras.evaluate` has more of them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from minirl.data.task import Task

Record = Mapping[str, Any]  # of a completion, with `reward`, see `records.rollout_records`


def mean_rewards(records: Iterable[Record], task: Task) -> dict[str, float]:
    """The metrics of evaluated rollouts: their mean reward, also by file, and that of each of several functions.

    Rewards that do not apply are left out. Not collective.
    """
    given: dict[str, list[float]] = defaultdict(list)
    for sample in records:
        rewards = {"reward": sample["reward"]}
        if len(sample["rewards"]) > 1:
            rewards |= sample["rewards"]
        if len(task.eval_sets) > 1:
            file = Path(sample["row"].rpartition(":")[0])
            rewards[f"{file.stem}/reward"] = sample["reward"]
        for name, reward in rewards.items():
            if reward is not None:
                given[name].append(reward)
    return {f"eval/{name}": fmean(of_samples) for name, of_samples in given.items()}
