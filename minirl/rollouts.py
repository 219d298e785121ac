"""Data types of generation: requests, sampled tokens and rollouts. Token ids in numpy arrays, on the host."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# The finish reasons of rollouts that a limit cut off.
TRUNCATED_REASONS = frozenset({"length", "max_turns", "max_tokens", "timeout"})
MAX_TOP_K = 256  # the most tokens that truncated sampling sorts


class RolloutId(NamedTuple):
    """Identifies a rollout in its run; ids sort by these numbers.

    `prompt_ordinal` numbers the prompts served since the run's start; `sample` numbers the rollouts of one
    prompt, and `branch` the branches of one rollout, in the order in which they were begun.
    """

    prompt_ordinal: int
    sample: int
    branch: int = 0


# One token of a rollout. `is_sampled`: the policy sampled it; `logprob`: at the sampling temperature; `weight_version`:
# the version of the weights that sampled it. The last two are 0 where nothing was sampled.
TOKEN = np.dtype(
    [("id", np.int64), ("logprob", np.float32), ("weight_version", np.int32), ("is_sampled", np.bool_)],
    align=True,
)
Stream = NDArray[np.void]  # of TOKEN


def unsampled_stream(ids: Sequence[int]) -> Stream:
    """Return TOKEN [n] with these ids: a prompt, or tokens that were appended between two turns."""
    stream = np.zeros(len(ids), TOKEN)
    stream["id"] = array("q", ids)  # which converts a long tuple ten times as fast as numpy
    return stream


NO_TOKENS = unsampled_stream(())


def join_streams(*streams: Stream) -> Stream:
    """Return a copy of these tokens, end to end."""
    # With its dtype, which numpy would otherwise derive again for each pair.
    return np.concatenate([NO_TOKENS, *streams], dtype=TOKEN)


class Truncation(NamedTuple):
    """Which tokens may be sampled: the `top_k` likeliest; of these the smallest set with at least the share `top_p`
    of their probability.

    The kept tokens' probabilities are then divided by their sum. top_k 0: all tokens may be sampled. Nothing is trained
    on truncated samples: their logprobs are those of other distributions than training computes.
    """

    top_k: int = 0
    top_p: float = 1.0


NO_TRUNCATION = Truncation()


class StopTest(Protocol):
    """Finds the turns that end with their last sampled token; `data.tokenizer.StopStrings` does so for texts."""

    @property
    def max_tokens(self) -> int:
        """The number of ids that it examines, 1 or more."""

    def __call__(self, turns: Sequence[list[int]]) -> Sequence[bool]:
        """Return for each turn whether it ends with the last of its ids: the last `max_tokens` sampled in it.

        The engine calls it once per decode step for all turns with this test. Each turn's result must depend on its ids
        alone.
        """


@dataclass(frozen=True, eq=False)
class Request:
    """One rollout to generate. `sampled` has the tokens of an earlier phase.

    parks_after_turn: when its turn ends, its keys and values stay in the cache, until it is released or, for another
    turn, submitted with more tokens in `sampled`.
    max_new_tokens: counts the tokens after the prompt in all turns so far, appended ones included.
    stop_test: ends the turn too, besides stop_ids; None: nothing else does.
    turn_start: the number of tokens after the prompt before the current turn, appended ones included. All tokens
    sampled since then, even in an earlier phase, are the turn's.
    """

    prompt_ids: tuple[int, ...]
    rollout_id: RolloutId
    rng_key: int  # for the sampling noise: `sampling.request_key`
    max_new_tokens: int
    temperature: float  # 0: always the likeliest token
    stop_ids: frozenset[int]
    sampled: Stream = field(default_factory=lambda: NO_TOKENS)
    parks_after_turn: bool = False
    truncation: Truncation = NO_TRUNCATION
    stop_test: StopTest | None = None
    turn_start: int = 0


@dataclass
class TurnRecord:
    """A turn: `num_tokens` sampled tokens, from `start` among those after the prompt of its branch.

    finish_reason: "stop" or "length"; "" until the turn ends. branch: its number. parse_error: why its message could
    not be read in whole; None if it could, or if nobody read it. extra: what its
    function notes for a fork of the script, which finds it in `rollout.episode.turns`.
    inserted: the messages appended before it.
    """

    start: int
    num_tokens: int = 0
    finish_reason: str = ""
    branch: int = 0
    parse_error: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    inserted: list[dict[str, Any]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Where the turn ends among the branch's tokens after its prompt."""
        return self.start + self.num_tokens

    def numbers(self) -> dict[str, Any]:
        """Return the facts, without messages, as JSON values by the names above."""
        return {one.name: getattr(self, one.name) for one in fields(TurnRecord) if one.name != "inserted"}


@dataclass(frozen=True)
class EpisodeRecord:
    """The stored facts of a finished episode, besides its tokens. Empty if no episode made the rollout.

    turns: branch by branch. rewards: by name, the sum given and returned; None for one that does not apply.
    environment: `Episode.environment`, for reward functions that ask for it.
    prompt: the prompt of the last branch, text, messages or token ids. tools: JSON schemas of the tools that it shows;
    None for the run's. row: the `data.task.Row` that the episode began with.
    """

    turns: Sequence[TurnRecord] = field(default_factory=list)
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    environment: Any = None
    prompt: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    row: Any = None


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """A prompt with its completion, L tokens in all: what the engine returns for a request, and a training sample.

    stream: TOKEN [L]. A completion of several turns has appended tokens between them, which are not in the loss mask.
    finish_reason: as that of a `Rollout`, of which this is a branch; from the engine, "stop" or "length".
    temperature: that its tokens were sampled at.
    """

    stream: Stream
    num_prompt_tokens: int
    rollout_id: RolloutId
    finish_reason: str
    temperature: float = 1.0

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The token ids [L]."""
        return self.stream["id"]

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Whether the policy sampled each token, [L]."""
        return self.stream["is_sampled"]

    @property
    def after_prompt(self) -> Stream:
        """The tokens after the prompt."""
        return self.stream[self.num_prompt_tokens :]

    @property
    def completion(self) -> list[int]:
        """The token ids after the prompt, including the stop token."""
        return self.after_prompt["id"].tolist()

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def is_truncated(self) -> bool:
        """Whether a limit cut it off."""
        return self.finish_reason in TRUNCATED_REASONS


@dataclass(frozen=True, eq=False)
class Rollout:
    """What an episode sampled for one prompt: the `Episode`, as it is stored when it has ended.

    branches: in order; mostly one. An episode that does more than append to its tokens (a rewritten conversation, a
    second conversation) has several: each is a training sample with its own end. They share the rollout's rewards and
    its weight in the loss.
    finish_reason: "stop" (by a stop id or stop string) or "length"; also "turn_length" (the last turn reached its own
    `max_tokens`), one of `TRUNCATED_REASONS`, or one of `episodes.episode.END_REASONS` from its function.
    """

    branches: tuple[SampledSequence, ...]
    finish_reason: str
    episode: EpisodeRecord = field(default_factory=EpisodeRecord)

    @property
    def rollout_id(self) -> RolloutId:
        """The id of its first branch."""
        return self.branches[0].rollout_id._replace(branch=0)

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy sampled, in all branches."""
        return sum(branch.num_sampled for branch in self.branches)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit cut off the rollout."""
        return self.finish_reason in TRUNCATED_REASONS

    @property
    def completion(self) -> list[int]:
        """The token ids after the prompt, including the stop token; those of several branches end to end."""
        return [token for branch in self.branches for token in branch.completion]


def all_branches(rollouts: Iterable[Rollout]) -> list[SampledSequence]:
    """The branches of these rollouts, end to end."""
    return [branch for rollout in rollouts for branch in rollout.branches]
