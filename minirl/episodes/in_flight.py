"""Rollouts in flight as records of a checkpoint: JSON values and tensors (`run.checkpoint`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from minirl.data.prompts import PromptStream
from minirl.data.task import Messages
from minirl.data.view import as_plain
from minirl.episodes.episode import Branch
from minirl.episodes.running import PausedEpisode, RunningEpisode
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import EpisodeRecord, Request, Rollout, RolloutId, rollout_of, token_tensor
from minirl.turns import TurnFacts


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that has ended; with its rewards if all those of its prompt on its rank have. None: does not apply."""

    rollout: Rollout
    rewards: list[float | None] | None = None
    failed: bool = False


def paused_record(running: RunningEpisode) -> dict[str, Any]:
    """Return the record of a paused episode."""
    request = running.request
    _, present = running.present
    branches = []
    for branch in running.branches.values():
        rollout = rollout_of(branch.request, "", branch.completion(present))
        branches.append(_tokens_record(rollout))
    return {
        "id": list(request.rollout_id),
        "prompt": token_tensor(request.prompt_ids),
        "branches": branches,
        "begun": [_begun_record(branch) for branch in running.episode.further if branch.turns],
        "turns": [_turn_record(turn) for turn in running.episode.all_turns],
        "asked": present.asked,
        "finish_reason": None,
    }


def prompt_of(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token ids of a record's prompt."""
    ids: list[int] = record["prompt"].tolist()
    return tuple(ids)


def paused_episode(record: Mapping[str, Any], request: Request) -> PausedEpisode:
    """Return the paused episode of `paused_record`. request: of its id and prompt."""
    branches = {id_of(branch).branch: _rollout_of(branch) for branch in record["branches"]}
    return PausedEpisode(request, branches, record["begun"], record["turns"], record["asked"])


def finished_record(finished: FinishedRollout) -> dict[str, Any]:
    """The record of a rollout that has ended."""
    return {
        **_tokens_record(finished.rollout),
        "earlier": [_tokens_record(branch) for branch in finished.rollout.earlier],
        "episode": _ended_record(finished.rollout.episode),
        "rewards": finished.rewards,
        "failed": finished.failed,
    }


def finished_rollouts(rewarded: RewardedRollouts) -> list[FinishedRollout]:
    """Rollouts with their rewards as `finished_record` takes them."""
    finished = []
    for rollout, rewards, failed in zip(
        rewarded.rollouts, rewarded.rewards.tolist(), rewarded.failed.tolist(), strict=True
    ):
        applicable = [None if math.isnan(reward) else reward for reward in rewards]
        finished.append(FinishedRollout(rollout, applicable, failed))
    return finished


def rewarded_of(finished: Sequence[FinishedRollout], prompts: PromptStream) -> RewardedRollouts:
    """Rollouts with their rewards, of at least one function. prompts: the stream that their prompts come from."""
    rollouts = [one.rollout for one in finished]
    rewards = [[math.nan if x is None else x for x in one.rewards or []] for one in finished]
    return RewardedRollouts(
        rollouts=rollouts,
        rows=[prompts.row(rollout.rollout_id.prompt_ordinal) for rollout in rollouts],
        texts=[prompts.completion_text(rollout) for rollout in rollouts],
        rewards=torch.tensor(rewards, dtype=torch.float64),
        failed=torch.tensor([one.failed for one in finished], dtype=torch.bool),
    )


def _ended_record(episode: EpisodeRecord) -> dict[str, Any]:
    """Return the record of an episode that ended."""
    turns = [_turn_record(turn) for turn in episode.turns]
    return {**vars(episode), "turns": turns, "prompt": _prompt_record(episode.prompt)}


def _turn_record(turn: TurnFacts) -> dict[str, Any]:
    return {**turn.to_json(), "inserted": as_plain(turn.inserted)}


def _begun_record(branch: Branch) -> dict[str, Any]:
    """Return what a further branch begins with."""
    return {**branch.to_json(), "prompt": _prompt_record(branch.prompt)}


def _prompt_record(prompt: str | list[Any] | None) -> str | list[Any] | None:
    """Return a branch's prompt: text, token ids, or what JSON holds of messages."""
    has_messages = isinstance(prompt, list) and isinstance(next(iter(prompt), None), dict)
    return as_plain(cast(Messages, prompt)) if has_messages else prompt


def _episode_of(values: Mapping[str, Any]) -> EpisodeRecord:
    """Return the episode of `_ended_record`."""
    return EpisodeRecord(**{**values, "turns": [TurnFacts(**turn) for turn in values["turns"]]})


def _tokens_record(rollout: Rollout) -> dict[str, Any]:
    start = rollout.num_prompt_tokens
    return {
        "id": list(rollout.rollout_id),
        "prompt": rollout.tokens[:start].clone(),
        "tokens": rollout.tokens[start:].clone(),
        "logprobs": rollout.sample_logprobs[start:].clone(),
        "versions": rollout.weight_version[start:].clone(),
        "is_sampled": rollout.loss_mask[start:].clone(),
        "finish_reason": rollout.finish_reason,
        "branch_end": rollout.branch_end,
    }


def id_of(record: Mapping[str, Any]) -> RolloutId:
    """Return whose record it is."""
    return RolloutId(*record["id"])


def finished_of(record: Mapping[str, Any]) -> FinishedRollout:
    """The rollout of `finished_record`."""
    earlier = tuple(_rollout_of(branch) for branch in record["earlier"])
    rollout = replace(_rollout_of(record), earlier=earlier)
    return FinishedRollout(rollout, record["rewards"], record["failed"])


def _rollout_of(record: Mapping[str, Any]) -> Rollout:
    """The branch of `_tokens_record`."""
    prompt = record["prompt"]
    episode = record.get("episode")  # of a rollout that ended, in its last branch

    def stream(name: str) -> Tensor:
        tokens: Tensor = record[name]
        return torch.cat([tokens.new_zeros(len(prompt)), tokens])

    return Rollout(
        tokens=torch.cat([prompt, record["tokens"]]),
        loss_mask=stream("is_sampled"),
        sample_logprobs=stream("logprobs"),
        weight_version=stream("versions"),
        num_prompt_tokens=len(prompt),
        rollout_id=id_of(record),
        finish_reason=record["finish_reason"],
        branch_end=record["branch_end"],
        episode=EpisodeRecord() if episode is None else _episode_of(episode),
    )
