"""Data types of generation: requests, sampled tokens and rollouts. Token ids, all on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RolloutId:
    """Identifies a rollout in its run.

    `prompt_ordinal` numbers the prompts served since the run's start; `sample` numbers the rollouts of one
    prompt.
    """

    prompt_ordinal: int
    sample: int


class Sampled(NamedTuple):
    """One sampled token, its logprob at the sampling temperature, and the version of the weights used.

    Or a token that was appended between two turns (`Engine.resume`): then the numbers are 0 and is_sampled is false.
    """

    token: int
    logprob: float
    weight_version: int
    is_sampled: bool = True


def appended(tokens: Sequence[int]) -> tuple[Sampled, ...]:
    """Tokens that were appended, not sampled."""
    return tuple(Sampled(token, 0.0, 0, is_sampled=False) for token in tokens)


class StopTest(Protocol):
    """Tells whether a turn has ended with the token sampled last, as `data.stop_strings` does for texts."""

    @property
    def max_tokens(self) -> int:
        """How many ids it looks at, at least 1."""

    def __call__(self, ids: Sequence[int]) -> bool:
        """Whether the turn ends with the last of these ids: those sampled in the turn, the last `max_tokens` of them.

        It is asked after each token of the turn until it says so, and must depend on the ids alone.
        """


@dataclass(frozen=True)
class Request:
    """One rollout to generate. `sampled` are tokens that an earlier phase sampled (see `Engine.abort`).

    holds: when its turn ends, its keys and values stay in the cache for a further turn (`Engine.resume`), until it is
    released. max_new_tokens then counts the tokens after the prompt in all turns so far, appended ones included.
    stop_test: ends the turn too, besides stop_ids.
    turn_start: how many tokens after the prompt came before the present turn, appended ones included. What was sampled
    since then, be it in an earlier phase, is the turn's.
    """

    prompt_ids: tuple[int, ...]
    rollout_id: RolloutId
    key: int  # of the sampling noise: `sampling.request_key`
    max_new_tokens: int
    temperature: float  # 0: always the likeliest token
    stop_ids: frozenset[int]
    sampled: tuple[Sampled, ...] = ()
    holds: bool = False
    stop_test: StopTest | None = None
    turn_start: int = 0


@dataclass(frozen=True)
class TurnRecord:
    """A turn of an episode that has ended. start, end: where its tokens are among those after the prompt.

    inserted: the messages that were appended before it. rewards: by name, what was given behind it, before the next.
    """

    start: int
    end: int
    finish_reason: str
    inserted: list[dict[str, str]] = field(default_factory=list)
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EpisodeRecord:
    """What is known of an episode that has ended, beside its tokens.

    rewards: by name, all that was given or returned; None for one that does not apply.
    """

    turns: tuple[TurnRecord, ...] = ()
    rewards: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One prompt with one completion, L tokens in all. Tensors have one element per token, on the host.

    A completion of several turns has appended tokens between them, which are no part of the loss mask.
    """

    tokens: Tensor  # int64 [L]
    loss_mask: Tensor  # bool [L], true where the policy sampled the token
    sample_logprobs: Tensor  # fp32 [L], recorded by the engine when it sampled; 0 where loss_mask is false
    weight_version: Tensor  # int32 [L], version (optimizer step) of the weights used; 0 in the prompt
    num_prompt_tokens: int
    rollout_id: RolloutId
    finish_reason: (
        str  # "stop" (by a stop id or the stop test), "length"; of episodes also "max_turns" and "error"
    )
    # Of a rollout that no episode runner has made: without turns.
    episode: EpisodeRecord = field(default_factory=EpisodeRecord)

    @property
    def completion(self) -> list[int]:
        """The token ids after the prompt, including the stop token."""
        return self.tokens[self.num_prompt_tokens :].tolist()


def rollout_of(request: Request, finish_reason: str) -> Rollout:
    """The rollout of a request with the tokens that it has so far."""
    num_prompt_tokens = len(request.prompt_ids)
    before = [0] * num_prompt_tokens
    after = request.sampled
    return Rollout(
        tokens=torch.tensor([*request.prompt_ids, *(sampled.token for sampled in after)], dtype=torch.int64),
        loss_mask=torch.tensor([*before, *(sampled.is_sampled for sampled in after)], dtype=torch.bool),
        sample_logprobs=torch.tensor([*before, *(sampled.logprob for sampled in after)], dtype=torch.float32),
        weight_version=torch.tensor(
            [*before, *(sampled.weight_version for sampled in after)], dtype=torch.int32
        ),
        num_prompt_tokens=num_prompt_tokens,
        rollout_id=request.rollout_id,
        finish_reason=finish_reason,
    )
