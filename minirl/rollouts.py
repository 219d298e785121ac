"""Data types for generation: requests, sampled tokens and rollouts. Tokens are NumPy arrays in host memory."""

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
    """The id of a rollout's branch within a run. Ids are sorted by prompt, sample and branch.

    `prompt_ordinal` is the prompt's index among all prompts drawn since the start of the run; `sample` is the rollout's
    index among the rollouts of its prompt; `branch` is the branch's index in its rollout, in order of creation.
    """

    prompt_ordinal: int
    sample: int
    branch: int = 0


# One token of a rollout. `is_sampled`: whether the policy sampled the token. `logprob`: the token's logprob at the
# sampling temperature. `weight_version`: version of the weights that sampled the token. `logprob` and `weight_version`
# are 0 for tokens that the policy did not sample.
TOKEN = np.dtype(
    [("id", np.int64), ("logprob", np.float32), ("weight_version", np.int32), ("is_sampled", np.bool_)],
    align=True,
)
Stream = NDArray[np.void]  # dtype TOKEN


def make_token_stream(ids: Sequence[int]) -> Stream:
    """Return a TOKEN array [n] for ids that were not sampled: a prompt, or tokens appended between two turns."""
    stream = np.zeros(len(ids), TOKEN)
    stream["id"] = array("q", ids)  # ten times as fast as converting a long tuple with NumPy
    return stream


NO_TOKENS = make_token_stream(())


def concat_tokens(*streams: Stream) -> Stream:
    """Concatenate TOKEN arrays into a new TOKEN array."""
    # Without an explicit dtype, NumPy would promote the dtypes pair by pair.
    return np.concatenate([NO_TOKENS, *streams], dtype=TOKEN)


class Truncation(NamedTuple):
    """Top-k and top-p sampling: keep the `top_k` most likely tokens, then the smallest subset of them that holds at
    least a fraction `top_p` of their total probability.

    The kept probabilities are renormalized. top_k 0 keeps all tokens. Training never uses samples drawn with top-k or
    top-p truncation, because training computes logprobs under the full distribution.
    """

    top_k: int = 0
    top_p: float = 1.0


NO_TRUNCATION = Truncation()


class StopTest(Protocol):
    """A predicate that tells which turns end at their last sampled token, e.g. `data.tokenizer.StopStrings`."""

    @property
    def max_tokens(self) -> int:
        """The number of trailing token ids of a turn that the test examines, at least 1."""

    def __call__(self, turns: Sequence[list[int]]) -> Sequence[bool]:
        """Return, for each turn, whether the turn ends with its most recently sampled token.

        Each turn is represented by the ids of its last `max_tokens` tokens. The engine calls the test once per decode
        step, with all turns that use the test. A turn's result must depend only on the ids of that turn.
        """


@dataclass(frozen=True, eq=False)
class Request:
    """A request to sample one turn of a branch.

    sampled: tokens after the prompt so far, from earlier turns and generation phases.
    parks_after_turn: whether the request stays in the KV cache after its turn, until the request is released or is
    submitted for another turn with more tokens in `sampled`.
    max_new_tokens: maximum number of tokens after the prompt in all turns, including appended tokens.
    stop_test: an additional test that ends the turn; with None, only stop_ids end the turn.
    turn_start: number of tokens between the prompt and the current turn, including appended tokens. All tokens sampled
    after this position belong to the turn, including tokens from an earlier generation phase.
    """

    prompt_ids: tuple[int, ...]
    rollout_id: RolloutId
    rng_key: int  # RNG key for sampling; see `sampling.request_key`
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
    the turn's message could not be parsed completely; None if parsing succeeded or was not requested. extra: data from
    the rollout function, which a fork of the script can read from `rollout.episode.turns`.
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
        """The end position of the turn, counted in tokens after the branch's prompt."""
        return self.start + self.num_tokens

    def json_fields(self) -> dict[str, Any]:
        """Return the turn's fields except `inserted`, keyed by name."""
        return {name: value for name, value in vars(self).items() if name != "inserted"}


@dataclass(frozen=True)
class EpisodeRecord:
    """The record of a finished episode, without the tokens. A rollout without an episode has an empty record.

    turns: the turns, branch by branch. rewards: the rewards, keyed by name. A reward is the sum of the values that the
    rollout function passed to `Episode.reward` and the value that it returned; None if the reward does not apply.
    environment: `Episode.environment`, for reward functions that take `environments`.
    prompt: the last branch's prompt as text, messages or token ids. tools: JSON schemas of the tools in the prompt;
    None if the prompt has the run's tools. row: the episode's `data.task.Row`.
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
        """Mask [L] of the tokens that the policy sampled."""
        return self.stream["is_sampled"]

    @property
    def tokens_after_prompt(self) -> Stream:
        """The tokens after the prompt."""
        return self.stream[self.num_prompt_tokens :]

    @property
    def completion(self) -> list[int]:
        """The token ids after the prompt, including the stop token."""
        return self.tokens_after_prompt["id"].tolist()

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def is_truncated(self) -> bool:
        """Whether a limit truncated the sequence."""
        return self.finish_reason in TRUNCATED_REASONS


@dataclass(frozen=True, eq=False)
class Rollout:
    """A finished rollout: the sampled branches of one `Episode`.

    branches: the branches in order of creation; usually only one. An episode has several branches if its rollout
    function rewrites the conversation or begins another. Each branch is a separate training sample. All branches
    share the rollout's rewards and its weight in the loss.
    finish_reason: "stop" (a stop token or stop string), "length", "turn_length" (the last turn reached its own
    `max_tokens`), another of the `TRUNCATED_REASONS`, or one of `episodes.episode.END_REASONS` if the rollout function
    called `Episode.end`.
    """

    branches: tuple[SampledSequence, ...]
    finish_reason: str
    episode: EpisodeRecord = field(default_factory=EpisodeRecord)

    @property
    def rollout_id(self) -> RolloutId:
        """The id of the first branch."""
        return self.branches[0].rollout_id._replace(branch=0)

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled in all branches."""
        return sum(branch.num_sampled_tokens for branch in self.branches)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit truncated the rollout."""
        return self.finish_reason in TRUNCATED_REASONS

    @property
    def completion(self) -> list[int]:
        """The token ids after the prompt of each branch, concatenated, including stop tokens."""
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
