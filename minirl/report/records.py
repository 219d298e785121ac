"""Rollout records, which are the lines of rollouts/*.jsonl, and the evaluation metrics computed from them."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.conversation import conversation_record
from minirl.data.task import Task
from minirl.rollouts import RewardedRollout
from minirl.training.advantages import weighted_rewards

Record = Mapping[str, Any]  # one of the records that `rollout_records` returns


def rollout_records(
    rewarded: Sequence[RewardedRollout],
    functions: Iterable[str],
    tokenizer: ChatTokenizer,
    *,
    weights: Tensor,
    **columns: Sequence[float],
) -> list[dict[str, Any]]:
    """Return this rank's N rollouts as JSON-serializable records, the lines of rollouts/*.jsonl. Not collective.

    functions: names of the K reward functions. weights: fp64 [K]. A record's `reward` is the weighted sum of the
    rollout's rewards. columns: additional numbers [N], one per rollout.
    """
    all_rewards = torch.tensor([rewards for _, _, rewards in rewarded], dtype=torch.float64)
    total_rewards = weighted_rewards(all_rewards.view(len(rewarded), len(weights)), weights)
    columns = {"reward": total_rewards.tolist(), **columns}
    records = []
    for i, (rollout, text, rewards) in enumerate(rewarded):
        row = rollout.episode.row
        record: dict[str, Any] = {
            "id": rollout.rollout_id[:2],
            "row": row.origin,
            "prompt": row.prompt,
            "completion": text,
            **{name: _json_number(column[i]) for name, column in columns.items()},
            "rewards": dict(zip(functions, map(_json_number, rewards), strict=True)),
            "num_tokens": rollout.num_sampled_tokens,
            "finish_reason": rollout.finish_reason,
        }
        if len(rollout.branches) > 1:
            record["branches"] = [
                {"branch": branch.rollout_id.branch, "finish_reason": branch.finish_reason}
                for branch in rollout.branches
            ]
        records.append(record | conversation_record(rollout, tokenizer))
    return records


def mean_rewards(records: Iterable[Record], task: Task) -> dict[str, float]:
    """Return the metrics of an evaluation: mean rewards overall, per file and per reward function. Not collective.

    Means per file (or function) are omitted if there is only one file (or function). Rewards that do not apply
    to a completion are excluded.
    """
    given: dict[str, list[float]] = defaultdict(list)
    for sample in records:
        rewards = {"reward": sample["reward"]}
        if len(sample["rewards"]) > 1:
            rewards |= sample["rewards"]
        if len(task.eval_sets) > 1:
            file = Path(re.sub(r"(:| row )\d+$", "", sample["row"]))
            rewards[f"{file.stem}/reward"] = sample["reward"]
        for name, reward in rewards.items():
            if reward is not None:
                given[name].append(reward)
    return {f"eval/{name}": fmean(values) for name, values in given.items()}


def _json_number(number: float) -> float | None:
    """Return the number, or None for NaN, which JSON lacks."""
    return None if math.isnan(number) else number
