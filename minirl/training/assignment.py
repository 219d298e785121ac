"""Who trains on what in one step: pure functions of lengths that every rank holds.

`plan_updates` plans a step: rollouts are cut into minibatches (optimizer steps) in their order, and each of those into
microbatches (forward-backward passes) that balance the tokens the model computes over the ranks. A prompt is computed
once for all its rollouts in a microbatch, so groups are kept together as far as the balance allows.
"""

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minirl.errors import InputError


class PromptPrefix(NamedTuple):
    """A prompt of the run by its ordinal, and its number of tokens: what its rollouts have in common."""

    ordinal: int
    num_tokens: int


@dataclass(frozen=True)
class UpdatePlan:
    """Who trains on what in one step; the same on every rank. Numbers are rows of the table.

    minibatches[i]: the rollouts of one optimizer step, contiguous rows. microbatches[i][rank][j]: one forward-backward.
    """

    minibatches: list[list[int]]
    microbatches: list[list[list[list[int]]]]

    @property
    def rank_of(self) -> list[int]:
        """The rank that trains on each rollout."""
        owner = {
            row: r
            for ranks in self.microbatches
            for r, micros in enumerate(ranks)
            for m in micros
            for row in m
        }
        return [owner[row] for row in range(len(owner))]

    def of_rank(self, rank: int) -> list[list[list[int]]]:
        """This rank's [minibatch][microbatch], as places in the batch that `exchange` gives it."""
        rows = sorted(row for ranks in self.microbatches for micro in ranks[rank] for row in micro)
        place = {row: i for i, row in enumerate(rows)}
        return [[[place[row] for row in micro] for micro in ranks[rank]] for ranks in self.microbatches]


def plan_updates(
    lengths: Sequence[int],
    prefixes: Sequence[PromptPrefix] = (),
    *,
    num_minibatches: int,
    num_ranks: int,
    max_tokens: int,
) -> UpdatePlan:
    """Cut the rollouts into minibatches in their order, and each into balanced microbatches. Pure."""
    cuts = [len(lengths) * i // num_minibatches for i in range(num_minibatches + 1)]
    minibatches = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
    how = dict(num_ranks=num_ranks, max_tokens=max_tokens)
    microbatches = []
    for rows in minibatches:
        bins = plan_microbatches(
            [lengths[row] for row in rows], prefixes and [prefixes[row] for row in rows], **how
        )
        microbatches.append([[[rows[i] for i in micro] for micro in per_rank] for per_rank in bins])
    return UpdatePlan(minibatches, microbatches)


def shuffled_minibatches(
    minibatches: Sequence[list[list[int]]], num_epochs: int, *, seed: str
) -> Iterator[list[list[int]]]:
    """The minibatches of each epoch in an order that is a function of the seed and the epoch, the same on all ranks."""
    for epoch in range(num_epochs):
        order = random.Random(f"{seed} {epoch}")
        yield from order.sample(list(minibatches), len(minibatches))


def plan_microbatches(
    lengths: Sequence[int], prefixes: Sequence[PromptPrefix] = (), *, num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Microbatches of sequence numbers, [rank][microbatch][...]: at most `max_tokens` each, tokens balanced over ranks.

    What counts are the tokens that the model computes: a prompt once in each microbatch (without `prefixes` nothing is
    in common). Counts are equal on all ranks, so a microbatch may be empty. Pure. Raises InputError for a sequence over
    `max_tokens`.
    """
    if max(lengths, default=0) > max_tokens:
        raise InputError(
            f"a rollout has {max(lengths)} tokens; raise --max-tokens-per-microbatch {max_tokens}"
        )
    prefixes = prefixes or [PromptPrefix(i, 0) for i in range(len(lengths))]
    members = _balance(_Pieces(range(len(lengths)), lengths, prefixes), num_ranks)
    plan = [_first_fit(_Pieces(own, lengths, prefixes), max_tokens) for own in members]
    most = max(1, *map(len, plan))
    return [[sorted(micro) for micro in micros] + [[]] * (most - len(micros)) for micros in plan]


class _Bin:
    """Sequences that are computed together."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.prefixes: set[PromptPrefix] = set()
        self.load = 0

    def load_with(self, piece: "_Piece") -> int:
        return self.load + piece.size - piece.prefix.num_tokens * (piece.prefix in self.prefixes)

    def add(self, piece: "_Piece") -> None:
        self.load = self.load_with(piece)
        self.members += piece.members
        self.prefixes.add(piece.prefix)


class _Piece(NamedTuple):
    """Sequences of one prompt, which order by `key`: most computed tokens first."""

    key: tuple[int, int]
    members: list[int]
    prefix: PromptPrefix

    @property
    def size(self) -> int:
        """Tokens that the model computes for it alone."""
        return -self.key[0]


class _Pieces:
    """A heap of whole groups at first, longest first; what `halve` cuts comes back as two."""

    def __init__(self, members: Sequence[int], lengths: Sequence[int], prefixes: Sequence[PromptPrefix]):
        self._lengths, self._prompts = lengths, prefixes
        groups: dict[PromptPrefix, list[int]] = {}
        for i in sorted(members, key=lambda i: (-lengths[i], i)):
            groups.setdefault(prefixes[i], []).append(i)
        self._heap = [self._piece(group) for group in groups.values()]
        heapq.heapify(self._heap)

    def _piece(self, members: list[int]) -> _Piece:
        prefix = self._prompts[members[0]]
        size = prefix.num_tokens + sum(self._lengths[i] - prefix.num_tokens for i in members)
        return _Piece((-size, members[0]), members, prefix)

    def __iter__(self) -> Iterator[_Piece]:
        while self._heap:
            yield heapq.heappop(self._heap)

    def halve(self, piece: _Piece) -> None:
        for half in (piece.members[::2], piece.members[1::2]):
            heapq.heappush(self._heap, self._piece(half))

    def total(self) -> int:
        return sum(piece.size for piece in self._heap)


def _balance(pieces: _Pieces, num_bins: int) -> list[list[int]]:
    """Pieces into bins of about equally many computed tokens, each to where it leaves the fewest.

    A piece that would overfill its bin is halved: most prefixes are computed once, and the balance is that of sequences.
    """
    limit, bins = pieces.total() / num_bins, [_Bin() for _ in range(num_bins)]
    for piece in pieces:
        best = min(bins, key=lambda b: b.load_with(piece))
        if len(piece.members) > 1 and best.load_with(piece) > limit:
            pieces.halve(piece)
        else:
            best.add(piece)
    return [b.members for b in bins]


def _first_fit(pieces: _Pieces, limit: int) -> list[list[int]]:
    """Pieces into as few bins as come of the first with room, one that has the prompt before others."""
    bins: list[_Bin] = []
    for piece in pieces:
        if piece.size > limit:
            pieces.halve(piece)
            continue
        fitting = [b for b in bins if b.load_with(piece) <= limit]
        if not fitting:
            bins.append(_Bin())
            fitting = bins[-1:]
        known = [b for b in fitting if piece.prefix in b.prefixes]
        (known or fitting)[0].add(piece)
    return [b.members for b in bins]
