"""Assign a step's sequences to ranks and microbatches (forward-backward passes).

All ranks process about the same number of tokens. Within a microbatch, a prompt is processed once for all its
sequences, so a prompt's sequences stay together as far as load balance allows.

All functions here are pure and need no communication: every rank calls each function with the same arguments.
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minirl.errors import refuse
from minirl.rollouts import RolloutId
from minirl.training.batch import Microbatch, SequenceInfo


def shuffled_minibatches(
    minibatches: Sequence[list[Microbatch]], num_epochs: int, *, seed: str
) -> Iterator[list[Microbatch]]:
    """Yield the minibatches for `num_epochs` epochs, each in a different order.

    The orders depend only on seed and epoch, so they are the same on all ranks.
    """
    for epoch in range(num_epochs):
        generator = random.Random(f"{seed} {epoch}")
        yield from generator.sample(minibatches, len(minibatches))


def plan_microbatches(
    sequences: Iterable[SequenceInfo], *, num_ranks: int, max_tokens: int
) -> list[list[Microbatch]]:
    """Split a minibatch (optimizer step) into microbatches, and return each rank's list of them.

    A microbatch processes at most `max_tokens` tokens, and all ranks process about the same number of tokens. A prompt
    is processed, and its tokens are counted, once per microbatch that contains the prompt. All ranks get the same
    number of microbatches, so some may be empty. Without sequences there are no microbatches.

    A piece is a set of sequences that share a prompt, initially all sequences of the prompt. Pieces are placed one by
    one, largest first. A piece goes to the rank that would then have the smallest load, into a microbatch with room,
    preferably one that already contains the prompt. If the chosen rank would exceed an equal share of all tokens, or if
    the piece does not fit into any microbatch, the piece is split in half instead, down to single sequences. So most
    prompts are processed on only one rank, and the load is as balanced as if each sequence were assigned individually.

    Example: 3 sequences with 60, 40 and 90 tokens, 2 ranks, at most 95 tokens. Rank 0 processes the third sequence,
    then an empty microbatch; rank 1 processes the first sequence, then the second.

    Raises InputError if a sequence is longer than `max_tokens`.
    """
    by_prompt: dict[RolloutId, list[SequenceInfo]] = defaultdict(list)
    for sequence in sorted(sequences, key=lambda sequence: (-sequence.num_tokens, sequence)):
        by_prompt[sequence.prompt_id].append(sequence)
    prompt_pieces = list(map(_make_piece, by_prompt.values()))
    target_tokens_per_rank = (
        -sum(prompt_piece.negated_num_tokens for prompt_piece in prompt_pieces) / num_ranks
    )
    heapq.heapify(prompt_pieces)
    rank_loads = [_Rank() for _ in range(num_ranks)]
    while prompt_pieces:
        prompt_piece = heapq.heappop(prompt_pieces)
        rank = min(rank_loads, key=lambda rank: rank.num_tokens_with(prompt_piece))
        is_too_large = (
            rank.num_tokens_with(prompt_piece) > target_tokens_per_rank
            or -prompt_piece.negated_num_tokens > max_tokens
        )
        if is_too_large and len(prompt_piece.members) > 1:
            # The members are sorted by length, so each half gets about half of the tokens.
            heapq.heappush(prompt_pieces, _make_piece(prompt_piece.members[::2]))
            heapq.heappush(prompt_pieces, _make_piece(prompt_piece.members[1::2]))
            continue
        refuse(
            -prompt_piece.negated_num_tokens > max_tokens,
            f"--max-tokens-per-microbatch {max_tokens}: a rollout has {-prompt_piece.negated_num_tokens} "
            "tokens; raise the limit",
        )
        fitting_microbatches = [
            micro for micro in rank.microbatches if micro.num_tokens_with(prompt_piece) <= max_tokens
        ]
        if not fitting_microbatches:
            fitting_microbatches = [_RankLoad()]
            rank.microbatches += fitting_microbatches
        rank.add(prompt_piece)
        min(fitting_microbatches, key=lambda micro: prompt_piece.prompt_id not in micro.prompts).add(
            prompt_piece
        )
    microbatches_per_rank = [[sorted(micro.members) for micro in rank.microbatches] for rank in rank_loads]
    num_microbatches = max(map(len, microbatches_per_rank))
    return [micros + [[]] * (num_microbatches - len(micros)) for micros in microbatches_per_rank]


class _Piece(NamedTuple):
    """Sequences that share a prompt, placed together.

    Pieces are sorted by size, largest first, then by first sequence.
    """

    # Negated number of tokens to process for these sequences: the prompt once and every completion.
    negated_num_tokens: int
    members: list[SequenceInfo]  # longest first
    prompt_id: RolloutId
    num_prompt_tokens: int


def _make_piece(members: list[SequenceInfo]) -> _Piece:
    first_sequence = members[0]
    num_completion_tokens = sum(
        sequence.num_tokens - first_sequence.num_prompt_tokens for sequence in members
    )
    return _Piece(
        -first_sequence.num_prompt_tokens - num_completion_tokens,
        members,
        first_sequence.prompt_id,
        first_sequence.num_prompt_tokens,
    )


@dataclass
class _RankLoad:
    """The sequences assigned to a rank or to one of its microbatches. A shared prompt counts once."""

    members: list[SequenceInfo] = field(default_factory=list)
    prompts: set[RolloutId] = field(default_factory=set)
    num_tokens: int = 0

    def num_tokens_with(self, piece: _Piece) -> int:
        """Return the token count after adding this piece. A prompt that is already present adds no tokens."""
        num_shared_tokens = piece.num_prompt_tokens if piece.prompt_id in self.prompts else 0
        return self.num_tokens - piece.negated_num_tokens - num_shared_tokens

    def add(self, piece: _Piece) -> None:
        """Add the piece."""
        self.num_tokens = self.num_tokens_with(piece)
        self.members += piece.members
        self.prompts.add(piece.prompt_id)


@dataclass
class _Rank(_RankLoad):
    """A rank's load, split into microbatches."""

    microbatches: list[_RankLoad] = field(default_factory=list)
