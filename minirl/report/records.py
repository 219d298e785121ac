"""The records of rollouts: the lines of rollouts/*.jsonl, from which evaluations make their numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from minirl.data.tokenizer import Tokenizer
from minirl.data.view import view_of
from minirl.rewards.rewarded import RewardedRollouts
from minirl.training.advantages import weighted_scores


def rollout_records(
    rewarded: RewardedRollouts,
    functions: Iterable[str],
    tokenizer: Tokenizer,
    *,
    weights: Tensor,
    **columns: Sequence[float],
) -> list[dict[str, Any]]:
    """The records of this rank's N rollouts, JSON values, as in rollouts/*.jsonl. Not collective.

    functions: the names of the K rewards of `rewarded`, whose sum with these weights, fp64 [K], is the `reward`.
    columns: further numbers [N] of the rollouts.
    """
    columns = {"reward": weighted_scores(rewarded.rewards, weights).tolist(), **columns}
    rewards = rewarded.rewards.tolist()
    records = []
    for i, rollout in enumerate(rewarded.rollouts):
        row = rollout.episode.row
        record: dict[str, Any] = {
            "id": (rollout.rollout_id.prompt_ordinal, rollout.rollout_id.sample),
            "row": row.place,
            "prompt": row.prompt,
            "completion": rewarded.texts[i],
            **{name: _json_number(column[i]) for name, column in columns.items()},
            "rewards": dict(zip(functions, map(_json_number, rewards[i]), strict=True)),
            "num_tokens": rollout.num_sampled,
            "finish_reason": rollout.finish_reason,
        }
        if rollout.earlier:
            record["branches"] = [
                {"branch": branch.rollout_id.branch, "finish_reason": branch.own_end}
                for branch in rollout.branches
            ]
        records.append(record | view_of(rollout, tokenizer))
    return records


def _json_number(number: float) -> float | None:
    """The number, or None for NaN, which JSON lacks."""
    return None if math.isnan(number) else number
