"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): rows of chunks, which decoding computes bit for bit.

A head's state S [Dk, Dv] maps keys to values. With queries Q, keys K, values V, decays g <= 0 and strengths beta of a
chunk's rows, and c the running sum of g in it:

    A = beta (K K^T) e^(c_i - c_j), strictly lower    R = beta V - (beta e^c K) S    U = (1 + A)^-1 R
    O = (e^c Q) S + lower((Q K^T) e^(c_i - c_j)) U    S' = e^c_last S + (e^(c_last - c) K)^T U

`run_chunks` computes packed sequences, one chunk of all sequences at a time. `run_row` computes the next row of each
cached sequence from `DeltaStates`; where a chunk begins, `StateCache` computes S' of the one before it. On the CPU both
forms have the same bits: a row of U is one product of one row in both. The other products of `run_row` are padded to
`min_batch_rows`, and have inner lengths that do not depend on the number of rows. Everything is fp32 (fp64 in an fp64
model).

In shapes: T rows, H value heads, N chunks (or sequences), C rows of a chunk.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from minirl.extras.delta_net.states import DELTA_CHUNK, DeltaStates, StateCache, next_state
from minirl.model.attention import PackedLayout, Sequence, upload
from minirl.model.batch_invariance import activate, at_least_fp32, measured
from minirl.model.config import DeltaNet


class DeltaRows(NamedTuple):
    """T rows of the rule: q, k [T, H, Dk] of length 1 (q / sqrt(Dk)), v [T, H, Dv], decay and beta [T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


class ChunkIndex(NamedTuple):
    """The N chunks of packed sequences in rounds: the first chunk of each, then the second, and so on.

    Sequences come longest first, so the chunks of a round follow as many first chunks of the round before it.
    rows int64 [N x DELTA_CHUNK]: the chunks' rows as indices among the T' rows of the model; T' for padding.
    counts: how many chunks each round has.
    places int64 [T']: where each row is among `rows`; the first place if it has several.
    """

    rows: Tensor
    counts: tuple[int, ...]
    places: Tensor


def index_chunks(layout: PackedLayout) -> ChunkIndex:
    """Cut packed sequences into chunks.

    The rows of tokens that several sequences begin with are computed once in each. For example, the first sequence has
    rows 0 to 69, and the second the first 35 of these and then 70 to 74:

        round 0   chunk 0: 0 to 31                  chunk 1: 0 to 31
        round 1   chunk 2: 32 to 63                 chunk 3: 32 to 34, 70 to 74, padding
        round 2   chunk 4: 64 to 69, padding
    """
    num_rows = int(layout.num_computed.sum())
    sequences = [torch.from_numpy(rows) for rows in layout.hidden_rows if len(rows)]
    if not sequences:
        sequences = [torch.tensor([num_rows])]  # padding, so that every parameter has a gradient
    chunks = []  # of each sequence, [n, DELTA_CHUNK]
    for rows in sorted(sequences, key=len, reverse=True):
        num_missing = -len(rows) % DELTA_CHUNK
        padded = F.pad(rows, (0, num_missing), value=num_rows)
        chunks.append(padded.view(-1, DELTA_CHUNK))
    rounds = pack_sequence(chunks)
    all_rows = rounds.data.flatten()
    # The model's rows have the lowest numbers, so the first place of padding is the last one.
    _, first_places = np.unique(all_rows, return_index=True)
    places = torch.from_numpy(first_places[:num_rows])
    return ChunkIndex(
        rows=upload(all_rows, layout.device),
        counts=tuple(rounds.batch_sizes.tolist()),
        places=upload(places, layout.device),
    )


def convolve(window: Iterable[Tensor], weight: Tensor) -> Tensor:
    """A causal convolution of each channel, then silu: [T, channels] in at least fp32.

    window: inputs [T, channels] before each row, the oldest first, the row's own last. weight [channels, 1, kernel].
    """
    wide = at_least_fp32(weight.dtype)
    taps = weight[:, 0].to(wide).unbind(1)  # [channels] each
    parts = (x.to(wide) * tap for x, tap in zip(window, taps, strict=True))
    total = functools.reduce(torch.add, parts)
    return activate(total, F.silu)


def normalized(x: Tensor) -> Tensor:
    """Vectors [.., D] of length 1."""
    square = (x * x).sum(-1, keepdim=True)
    return x * torch.rsqrt(square + 1e-6)


def run_chunks(
    rows: DeltaRows,
    index: ChunkIndex,
    states: DeltaStates | None = None,
    slots: Tensor | None = None,
    last_rows: Tensor | None = None,
) -> Tensor:
    """The outputs [T', H, Dv] of packed sequences.

    Stores the states after their last rows int64 [sequences] in these slots int64 [sequences].
    """
    chunks = DeltaRows(*(_in_chunks(x, index.rows) for x in rows))  # [N, H, C, ...] each
    rounds = zip(*(x.split(index.counts) for x in chunks), strict=True)

    # Each round begins with the states that the round before it ended with.
    num_heads, key_dim = rows.k.shape[1:]
    value_dim = rows.v.shape[-1]
    end = rows.v.new_zeros(index.counts[0], num_heads, key_dim, value_dim)
    outputs: list[Tensor] = []
    updates: list[Tensor] = []
    begins: list[Tensor] = []
    for count, own in zip(index.counts, rounds, strict=True):
        begin = end[:count]
        out, update, end = _run_chunk(DeltaRows(*own), begin)
        outputs.append(out)
        updates.append(update)
        begins.append(begin)

    if states is not None:
        last_chunks = index.places[last_rows] // DELTA_CHUNK  # [sequences]
        kept = (torch.cat(begins), chunks.k.mT, torch.cat(updates), chunks.decay)
        for pool, values in zip(states[1:], kept, strict=True):
            pool[slots] = values[last_chunks]
    by_row = torch.cat(outputs).transpose(1, 2).flatten(0, 1)  # [N x C, H, Dv]
    return by_row[index.places]


def _in_chunks(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of x [T', H, ...] with these indices [N x C], in chunks [N, H, C, ...]; index T' gives zeros."""
    zeros = x.new_zeros(1, *x.shape[1:])
    padded = torch.cat([x, zeros])
    chunks = padded.index_select(0, rows)  # [N x C, H, ...]
    chunks = chunks.unflatten(0, (-1, DELTA_CHUNK))
    return chunks.transpose(1, 2).contiguous()


def _run_chunk(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """O, U and S' of chunks, from their rows [N, H, C, ...] and S [N, H, Dk, Dv]."""
    q, k, v, decay, beta = rows
    keys = k.mT
    total = decay.cumsum(-1)  # c, [N, H, C]
    differences = total[..., :, None] - total[..., None, :]  # c_i - c_j
    pairs = differences.clamp(max=0).exp()
    grown = total.exp()

    # A and the weights of U in the outputs, [N, H, C, C].
    a = (k @ keys * pairs * beta[..., None]).tril(-1)
    weights = (q @ keys * pairs).tril()

    # The factors of R and of the outputs, [N, H, C, D].
    k_in = k * (beta * grown)[..., None]
    q_in = q * grown[..., None]
    v_in = v * beta[..., None]

    update = _Solve.apply(a, v_in - k_in @ state)
    out = q_in @ state + weights @ update
    end = next_state(state, keys, update, total)
    return out, update, end


def run_row(
    rows: DeltaRows, states: DeltaStates, slots: Tensor, positions: Tensor, *, num_padded: int
) -> Tensor:
    """The outputs [n, H, Dv] of the next row of n cached sequences, which has these positions and slots int64 [n].

    The row's key, decay and update are stored in `states`; S stays.
    num_padded: products have this many rows, see `padded_rows`.
    """
    column = positions % DELTA_CHUNK  # of each row in its chunk
    states.keys[slots, :, :, column] = rows.k
    states.decays[slots, :, column] = rows.decay

    # Which N states are read, and where each sequence is among these.
    read: slice | Tensor = slots
    sequence = torch.arange(len(slots), device=slots.device)
    place = sequence
    if slots.device.type == "cpu" and int(slots.max()) < 2 * len(slots):
        # All up to the highest slot, where they lie: copies would take a step of 64 sequences up to a third longer.
        read = slice(int(slots.max()) + 1)
        place = slots
    state, keys, updates, decays = (pool[read] for pool in states[1:])

    # The sequence of each state that is read: the first one for idle slots, whose results are dropped.
    sequence_at = slots.new_zeros(len(state))
    sequence_at[place] = sequence
    q, k, v, _, beta = (x[sequence_at] for x in rows)  # [N, H, ...]
    own_column = column[sequence_at][:, None, None]

    # Of A a row sees the rows before it, of the weights itself, too.
    columns = torch.arange(DELTA_CHUNK, device=slots.device)
    is_before = columns < own_column
    is_seen = columns <= own_column
    total = torch.where(is_seen, decays, 0.0).cumsum(-1)  # c, [N, H, C]
    own_total = total[..., -1:]
    pairs = (own_total - total).clamp(max=0).exp()
    grown = activate(own_total[..., 0], torch.exp)  # [N, H]
    by_keys = _padded(num_padded, k, q) @ keys
    k_by_keys = by_keys[..., 0, :]  # [N, H, C]
    q_by_keys = by_keys[..., 1, :]
    a = torch.where(is_before, k_by_keys * pairs, 0.0)
    weights = torch.where(is_seen, q_by_keys * pairs, 0.0)

    # The row of U, [N, H, Dv].
    k_in = k * (beta * grown)[..., None]
    q_in = q * grown[..., None]
    by_state = _padded(num_padded, k_in, q_in) @ state
    right = v * beta[..., None] - by_state[..., 0, :]
    update = _solve_row(a * beta[..., None], right, updates)
    update = update[place]
    updates[place, :, column] = update  # for the product below, if it is a copy
    states.updates[slots, :, column] = update

    by_weights = _padded(num_padded, weights) @ updates
    out = by_state[..., 1, :] + by_weights[..., 0, :]
    return out[place]


def _padded(num_padded: int, *rows: Tensor) -> Tensor:
    """Rows [n, H, D] as the first of [n, H, num_padded, D]: fewer would not take the kernel of a chunk."""
    stacked = torch.stack(rows, 2)
    num_missing = num_padded - len(rows)
    return F.pad(stacked, (0, 0, 0, num_missing))


def _solve_row(a: Tensor, right: Tensor, solved: Tensor) -> Tensor:
    """A row [N, H, D] of the solution, from its row a [N, H, C] of A and the solution's earlier rows [N, H, C, D]."""
    row = a[..., None, :].contiguous()  # [N, H, 1, C]
    known = row @ solved
    return right - known[..., 0, :]


class _Solve(torch.autograd.Function):
    """U of (1 + A) U = R, for strictly lower A [N, H, C, C] and R [N, H, C, D]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, right: Tensor) -> Tensor:
        """See the class."""
        if a.device.type == "cpu":
            solved = torch.zeros_like(right)
            for i in range(DELTA_CHUNK):
                solved[..., i, :] = _solve_row(a[..., i, :], right[..., i, :], solved)
        else:
            solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
        ctx.save_for_backward(a, solved)
        return solved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        a, solved = ctx.saved_tensors
        by_right = torch.linalg.solve_triangular(a.mT, grad, upper=True, unitriangular=True)
        by_a = -(by_right @ solved.mT).tril(-1)
        return by_a, by_right.contiguous()


def padded_rows(shape: DeltaNet, device: torch.device) -> int:
    """Return how many rows `run_row` pads its products to."""
    return min_batch_rows(shape) or 2 if device.type == "cpu" else 2


@measured
def min_batch_rows(shape: DeltaNet) -> int | None:
    """Measure to how few rows `run_row` may pad its products and have the bits of `run_chunks` on this CPU.

    None: it never has them.
    """
    length = DELTA_CHUNK + 9
    generator = torch.Generator().manual_seed(0)
    randn = functools.partial(torch.randn, 3 * length, shape.num_value_heads, generator=generator)
    rows = DeltaRows(
        q=normalized(randn(shape.key_head_dim)),
        k=normalized(randn(shape.key_head_dim)),
        v=randn(shape.value_head_dim),
        decay=-randn().abs(),
        beta=randn().sigmoid(),
    )
    layout = PackedLayout((Sequence(length),) * 3, rows.q.device)
    expected = run_chunks(rows, index_chunks(layout))
    for num_padded in (2, 4, 8, 16):
        decoded = (_decode(rows, shape, length, num_sequences, num_padded) for num_sequences in (1, 3))
        if all(torch.equal(outputs, expected[: len(outputs)]) for outputs in decoded):
            return num_padded
    return None


def _decode(rows: DeltaRows, shape: DeltaNet, length: int, num_sequences: int, num_padded: int) -> Tensor:
    """The outputs [num_sequences x length, H, Dv] of `run_row` for the first of sequences of `length` rows."""
    slots = torch.arange(num_sequences)
    cache = StateCache(shape, num_sequences, dtype=torch.float32, device=slots.device)
    states = cache.layer(shape.layers[0])
    outputs = []
    for position in range(length):
        positions = torch.full_like(slots, position)
        cache.begin_step(slots, positions)
        row = DeltaRows(*(x[slots * length + position] for x in rows))
        outputs.append(run_row(row, states, slots, positions, num_padded=num_padded))
    return torch.stack(outputs, 1).flatten(0, 1)
