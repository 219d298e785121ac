"""Rollouts in flight as records of a checkpoint: JSON values and tensors (`run.checkpoint`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from minirl.data.prompts import PromptStream
from minirl.episodes.running import PausedEpisode, RunningEpisode, plain_facts
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import (
    EpisodeRecord,
    KeptIds,
    Request,
    Rollout,
    RolloutId,
    rollout_of,
    token_tensor,
)
from minirl.turn_facts import TurnFacts


def paused_record(running: RunningEpisode) -> dict[str, Any]:
    """Return the record of an episode between two steps."""
    request = running.request
    present = running.unfinished_turn
    branches = []
    for branch in running.branches.values():
        prompt = token_tensor(branch.request.prompt_ids)
        rollout = rollout_of(
            branch.request.rollout_id,
            prompt,
            branch.completion(present),
            finish_reason="",
            temperature=request.temperature,
        )
        branches.append(_record(rollout))
    return {
        "rollout_id": list(request.rollout_id),
        "prompt": token_tensor(request.prompt_ids),
        "branches": branches,
        "turns": [asdict(plain_facts(turn)) for turn in running.episode.all_turns],
        "asked": [turn.asked for turn in running.episode.all_turns + ([present] if present else [])],
        "finish_reason": None,
        "temperature": request.temperature,
    }


def paused_episode(record: Mapping[str, Any], request: Request) -> PausedEpisode:
    """Return the paused episode of `paused_record`. request: has its id and prompt."""
    branches = {id_of(branch).branch: _rollout(branch) for branch in record["branches"]}
    return PausedEpisode(request, branches, record["turns"], record["asked"])


def finished_record(rollout: Rollout, rewards: Sequence[float | None] | None = None) -> dict[str, Any]:
    """Return the record of a finished rollout.

    rewards: None while other rollouts of its prompt are missing on its rank; within the list, None where a reward does
    not apply.
    """
    return {**_record(rollout), "rewards": rewards}


def rewarded_records(rewarded: RewardedRollouts) -> list[dict[str, Any]]:
    """Return the records of rollouts with their rewards."""
    records = []
    for rollout, rewards in zip(rewarded.rollouts, rewarded.rewards.tolist(), strict=True):
        applicable = [None if math.isnan(reward) else reward for reward in rewards]
        records.append(finished_record(rollout, applicable))
    return records


def rewarded_of(records: Sequence[Mapping[str, Any]], prompts: PromptStream) -> RewardedRollouts:
    """Return the rollouts of `rewarded_records`, one or more. prompts: the stream that their prompts come from."""
    rollouts = [finished_rollout(record) for record in records]
    rewards = [[math.nan if x is None else x for x in record["rewards"]] for record in records]
    return RewardedRollouts(
        rollouts=rollouts,
        rows=[prompts.row(rollout.rollout_id.prompt_ordinal) for rollout in rollouts],
        texts=[prompts.completion_text(rollout) for rollout in rollouts],
        rewards=torch.tensor(rewards, dtype=torch.float64),
    )


def id_of(record: Mapping[str, Any]) -> RolloutId:
    """Return the rollout's id in a record."""
    return RolloutId(*record["rollout_id"])


def finished_rollout(record: Mapping[str, Any]) -> Rollout:
    """Return the rollout of `finished_record`."""
    return _rollout({name: value for name, value in record.items() if name != "rewards"})


def _record(rollout: Rollout) -> dict[str, Any]:
    """Return the fields of a rollout, copied."""
    fields = asdict(replace(rollout, earlier=()))
    earlier = [_record(branch) for branch in rollout.earlier]
    return {**fields, "rollout_id": list(rollout.rollout_id), "earlier": earlier}


def _rollout(fields: Mapping[str, Any]) -> Rollout:
    turns = [TurnFacts(**turn) for turn in fields["episode"]["turns"]]
    read = {
        "kept": KeptIds(**fields["kept"]),
        "rollout_id": id_of(fields),
        "episode": EpisodeRecord(**{**fields["episode"], "turns": turns}),
        "earlier": tuple(map(_rollout, fields["earlier"])),
    }
    return Rollout(**{**fields, **read})
