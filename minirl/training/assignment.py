"""Assign the sequences of a step to microbatches and ranks.

`plan_updates` cuts each minibatch (optimizer step) into microbatches (forward-backward passes) so that all ranks
compute about equally many tokens. A prompt is computed once for all its sequences in a microbatch, so the sequences of
one prompt stay together as far as the balance allows.

Everything in this file is a pure function of lengths that every rank holds. Nothing communicates.
"""

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minirl.errors import refuse
from minirl.rollouts import RolloutId
from minirl.training.batch import SequenceInfo

# The sequences of one forward-backward pass, by their numbers in the step or indices into a rank's batch.
Microbatch = list[int]
NO_RANK = -1  # in `UpdatePlan.rank_of`: no rank trains on the sequence


@dataclass(frozen=True)
class UpdatePlan:
    """Which rank trains on which of a step's sequences; the same on every rank.

    microbatches[i][rank] are the forward-backward passes of a rank for minibatch i, by the sequences' numbers in the
    step. Within a minibatch all ranks have equally many microbatches; some may be empty.

    Example: 6 sequences with 60, 40, 90, 50, 90 and 40 tokens; minibatches [[0, 1, 2], [3, 4, 5]], 2 ranks, at most 95
    tokens.

        microbatches = [
            [[[2], []], [[0], [1]]],  # minibatch 0: rank 0 computes [2], then nothing; rank 1 [0], then [1]
            [[[4]], [[3, 5]]],  # minibatch 1: one microbatch on each rank
        ]
        rank_of = [1, 1, 0, 1, 0, 1]
    """

    microbatches: list[list[list[Microbatch]]]
    # int64 [S]: the rank that trains on each sequence of the step, or NO_RANK.
    rank_of: NDArray[np.int64]

    def of_rank(self, rank: int) -> list[list[Microbatch]]:
        """Return the rank's microbatches [minibatch][microbatch], as indices into its own batch.

        `exchange` makes this batch: it holds the rank's sequences in the step's order. In the example above, the
        batch of rank 1 holds the sequences [0, 1, 3, 5], and of_rank(1) is [[[0], [1]], [[2, 3]]].
        """
        own = (self.rank_of == rank).nonzero()[0]
        return [
            [own.searchsorted(micro).tolist() for micro in by_rank[rank]] for by_rank in self.microbatches
        ]


def plan_updates(
    minibatches: Sequence[Sequence[int]],
    sequences: Sequence[SequenceInfo],
    *,
    num_ranks: int,
    max_tokens: int,
) -> UpdatePlan:
    """Cut each minibatch, the numbers of its sequences in the step, into balanced microbatches.

    Sequences in no minibatch are not trained on. The other arguments are those of `plan_microbatches`.
    """
    microbatches = []
    rank_of = np.full(len(sequences), NO_RANK)
    for numbers in minibatches:
        by_rank = plan_microbatches(numbers, sequences, num_ranks=num_ranks, max_tokens=max_tokens)
        for rank, own in enumerate(by_rank):
            rank_of[list(itertools.chain(*own))] = rank
        microbatches.append(by_rank)
    return UpdatePlan(microbatches, rank_of)


def shuffled_minibatches(
    minibatches: Sequence[list[Microbatch]], num_epochs: int, *, seed: str
) -> Iterator[list[Microbatch]]:
    """Iterate over the minibatches `num_epochs` times, each time in another order.

    The orders depend only on seed and epoch, so they are the same on all ranks.
    """
    for epoch in range(num_epochs):
        generator = random.Random(f"{seed} {epoch}")
        yield from generator.sample(list(minibatches), len(minibatches))


def plan_microbatches(
    numbers: Sequence[int],
    sequences: Sequence[SequenceInfo],
    *,
    num_ranks: int,
    max_tokens: int,
) -> list[list[Microbatch]]:
    """Cut the sequences with these numbers into microbatches; returns those of each rank.

    A microbatch computes at most `max_tokens` tokens, and the ranks compute about equally many. A prompt is
    computed, and counted, once in each microbatch that contains it. All ranks get equally many microbatches, so a
    microbatch may be empty. Without sequences the result has no microbatches.

    Pieces are placed, largest first: sequences with one prompt, at first all of them. A piece goes to the rank with
    the smallest load after it, into the first microbatch with room for it, or rather one that already has its prompt.
    If the rank would then compute more than an equal share of all tokens, or no microbatch could hold the piece, it
    is halved instead, down to single sequences. So most prompts are computed on one rank only, and the loads are as
    equal as if single sequences were placed.

    Raises InputError if a sequence is longer than `max_tokens`.
    """

    def piece_of(members: list[int]) -> _Piece:
        num_shared = sequences[members[0]].num_prompt_tokens
        num_own = sum(sequences[number].num_tokens - num_shared for number in members)
        return _Piece(-num_shared - num_own, members, sequences[members[0]].prompt, num_shared)

    by_prompt: dict[RolloutId, list[int]] = defaultdict(list)
    for number in sorted(numbers, key=lambda number: (-sequences[number].num_tokens, number)):
        by_prompt[sequences[number].prompt].append(number)
    pieces = list(map(piece_of, by_prompt.values()))
    equal_share = -sum(piece.minus_size for piece in pieces) / num_ranks
    heapq.heapify(pieces)
    ranks = [_Rank() for _ in range(num_ranks)]
    while pieces:
        piece = heapq.heappop(pieces)
        rank = min(ranks, key=lambda rank: rank.load_with(piece))
        is_too_large = rank.load_with(piece) > equal_share or -piece.minus_size > max_tokens
        if is_too_large and len(piece.members) > 1:
            # Sorted by length, every second member makes about half of the tokens.
            heapq.heappush(pieces, piece_of(piece.members[::2]))
            heapq.heappush(pieces, piece_of(piece.members[1::2]))
            continue
        refuse(
            -piece.minus_size > max_tokens,
            f"a rollout has {-piece.minus_size} tokens; raise --max-tokens-per-microbatch {max_tokens}",
        )
        fitting = [micro for micro in rank.microbatches if micro.load_with(piece) <= max_tokens]
        if not fitting:
            fitting = [_Load()]
            rank.microbatches += fitting
        rank.add(piece)
        min(fitting, key=lambda micro: piece.prompt not in micro.prompts).add(piece)
    num_microbatches = max(len(rank.microbatches) for rank in ranks)
    for rank in ranks:
        rank.microbatches += [_Load()] * (num_microbatches - len(rank.microbatches))
    return [[sorted(micro.members) for micro in rank.microbatches] for rank in ranks]


class _Piece(NamedTuple):
    """Sequences with one prompt that are placed together. The largest sorts first, then that of the first sequence."""

    # Negated number of tokens to compute for these sequences: the prompt once and every completion.
    minus_size: int
    members: list[int]  # longest first
    prompt: RolloutId
    num_prompt_tokens: int


@dataclass
class _Load:
    """The sequences that a rank, or one of its microbatches, computes. A prompt that they share counts once."""

    members: list[int] = field(default_factory=list)
    prompts: set[RolloutId] = field(default_factory=set)
    num_tokens: int = 0

    def load_with(self, piece: _Piece) -> int:
        """The number of tokens after adding the piece, whose prompt is free if it is already here."""
        shared = piece.num_prompt_tokens if piece.prompt in self.prompts else 0
        return self.num_tokens - piece.minus_size - shared

    def add(self, piece: _Piece) -> None:
        """Compute the piece here."""
        self.num_tokens = self.load_with(piece)
        self.members += piece.members
        self.prompts.add(piece.prompt)


@dataclass
class _Rank(_Load):
    """The load of a rank, and how it is cut into microbatches."""

    microbatches: list[_Load] = field(default_factory=list)
