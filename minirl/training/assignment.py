"""Assign the sequences of a step to microbatches and ranks.

`plan_updates` cuts each minibatch (optimizer step) into microbatches (forward-backward passes) such that all ranks
compute about equally many tokens. A prompt is computed once for all its sequences in a microbatch, so the sequences of
one prompt stay together as far as the balance allows.

Everything in this file is a pure function of lengths that every rank holds. Nothing communicates.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minirl.errors import InputError


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
        translated = []
        for by_rank in self.microbatches:
            translated.append([[index_of[row] for row in micro] for micro in by_rank[rank]])
        return translated


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
    for minibatch in minibatches:
        by_rank = plan_microbatches(
            [lengths[i] for i in minibatch],
            [prefixes[i] for i in minibatch],
            num_ranks=num_ranks,
            max_tokens=max_tokens,
        )
        # plan_microbatches counts the sequences of this minibatch from 0: translate back to rows.
        translated = []
        for rank, own in enumerate(by_rank):
            translated.append([[minibatch[i] for i in micro] for micro in own])
            for row in itertools.chain(*translated[rank]):
                rank_of[row] = rank
        microbatches.append(translated)
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
    lengths: Sequence[int], prefixes: Sequence[PromptPrefix] = (), *, num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Cut sequences of these lengths into microbatches; returns sequence indices [rank][microbatch][...].

    A microbatch computes at most `max_tokens` tokens, and the ranks compute about equally many. A prompt is
    computed, and counted, once in each microbatch that contains it (without `prefixes`, no two sequences
    share a prompt). All ranks get equally many microbatches, so a microbatch may be empty. Without sequences the
    result has no microbatches.

    Raises InputError if a sequence is longer than `max_tokens`.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise InputError(f"a rollout has {longest} tokens; raise --max-tokens-per-microbatch {max_tokens}")
    if not prefixes:
        prefixes = [PromptPrefix(i, 0) for i in range(len(lengths))]
    by_rank = []
    for members in _balance(lengths, prefixes, num_ranks):
        by_rank.append(list(map(sorted, _first_fit(members, lengths, prefixes, max_tokens))))
    num_microbatches = max(map(len, by_rank))
    for microbatches in by_rank:
        microbatches += [[]] * (num_microbatches - len(microbatches))
    return by_rank


# Sequences are placed in two stages, both by pieces and bins. A piece is several sequences with one prompt:
# at first all of them. A bin computes each of its prompts once: it is a rank's share (`_balance`), then a
# microbatch (`_first_fit`). Pieces are placed largest first; one that is too large for a bin is halved.


class _Piece(NamedTuple):
    """Sequences with one prompt that are placed together. The largest sorts first, then that of the first sequence."""

    # Less than 0: the tokens that the model computes for these sequences, the prompt once and every completion.
    minus_size: int
    members: list[int]  # longest first
    prefix: PromptPrefix


class _Bin:
    """Sequences that are computed together, and how many tokens the model computes for them."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.prefixes: set[PromptPrefix] = set()
        self.load = 0

    def load_with(self, piece: _Piece) -> int:
        """The load after adding the piece, whose prompt is free if the bin already has it."""
        shared = piece.prefix.num_tokens if piece.prefix in self.prefixes else 0
        return self.load - piece.minus_size - shared


def _place(
    members: Sequence[int],
    lengths: Sequence[int],
    prefixes: Sequence[PromptPrefix],
    choose_bin: Callable[[_Piece], _Bin | None],
) -> None:
    """Add pieces of these sequences to the bins chosen for them, largest first; None: halve the piece."""

    def piece_of(group: list[int]) -> _Piece:
        prefix = prefixes[group[0]]
        completions = sum(lengths[i] - prefix.num_tokens for i in group)
        return _Piece(-prefix.num_tokens - completions, group, prefix)

    groups: dict[PromptPrefix, list[int]] = {}
    for i in sorted(members, key=lambda i: (-lengths[i], i)):
        groups.setdefault(prefixes[i], []).append(i)
    pieces = list(map(piece_of, groups.values()))
    heapq.heapify(pieces)
    while pieces:
        piece = heapq.heappop(pieces)
        chosen = choose_bin(piece)
        if chosen is None:
            # Sorted by length, every second member makes about half of the tokens.
            heapq.heappush(pieces, piece_of(piece.members[::2]))
            heapq.heappush(pieces, piece_of(piece.members[1::2]))
            continue
        chosen.load = chosen.load_with(piece)
        chosen.members += piece.members
        chosen.prefixes.add(piece.prefix)


def _balance(lengths: Sequence[int], prefixes: Sequence[PromptPrefix], num_bins: int) -> list[list[int]]:
    """Distribute the sequences over bins of about equal load; returns the members of each bin.

    Each piece, largest first, goes into the bin that has the smallest load with it. If that bin would then
    hold more than an equal share of all tokens, the piece is halved instead, down to single sequences. So
    most prompts are computed in one bin only, and the loads are as equal as if single sequences were placed.
    """
    bins = [_Bin() for _ in range(num_bins)]
    completions = sum(lengths) - sum(prefix.num_tokens for prefix in prefixes)
    limit = (sum(prefix.num_tokens for prefix in set(prefixes)) + completions) / num_bins

    def emptiest(piece: _Piece) -> _Bin | None:
        best = min(bins, key=lambda b: b.load_with(piece))
        return best if len(piece.members) == 1 or best.load_with(piece) <= limit else None

    _place(range(len(lengths)), lengths, prefixes, emptiest)
    return [b.members for b in bins]


def _first_fit(
    members: Sequence[int], lengths: Sequence[int], prefixes: Sequence[PromptPrefix], limit: int
) -> list[list[int]]:
    """First-fit bin packing, largest piece first; returns the members of each bin.

    Each piece goes into the first bin that it fits into, but a bin that already holds its prompt is
    preferred. A piece that is larger than a whole bin is halved.
    """
    bins: list[_Bin] = []

    def first_with_space(piece: _Piece) -> _Bin | None:
        if -piece.minus_size > limit:
            return None
        fitting = [b for b in bins if b.load_with(piece) <= limit]
        if not fitting:
            bins.append(_Bin())
            return bins[-1]
        return min(fitting, key=lambda b: piece.prefix not in b.prefixes)

    _place(members, lengths, prefixes, first_with_space)
    return [b.members for b in bins]
