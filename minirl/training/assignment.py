"""Assign the sequences of a step to microbatches and ranks.

`plan_updates` cuts each minibatch (optimizer step) into microbatches (forward-backward passes) such that all ranks
compute about equally many tokens. A prompt is computed once for all its sequences in a microbatch, so the sequences of
one prompt stay together as far as the balance allows.

Everything in this file is a pure function of lengths that every rank holds. Nothing communicates.
"""

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minirl.errors import refuse


class PromptPrefix(NamedTuple):
    """The prompt that rollouts share: its ordinal in the run and its number of tokens.

    branch: empty for the row's prompt; the numbers of sample and branch for a prompt that only this branch has.
    """

    ordinal: int
    num_tokens: int
    branch: tuple[int, ...] = ()


@dataclass(frozen=True)
class UpdatePlan:
    """Which rank trains on which of a step's sequences; the same on every rank.

    microbatches[i][rank][j] lists the sequences of one forward-backward pass of minibatch i, by their rows in the
    step's `RolloutTable`. Within a minibatch all ranks have equally many microbatches; some may be empty.

    Example: 6 sequences with 60, 40, 90, 50, 90 and 40 tokens; minibatches [[0, 1, 2], [3, 4, 5]], 2 ranks, at most 95
    tokens.

        microbatches = [
            [[[2], []], [[0], [1]]],  # minibatch 0: rank 0 computes [2], then nothing; rank 1 [0], then [1]
            [[[4]], [[3, 5]]],  # minibatch 1: one microbatch on each rank
        ]
        rank_of = [1, 1, 0, 1, 0, 1]
    """

    microbatches: list[list[list[list[int]]]]
    # The rank that trains on each sequence, by row; None: no rank does.
    rank_of: list[int | None]

    def of_rank(self, rank: int) -> list[list[list[int]]]:
        """Return the rank's sequences, as indices [minibatch][microbatch][...] into its own batch.

        `exchange` makes this batch: it holds the rank's sequences in table order. In the example above, the
        batch of rank 1 holds the rows [0, 1, 3, 5], and of_rank(1) is [[[0], [1]], [[2, 3]]].
        """
        rows = [row for row, owner in enumerate(self.rank_of) if owner == rank]
        index_of = {row: i for i, row in enumerate(rows)}
        return [
            [[index_of[row] for row in micro] for micro in by_rank[rank]] for by_rank in self.microbatches
        ]


def plan_updates(
    minibatches: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prefixes: Sequence[PromptPrefix],
    *,
    num_ranks: int,
    max_tokens: int,
) -> UpdatePlan:
    """Cut each minibatch, the rows of its sequences in the table, into balanced microbatches.

    Sequences in no minibatch are not trained on. The other arguments are those of `plan_microbatches`.
    """
    microbatches = []
    rank_of: list[int | None] = [None] * len(lengths)
    for rows in minibatches:
        by_rank = plan_microbatches(rows, lengths, prefixes, num_ranks=num_ranks, max_tokens=max_tokens)
        for rank, own in enumerate(by_rank):
            for row in itertools.chain(*own):
                rank_of[row] = rank
        microbatches.append(by_rank)
    return UpdatePlan(microbatches, rank_of)


def shuffled_minibatches(
    minibatches: Sequence[list[list[int]]], num_epochs: int, *, seed: str
) -> Iterator[list[list[int]]]:
    """Iterate over the minibatches `num_epochs` times, each time in another order.

    The orders depend only on seed and epoch, so they are the same on all ranks.
    """
    for epoch in range(num_epochs):
        generator = random.Random(f"{seed} {epoch}")
        yield from generator.sample(list(minibatches), len(minibatches))


def plan_microbatches(
    rows: Sequence[int],
    lengths: Sequence[int],
    prefixes: Sequence[PromptPrefix] = (),
    *,
    num_ranks: int,
    max_tokens: int,
) -> list[list[list[int]]]:
    """Cut the sequences in these rows of `lengths` and `prefixes` into microbatches; returns [rank][microbatch][row].

    A microbatch computes at most `max_tokens` tokens, and the ranks compute about equally many. A prompt is
    computed, and counted, once in each microbatch that contains it (without `prefixes`, no two sequences
    share a prompt). All ranks get equally many microbatches, so a microbatch may be empty. Without sequences the
    result has no microbatches.

    Pieces are placed, largest first: sequences with one prompt, at first all of them. A piece goes to the rank with
    the smallest load after it, into the first microbatch with room for it, or rather one that already has its prompt.
    If the rank would then compute more than an equal share of all tokens, or no microbatch could hold the piece, it
    is halved instead, down to single sequences. So most prompts are computed on one rank only, and the loads are as
    equal as if single sequences were placed.

    Raises InputError if a sequence is longer than `max_tokens`.
    """
    longest = max((lengths[row] for row in rows), default=0)
    refuse(
        longest > max_tokens,
        f"a rollout has {longest} tokens; raise --max-tokens-per-microbatch {max_tokens}",
    )
    if not prefixes:
        prefixes = [PromptPrefix(i, 0) for i in range(len(lengths))]

    def piece_of(members: list[int]) -> _Piece:
        prefix = prefixes[members[0]]
        completions = sum(lengths[row] - prefix.num_tokens for row in members)
        return _Piece(-prefix.num_tokens - completions, members, prefix)

    groups: dict[PromptPrefix, list[int]] = {}
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        groups.setdefault(prefixes[row], []).append(row)
    pieces = list(map(piece_of, groups.values()))
    equal_share = -sum(piece.minus_size for piece in pieces) / num_ranks
    heapq.heapify(pieces)
    ranks = [_Bin() for _ in range(num_ranks)]
    microbatches: list[list[_Bin]] = [[] for _ in ranks]
    while pieces:
        piece = heapq.heappop(pieces)
        rank = min(range(num_ranks), key=lambda rank: ranks[rank].load_with(piece))
        is_too_large = ranks[rank].load_with(piece) > equal_share or -piece.minus_size > max_tokens
        if is_too_large and len(piece.members) > 1:
            # Sorted by length, every second member makes about half of the tokens.
            heapq.heappush(pieces, piece_of(piece.members[::2]))
            heapq.heappush(pieces, piece_of(piece.members[1::2]))
            continue
        fitting = [micro for micro in microbatches[rank] if micro.load_with(piece) <= max_tokens]
        if not fitting:
            fitting = [_Bin()]
            microbatches[rank] += fitting
        ranks[rank].add(piece)
        min(fitting, key=lambda micro: piece.prefix not in micro.prefixes).add(piece)
    num_microbatches = max(map(len, microbatches))
    return [
        [sorted(micro.members) for micro in own] + [[]] * (num_microbatches - len(own))
        for own in microbatches
    ]


class _Piece(NamedTuple):
    """Sequences with one prompt that are placed together. The largest sorts first, then that of the first sequence."""

    # Less than 0: the tokens that the model computes for these sequences, the prompt once and every completion.
    minus_size: int
    members: list[int]  # longest first
    prefix: PromptPrefix


class _Bin:
    """The sequences that a rank, or one of its microbatches, computes. A prompt that they share counts once."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.prefixes: set[PromptPrefix] = set()
        self.load = 0  # tokens

    def load_with(self, piece: _Piece) -> int:
        """The load after adding the piece, whose prompt is free if the bin already has it."""
        shared = piece.prefix.num_tokens if piece.prefix in self.prefixes else 0
        return self.load - piece.minus_size - shared

    def add(self, piece: _Piece) -> None:
        """Compute the piece here."""
        self.load = self.load_with(piece)
        self.members += piece.members
        self.prefixes.add(piece.prefix)
