"""Rollouts in flight as records of a checkpoint: JSON values and tensors (`run.checkpoint`)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minirl.collect.episode_runner import RunningEpisode
from minirl.rollouts import EpisodeRecord, Rollout, RolloutId, Sampled, TurnRecord, rollout_of


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that has ended; with its rewards if all those of its prompt on its rank have. None: does not apply."""

    rollout: Rollout
    rewards: list[float | None] | None = None
    failed: bool = False


def episode_record(running: RunningEpisode) -> dict[str, Any]:
    """The record of a paused episode."""
    return {
        **_tokens_record(rollout_of(running.request, "")),
        "turn_ends": [list(end) for end in running.turn_ends],
        "finish_reason": None,
    }


def finished_record(finished: FinishedRollout) -> dict[str, Any]:
    """The record of a rollout that has ended."""
    return {
        **_tokens_record(finished.rollout),
        "finish_reason": finished.rollout.finish_reason,
        "rewards": finished.rewards,
        "failed": finished.failed,
        "episode": {
            "turns": [dataclasses.asdict(turn) for turn in finished.rollout.episode.turns],
            "rewards": dict(finished.rollout.episode.rewards),
        },
    }


def _tokens_record(rollout: Rollout) -> dict[str, Any]:
    start = rollout.num_prompt_tokens
    return {
        "id": [rollout.rollout_id.prompt_ordinal, rollout.rollout_id.sample],
        "prompt": rollout.tokens[:start].clone(),
        "tokens": rollout.tokens[start:].clone(),
        "logprobs": rollout.sample_logprobs[start:].clone(),
        "versions": rollout.weight_version[start:].clone(),
        "is_sampled": rollout.loss_mask[start:].clone(),
    }


def id_of(record: Mapping[str, Any]) -> RolloutId:
    """Whose record it is."""
    return RolloutId(*record["id"])


def sampled_of(record: Mapping[str, Any]) -> tuple[Sampled, ...]:
    """The tokens after the prompt of a paused episode."""
    names = ("tokens", "logprobs", "versions", "is_sampled")
    return tuple(map(Sampled, *(record[name].tolist() for name in names)))


def finished_of(record: Mapping[str, Any]) -> FinishedRollout:
    """The rollout of `finished_record`."""
    prompt = record["prompt"]

    def stream(name: str) -> Tensor:
        tokens: Tensor = record[name]
        return torch.cat([tokens.new_zeros(len(prompt)), tokens])

    # A checkpoint from before episodes gave rewards has none.
    episode = record.get("episode", {"turns": [], "rewards": {}})
    turns = tuple(TurnRecord(**turn) for turn in episode["turns"])
    rollout = Rollout(
        tokens=torch.cat([prompt, record["tokens"]]),
        loss_mask=stream("is_sampled"),
        sample_logprobs=stream("logprobs"),
        weight_version=stream("versions"),
        num_prompt_tokens=len(prompt),
        rollout_id=id_of(record),
        finish_reason=record["finish_reason"],
        episode=EpisodeRecord(turns, episode["rewards"]),
    )
    return FinishedRollout(rollout, record["rewards"], record["failed"])
