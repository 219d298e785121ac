"""The gated delta rule of packed sequences by the kernels of flash-linear-attention (the extra `fla`), in 16 bits.

The rows that the model computes are cut where a sequence begins, and where the tokens end that it shares with another
one. Each of these segments begins with the state at the end of an earlier one, so that every row is computed once.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model.delta_rule import DeltaRows, DeltaStates


class Round(NamedTuple):
    """Segments that are computed together, because the round before computed their predecessors.

    rows int64 [n]: the indices of the segments' rows among the model's, end to end.
    cu_seqlens int64 [segments + 1]: where each begins among these, and where the last one ends.
    previous int64 [segments]: the predecessor of each, in the round before. In the first round 0, for a state of
    zeros.
    """

    rows: Tensor
    cu_seqlens: Tensor
    previous: Tensor


@dataclass(frozen=True)
class SegmentIndex:
    """The segments of packed sequences. places int64 [T']: where each row of the model is in all rounds, end to end."""

    rounds: tuple[Round, ...]
    places: Tensor


def index_segments(
    lengths: Sequence[int],
    num_shared: Sequence[int],
    hidden_index: Tensor,
    upload: Callable[[Tensor], Tensor],
) -> SegmentIndex:
    """The segments of packed sequences, of which at least one has rows; `PackedLayout` explains the arguments.

    upload: copies a tensor from the host to the device of the rows.
    """
    num_rows = 0
    follows = {}  # of each sequence's first row: where the segment ends that it follows; 0: it follows none
    for sequence, shared in zip(hidden_index.split(list(lengths)), num_shared, strict=True):
        follows[num_rows] = int(sequence[shared - 1]) + 1 if shared else 0
        num_rows += len(sequence) - shared
    rounds: dict[
        int, list[tuple[int, int, int]]
    ] = {}  # where each segment begins and ends, and its predecessor
    ended_by = {0: (-1, 0)}  # of each segment's end: its round, and its number there
    cuts = sorted({*follows, *follows.values(), num_rows})
    for begin, end in itertools.pairwise(cuts):
        round_before, previous = ended_by[follows.get(begin, begin)]
        segments = rounds.setdefault(round_before + 1, [])
        ended_by[end] = (round_before + 1, len(segments))
        segments.append((begin, end, previous))
    indexed = []
    for segments in rounds.values():
        rows = torch.cat([torch.arange(begin, end) for begin, end, _ in segments])
        begins, ends, previous_ones = map(torch.tensor, zip(*segments, strict=True))
        cu_seqlens = F.pad((ends - begins).cumsum(0), (1, 0))
        indexed.append(Round(rows, cu_seqlens, previous_ones))
    order = torch.cat([part.rows for part in indexed])
    return SegmentIndex(tuple(Round(*map(upload, part)) for part in indexed), upload(order.argsort()))


def run_segments(
    rows: DeltaRows,
    index: SegmentIndex,
    dtype: torch.dtype,
    states: DeltaStates | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """The outputs [T', H, Dv] of packed sequences, in the dtype of `rows`: `delta_rule.run_chunks` in other roundings.

    dtype: what queries, keys and values are rounded to.
    states, slots int64 [sequences]: where the state after each sequence goes, in front of a chunk without rows.
    Then no tokens are shared.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    outputs: list[Tensor] = []
    ended = rows.v.new_zeros(1, *rows.k.shape[1:], rows.v.shape[-1])
    for part in index.rounds:
        q, k, v, decay, beta = (x[part.rows][None] for x in rows)
        out, ended = chunk_gated_delta_rule(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            decay,
            beta,
            scale=1.0,
            initial_state=ended[part.previous],
            output_final_state=True,
            cu_seqlens=part.cu_seqlens,
        )
        outputs.append(out[0])
    if states is not None:
        states.state[slots] = ended
        # Rows of zeros change no state: the rows to come continue a chunk that began with them.
        for pool in (states.keys, states.updates, states.decays):
            pool[slots] = 0
    return torch.cat(outputs)[index.places].to(rows.v.dtype)
