"""Which tokens the rule and the convolution of a layer compute together, made once for all layers of a forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minirl.model.attention import DecodeLayout, PackedLayout, concatenated_ranges, upload

# Rows of a chunk; twice as many take a fifth longer on the CPU, in decoding and in training.
DELTA_CHUNK = 32


@dataclass(frozen=True)
class ChunkIndex:
    """The N chunks of packed sequences in rounds: the first chunk of each, then the second, and so on.

    Sequences come longest first, so the chunks of a round follow as many first chunks of the round before it.
    rows int64 [N x DELTA_CHUNK]: the chunks' rows as indices among the T' rows of the model; T' for padding.
    counts: how many chunks each round has.
    places int64 [T']: where each row is among `rows`; the first place if it has several.
    ends int64 [sequences]: the chunks of the sequences' last rows.
    """

    rows: Tensor
    counts: tuple[int, ...]
    places: Tensor
    ends: Tensor


def index_chunks(layout: PackedLayout) -> ChunkIndex:
    """Cut packed sequences into chunks.

    The rows of tokens that several sequences begin with are computed once in each. For example, the first sequence has
    rows 0 to 69, and the second the first 35 of these and then 70 to 74:

        round 0   chunk 0: 0 to 31                  chunk 1: 0 to 31
        round 1   chunk 2: 32 to 63                 chunk 3: 32 to 34, 70 to 74, padding
        round 2   chunk 4: 64 to 69, padding
    """
    num_rows = sum(layout.num_own)
    longest_first = sorted(layout.hidden_rows, key=len, reverse=True) or [np.arange(0)]
    num_rounds = max(1, -(-len(longest_first[0]) // DELTA_CHUNK))  # rounded up
    padded = np.full((len(longest_first), num_rounds * DELTA_CHUNK), num_rows)
    for padded_rows, rows in zip(padded, longest_first, strict=True):
        padded_rows[: len(rows)] = rows
    first_rows = padded[:, ::DELTA_CHUNK].T  # [rounds, sequences]
    has_rows = first_rows < num_rows
    has_rows[0, 0] = True  # without any tokens one chunk of padding, so that every parameter has a gradient
    chunks = padded.reshape(-1, num_rounds, DELTA_CHUNK).swapaxes(0, 1)[has_rows]
    # The model's rows have the lowest numbers, so their first places come before that of the padding.
    _, places = np.unique(chunks, return_index=True)
    last_rows = np.array([rows[-1] for rows in layout.hidden_rows if len(rows)], np.int64)
    ends = places[last_rows] // DELTA_CHUNK
    uploaded = (
        upload(torch.from_numpy(x), layout.device) for x in (chunks.flatten(), places[:num_rows], ends)
    )
    return ChunkIndex(next(uploaded), tuple(has_rows.sum(1).tolist()), *uploaded)


def index_windows(layout: PackedLayout, size: int) -> Tensor:
    """The rows of the last `size` tokens up to each computed one, int64 [size, T'].

    The oldest come first. T' stands for a token before the sequence begins.
    """
    ages = torch.arange(size - 1, -1, -1, device=layout.device)[:, None]
    rows = layout.hidden_index[(layout.computed_tokens - ages).clamp(min=0)]
    return torch.where(layout.positions >= ages, rows, len(layout.positions))


def split_rounds(layout: DecodeLayout) -> list[Tensor | slice]:
    """Split the tokens of a decode step into rounds, which have at most one token of each sequence, in their order."""
    if layout.repeats is None:
        return [slice(None)]
    number = concatenated_ranges([0] * len(layout.repeats), list(layout.repeats))
    device = layout.positions.device
    return [upload((number == i).nonzero()[:, 0], device) for i in range(max(layout.repeats))]
