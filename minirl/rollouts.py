"""Data types for generation: requests, sampled tokens and rollouts. Tokens are numpy arrays on the host."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# Finish reasons of truncated rollouts.
TRUNCATED_REASONS = frozenset({"length", "max_turns", "max_tokens", "timeout"})
MAX_TOP_K = 256  # maximum number of tokens that truncated sampling sorts


class RolloutId(NamedTuple):
    """Identifies a branch of a rollout within its run. Ids sort by prompt, sample and branch.

    `prompt_ordinal` numbers the prompts drawn since the run's start, `sample` the rollouts of one prompt, and `branch`
    the branches of one rollout in the order of their creation.
    """

    prompt_ordinal: int
    sample: int
    branch: int = 0


# One token of a rollout. `is_sampled`: whether the policy sampled it. `logprob`: its logprob at the sampling
# temperature. `weight_version`: the version of the weights that sampled it. The last two are 0 for tokens that were not
# sampled.
TOKEN = np.dtype(
    [("id", np.int64), ("logprob", np.float32), ("weight_version", np.int32), ("is_sampled", np.bool_)],
    align=True,
)
Stream = NDArray[np.void]  # dtype TOKEN


def make_token_stream(ids: Sequence[int]) -> Stream:
    """Return a stream TOKEN [n] of unsampled ids: a prompt, or tokens appended between two turns."""
    stream = np.zeros(len(ids), TOKEN)
    stream["id"] = array("q", ids)  # converts a long tuple ten times as fast as numpy
    return stream


NO_TOKENS = make_token_stream(())


def join_streams(*streams: Stream) -> Stream:
    """Concatenate streams into a new one."""
    # Pass the dtype, which numpy would otherwise derive again for each pair.
    return np.concatenate([NO_TOKENS, *streams], dtype=TOKEN)


class Truncation(NamedTuple):
    """Top-k and top-p sampling: keep the `top_k` likeliest tokens, and of these the smallest set with at least the
    fraction `top_p` of their probability.

    The kept probabilities are renormalized. top_k 0 keeps all tokens. Truncated samples are never trained on, because
    training computes logprobs under the full distribution.
    """

    top_k: int = 0
    top_p: float = 1.0


NO_TRUNCATION = Truncation()


class StopTest(Protocol):
    """Decides which turns end with their last sampled token; `data.tokenizer.StopStrings` does so for stop strings."""

    @property
    def max_tokens(self) -> int:
        """The number of token ids at a turn's end that the test examines, at least 1."""

    def __call__(self, turns: Sequence[list[int]]) -> Sequence[bool]:
        """Return whether each turn ends with its last token. A turn is the list of its last `max_tokens` sampled ids.

        The engine calls this once per decode step for all turns with this test. A turn's result must depend only on its
        own ids.
        """


@dataclass(frozen=True, eq=False)
class Request:
    """One rollout to generate.

    sampled: the tokens after the prompt so far, from earlier turns and generation phases.
    parks_after_turn: whether the request stays in the KV cache when its turn ends, until it is released or submitted
    for another turn, with more tokens in `sampled`.
    max_new_tokens: maximum number of tokens after the prompt, over all turns and including appended tokens.
    stop_test: a test that ends the turn, in addition to stop_ids; None for stop_ids alone.
    turn_start: number of tokens between the prompt and the current turn, appended ones included. All tokens sampled
    since then belong to the turn, even those from an earlier generation phase.
    """

    prompt_ids: tuple[int, ...]
    rollout_id: RolloutId
    rng_key: int  # key of the sampling noise; see `sampling.request_key`
    max_new_tokens: int
    temperature: float  # 0: greedy
    stop_ids: frozenset[int]
    sampled: Stream = field(default_factory=lambda: NO_TOKENS)
    parks_after_turn: bool = False
    truncation: Truncation = NO_TRUNCATION
    stop_test: StopTest | None = None
    turn_start: int = 0


@dataclass
class TurnRecord:
    """One turn: `num_tokens` sampled tokens that begin `start` tokens after the branch's prompt.

    finish_reason: "stop" or "length"; "" until the turn ends. branch: the number of the turn's branch. parse_error: why
    the turn's message could not be parsed completely; None if parsing succeeded or was not requested. extra: data that
    the rollout function records for a fork of the script, which reads it from `rollout.episode.turns`.
    inserted: the messages appended before the turn.
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
        """The turn's end, in tokens after the branch's prompt."""
        return self.start + self.num_tokens

    def json_fields(self) -> dict[str, Any]:
        """Return all fields except `inserted`, as JSON values."""
        return {name: value for name, value in vars(self).items() if name != "inserted"}


@dataclass(frozen=True)
class EpisodeRecord:
    """The record of a finished episode, without its tokens. Empty if the rollout had no episode.

    turns: the turns, branch by branch. rewards: named rewards, each the sum of the values added with
    `Episode.reward` and the value that the rollout function returned; None for a reward that does not apply.
    environment: `Episode.environment`, for reward functions that take it.
    prompt: the last branch's prompt as text, messages or token ids. tools: JSON schemas of the tools that the
    prompt includes; None if it includes the run's tools. row: the episode's `data.task.Row`.
    """

    turns: Sequence[TurnRecord] = field(default_factory=list)
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    environment: Any = None
    prompt: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    row: Any = None


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """A prompt with its completion, L tokens in all: the engine's result for a request, and a training sample.

    stream: TOKEN [L]. Tokens that were appended between turns are not in the loss mask.
    finish_reason: see `Rollout`; the engine returns only "stop" or "length".
    temperature: the temperature at which the tokens were sampled.
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
        """The number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def is_truncated(self) -> bool:
        """Whether a limit truncated the sequence."""
        return self.finish_reason in TRUNCATED_REASONS


@dataclass(frozen=True, eq=False)
class Rollout:
    """The samples of one finished `Episode` for one prompt.

    branches: the branches in order; usually only one. An episode that rewrites its conversation, or begins a second
    one, has several branches. Each branch is a separate training sample. All branches share the rollout's rewards and
    its weight in the loss.
    finish_reason: "stop" (at a stop token or stop string) or "length"; also "turn_length" (the last turn reached its
    own `max_tokens`), one of `TRUNCATED_REASONS`, or one of `episodes.episode.END_REASONS` from the rollout function.
    """

    branches: tuple[SampledSequence, ...]
    finish_reason: str
    episode: EpisodeRecord = field(default_factory=EpisodeRecord)

    @property
    def rollout_id(self) -> RolloutId:
        """The id of the first branch."""
        return self.branches[0].rollout_id._replace(branch=0)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy sampled in all branches."""
        return sum(branch.num_sampled for branch in self.branches)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit truncated the rollout."""
        return self.finish_reason in TRUNCATED_REASONS

    @property
    def completion(self) -> list[int]:
        """The token ids after the prompt, including the stop token. The branches' ids are concatenated."""
        return [token for branch in self.branches for token in branch.completion]


class RewardedRollout(NamedTuple):
    """A rollout with its K rewards.

    text: the completion without special tokens. rewards: [K]; NaN where a reward does not apply.
    """

    rollout: Rollout
    text: str
    rewards: list[float]


def all_branches(rollouts: Iterable[Rollout]) -> list[SampledSequence]:
    """Return all branches of these rollouts, in order."""
    return [branch for rollout in rollouts for branch in rollout.branches]
