"""Rollouts in flight as records of a checkpoint: JSON values and tensors (`run.checkpoint`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minirl.data.prompts import PromptStream
from minirl.episodes.runner import RecordedBranch, RecordedEpisode, RunningEpisode, TurnEnd
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import Completion, EpisodeRecord, Request, Rollout, RolloutId, rollout_of


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that has ended; with its rewards if all those of its prompt on its rank have. None: does not apply."""

    rollout: Rollout
    rewards: list[float | None] | None = None
    failed: bool = False


def episode_record(running: RunningEpisode) -> dict[str, Any]:
    """The record of a paused episode."""
    request = running.request
    return {
        "id": list(request.rollout_id),
        "prompt": torch.tensor(request.prompt_ids, dtype=torch.int64),
        "branches": [_tokens_record(rollout_of(branch.request, "")) for branch in running.branches.values()],
        "turn_ends": [list(end) for end in running.turn_ends],
        "finish_reason": None,
    }


def prompt_of(record: Mapping[str, Any]) -> tuple[int, ...]:
    """The token ids of its prompt."""
    ids: list[int] = record["prompt"].tolist()
    return tuple(ids)


def recorded_episode(record: Mapping[str, Any], request: Request) -> RecordedEpisode:
    """The paused episode of `episode_record`. request: of its id and prompt.

    Records of before there were branches have the tokens of the only one.
    """
    branches = {}
    for branch in record.get("branches", [record]):
        sampled = Completion(*(branch[name] for name in ("tokens", "is_sampled", "logprobs", "versions")))
        branches[id_of(branch).branch] = RecordedBranch(prompt_of(branch), sampled)
    return RecordedEpisode(request, branches, [TurnEnd(*end) for end in record["turn_ends"]])


def finished_record(finished: FinishedRollout) -> dict[str, Any]:
    """The record of a rollout that has ended."""
    return {
        **_tokens_record(finished.rollout),
        "earlier": [_tokens_record(branch) for branch in finished.rollout.earlier],
        "episode": finished.rollout.episode.to_json(),
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
    """Whose record it is. Records of before there were branches have no number of one."""
    return RolloutId(*record["id"])


def finished_of(record: Mapping[str, Any]) -> FinishedRollout:
    """The rollout of `finished_record`."""
    earlier = tuple(_rollout_of(branch) for branch in record.get("earlier", ()))
    rollout = replace(_rollout_of(record), earlier=earlier)
    return FinishedRollout(rollout, record["rewards"], record["failed"])


def _rollout_of(record: Mapping[str, Any]) -> Rollout:
    """The branch of `_tokens_record`."""
    prompt = record["prompt"]
    episode = record.get("episode")  # a checkpoint from before it was recorded has none

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
        branch_end=record.get("branch_end", ""),  # likewise
        episode=EpisodeRecord() if episode is None else EpisodeRecord.from_json(episode),
    )
