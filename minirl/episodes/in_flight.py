"""Rollouts in flight as records of a checkpoint: JSON values and tensors (`run.checkpoint`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from minirl.data.prompts import PromptStream
from minirl.data.task import is_messages
from minirl.data.view import as_plain
from minirl.episodes.running import PausedEpisode, RunningEpisode
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import (
    Completion,
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
        rollout = rollout_of(branch.request.rollout_id, prompt, branch.completion(present), "")
        branches.append(_tokens_record(rollout))
    return {
        "id": list(request.rollout_id),
        "prompt": token_tensor(request.prompt_ids),
        "branches": branches,
        "begun": [
            {**branch.to_json(), "prompt": _prompt_record(branch.prompt)}
            for branch in running.episode.further
            if branch.turns
        ],
        "turns": [_turn_record(turn) for turn in running.episode.all_turns],
        "asked": None if present is None else present.asked,
        "finish_reason": None,
    }


def paused_episode(record: Mapping[str, Any], request: Request) -> PausedEpisode:
    """Return the paused episode of `paused_record`. request: has its id and prompt."""
    branches = {id_of(branch).branch: _branch_of(branch) for branch in record["branches"]}
    return PausedEpisode(request, branches, record["begun"], record["turns"], record["asked"])


def finished_record(
    rollout: Rollout, rewards: Sequence[float | None] | None = None, *, failed: bool = False
) -> dict[str, Any]:
    """Return the record of a finished rollout.

    rewards: None while other rollouts of its prompt are missing on its rank; within the list, None where a reward does
    not apply.
    """
    return {
        **_tokens_record(rollout),
        "earlier": [_tokens_record(branch) for branch in rollout.earlier],
        "episode": _ended_record(rollout.episode),
        "rewards": rewards,
        "failed": failed,
    }


def rewarded_records(rewarded: RewardedRollouts) -> list[dict[str, Any]]:
    """Return the records of rollouts with their rewards."""
    records = []
    for rollout, rewards, failed in zip(
        rewarded.rollouts, rewarded.rewards.tolist(), rewarded.failed.tolist(), strict=True
    ):
        applicable = [None if math.isnan(reward) else reward for reward in rewards]
        records.append(finished_record(rollout, applicable, failed=failed))
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
        failed=torch.tensor([record["failed"] for record in records], dtype=torch.bool),
    )


def _ended_record(episode: EpisodeRecord) -> dict[str, Any]:
    """Return the record of a finished episode."""
    turns = [_turn_record(turn) for turn in episode.turns]
    return {**vars(episode), "turns": turns, "prompt": _prompt_record(episode.prompt)}


def _turn_record(turn: TurnFacts) -> dict[str, Any]:
    return {**turn.to_json(), "inserted": as_plain(turn.inserted)}


def _prompt_record(prompt: str | list[Any] | None) -> str | list[Any] | None:
    """Return a branch's prompt: text, token ids, or what JSON holds of messages."""
    return as_plain(prompt) if prompt is not None and is_messages(prompt) else prompt


def _tokens_record(rollout: Rollout) -> dict[str, Any]:
    start = rollout.num_prompt_tokens
    record = {
        "id": list(rollout.rollout_id),
        "prompt": rollout.tokens[:start].clone(),
        "tokens": rollout.tokens[start:].clone(),
        "logprobs": rollout.sample_logprobs[start:].clone(),
        "versions": rollout.weight_version[start:].clone(),
        "is_sampled": rollout.loss_mask[start:].clone(),
        "finish_reason": rollout.finish_reason,
        "branch_end": rollout.branch_end,
    }
    if len(rollout.kept.ids):
        record |= {"num_kept": rollout.kept.counts[start:].clone(), "kept_ids": rollout.kept.ids}
    return record


def id_of(record: Mapping[str, Any]) -> RolloutId:
    """Return the rollout's id in a record."""
    return RolloutId(*record["id"])


def finished_rollout(record: Mapping[str, Any]) -> Rollout:
    """Return the rollout of `finished_record`."""
    earlier = tuple(_branch_of(branch) for branch in record["earlier"])
    turns = [TurnFacts(**turn) for turn in record["episode"]["turns"]]
    episode = EpisodeRecord(**{**record["episode"], "turns": turns})
    return replace(_branch_of(record), earlier=earlier, episode=episode)


def _branch_of(record: Mapping[str, Any]) -> Rollout:
    """Return the branch of `_tokens_record`."""
    kept = KeptIds.none(len(record["tokens"]))
    if "kept_ids" in record:
        kept = KeptIds(record["num_kept"], record["kept_ids"])
    names = ("tokens", "is_sampled", "logprobs", "versions")
    streams = Completion(*(record[name] for name in names), kept=kept)
    branch = rollout_of(id_of(record), record["prompt"], streams, record["finish_reason"])
    return replace(branch, branch_end=record["branch_end"])
