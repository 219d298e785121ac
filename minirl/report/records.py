"""The records of rollouts: the lines of rollouts/*.jsonl, from which evaluations make their numbers."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from minirl.data.tokenizer import Tokenizer
from minirl.data.view import view_of
from minirl.rewards.rewarded import RewardedRollouts


def rollout_records(
    rewarded: RewardedRollouts, functions: Iterable[str], tokenizer: Tokenizer, **columns: Tensor
) -> list[dict[str, Any]]:
    """The records of this rank's N rollouts, JSON values, as in rollouts/*.jsonl. Not collective.

    functions: the names of the K rewards of `rewarded`. columns: further numbers [N] of the rollouts.
    """
    numbers = {name: _json_numbers(column.tolist()) for name, column in columns.items()}
    rewards = _json_numbers(rewarded.rewards.tolist())
    records = []
    for i, rollout in enumerate(rewarded.rollouts):
        row = rewarded.rows[i]
        record: dict[str, Any] = {
            "id": (rollout.rollout_id.prompt_ordinal, rollout.rollout_id.sample),
            "row": row.place,
            "prompt": row.prompt,
            "completion": rewarded.texts[i],
            **{name: values[i] for name, values in numbers.items()},
            "rewards": dict(zip(functions, rewards[i], strict=True)),
            "num_tokens": rollout.num_sampled,
            "finish_reason": rollout.finish_reason,
        }
        if rollout.earlier:
            record["branches"] = [
                {"branch": branch.rollout_id.branch, "finish_reason": branch.own_end}
                for branch in rollout.branches
            ]
        records.append(record | view_of(rollout, row.prompt, tokenizer))
    return records


def _json_numbers(values: Any) -> Any:
    """Return a tensor's `tolist` with None for NaN, which JSON lacks."""
    if isinstance(values, list):
        return [_json_numbers(value) for value in values]
    return None if math.isnan(values) else values
