"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), computed in chunks of rows, or row by row in decoding.

A head's state S [Dk, Dv] maps keys to values. For a chunk's rows, with queries Q, keys K, values V, log decays g <= 0,
strengths beta, and c the cumulative sum of g within the chunk:

    A = beta (K K^T) e^(c_i - c_j), strictly lower    R = beta V - (beta e^c K) S    U = (1 + A)^-1 R
    O = (e^c Q) S + lower((Q K^T) e^(c_i - c_j)) U    S' = e^c_last S + (e^(c_last - c) K)^T U

`run_chunks` processes packed sequences in rounds, one chunk of every sequence per round. `run_row` computes the next
row of each cached sequence from `DeltaStates`; when a new chunk begins, `StateCache` computes S' of the previous chunk.
On the CPU, `run_chunks` and `run_row` give bitwise-identical results: both compute each row of U as a single-row
matmul, and `run_row` pads its other matmuls to `min_batch_rows` rows. The inner dimensions of these matmuls do not
depend on the number of rows. Everything is computed in fp32 (fp64 in an fp64 model).

Shapes: T rows, H value heads, N chunks (or sequences), C rows per chunk.
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
from minirl.model.attention import PackedLayout, Sequence, to_device
from minirl.model.batch_invariance import apply_activation, at_least_fp32, cache_measurement
from minirl.model.config import DeltaNet
from minirl.model.portable_attention import select_rows


class DeltaRows(NamedTuple):
    """The rule's inputs for T rows: unit vectors q / sqrt(Dk) and k [T, H, Dk], v [T, H, Dv], decay and beta [T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


class ChunkIndex(NamedTuple):
    """The N chunks of packed sequences, grouped into rounds: all first chunks, then all second chunks, and so on.

    Sequences are sorted longest first, so a round's chunks continue the leading chunks of the previous round.
    rows int64 [N x DELTA_CHUNK]: the chunks' rows, as indices into the model's T' rows; T' for padding.
    round_sizes: number of chunks per round.
    output_index int64 [T']: index of each row in `rows`; the first index if a row appears several times.
    """

    rows: Tensor
    round_sizes: tuple[int, ...]
    output_index: Tensor


def index_chunks(layout: PackedLayout) -> ChunkIndex:
    """Split packed sequences into chunks.

    Rows that several sequences share are computed once per sequence. For example, the first sequence has rows 0 to 69,
    and the second sequence has the first 35 of these rows, followed by rows 70 to 74:

        round 0   chunk 0: 0 to 31                  chunk 1: 0 to 31
        round 1   chunk 2: 32 to 63                 chunk 3: 32 to 34, 70 to 74, padding
        round 2   chunk 4: 64 to 69, padding
    """
    num_rows = int(layout.query_lengths.sum())
    sequences = [torch.from_numpy(rows) for rows in layout.hidden_state_rows if len(rows)]
    if not sequences:
        sequences = [torch.tensor([num_rows])]  # padding, so that every parameter gets a gradient
    chunks = []  # [n, DELTA_CHUNK] per sequence
    for rows in sorted(sequences, key=len, reverse=True):
        num_missing_rows = -len(rows) % DELTA_CHUNK
        padded = F.pad(rows, (0, num_missing_rows), value=num_rows)
        chunks.append(padded.view(-1, DELTA_CHUNK))
    rounds = pack_sequence(chunks)
    all_rows = rounds.data.flatten()
    # Padding has the highest row number, so padding comes last in sorted order.
    _, first_index = np.unique(all_rows, return_index=True)
    output_index = torch.from_numpy(first_index[:num_rows])
    return ChunkIndex(
        rows=to_device(all_rows, layout.device),
        round_sizes=tuple(rounds.batch_sizes.tolist()),
        output_index=to_device(output_index, layout.device),
    )


def convolve(window: Iterable[Tensor], weight: Tensor) -> Tensor:
    """Apply a causal convolution per channel, then silu: [T, channels] in at least fp32.

    window: inputs [T, channels] up to each row, oldest first, the row's own input last. weight [channels, 1, kernel].
    """
    upcast_dtype = at_least_fp32(weight.dtype)
    taps = weight[:, 0].to(upcast_dtype).unbind(1)  # [channels] each
    parts = (x.to(upcast_dtype) * tap for x, tap in zip(window, taps, strict=True))
    convolved = functools.reduce(torch.add, parts)
    return apply_activation(convolved, F.silu)


def normalize(x: Tensor) -> Tensor:
    """Return vectors [.., D] scaled to unit length."""
    square = (x * x).sum(-1, keepdim=True)
    return x * torch.rsqrt(square + 1e-6)


def run_chunks(
    rows: DeltaRows,
    index: ChunkIndex,
    states: DeltaStates | None = None,
    slots: Tensor | None = None,
    last_rows: Tensor | None = None,
) -> Tensor:
    """Return the outputs [T', H, Dv] of packed sequences.

    With `states`, also store the states after `last_rows` int64 [sequences] in `slots` int64 [sequences].
    """
    chunks = DeltaRows(*(_gather_chunks(x, index.rows) for x in rows))  # [N, H, C, ...] each
    rounds = zip(*(x.split(index.round_sizes) for x in chunks), strict=True)

    # Each round begins with the final states of the previous round.
    num_heads, key_dim = rows.k.shape[1:]
    value_dim = rows.v.shape[-1]
    end_states = rows.v.new_zeros(index.round_sizes[0], num_heads, key_dim, value_dim)
    outputs: list[Tensor] = []
    updates: list[Tensor] = []
    begin_states: list[Tensor] = []
    for count, chunk_rows in zip(index.round_sizes, rounds, strict=True):
        begin_state = end_states[:count]
        out, update, end_states = _run_chunk(DeltaRows(*chunk_rows), begin_state)
        outputs.append(out)
        updates.append(update)
        begin_states.append(begin_state)

    if states is not None:
        last_chunks = index.output_index[last_rows] // DELTA_CHUNK  # [sequences]
        new_states = (torch.cat(begin_states), chunks.k.mT, torch.cat(updates), chunks.decay)
        for pool, values in zip(states[1:], new_states, strict=True):
            pool[slots] = values.index_select(0, last_chunks)
    output_rows = torch.cat(outputs).transpose(1, 2).flatten(0, 1)  # [N x C, H, Dv]
    return output_rows[index.output_index]


def _gather_chunks(x: Tensor, rows: Tensor) -> Tensor:
    """Gather rows of x [T', H, ...] by index [N x C] into chunks [N, H, C, ...]; index T' yields zeros."""
    zeros = x.new_zeros(1, *x.shape[1:])
    padded = torch.cat([x, zeros])
    chunks = padded.index_select(0, rows)  # [N x C, H, ...]
    chunks = chunks.unflatten(0, (-1, DELTA_CHUNK))
    return chunks.transpose(1, 2).contiguous()


def _run_chunk(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return O, U and S' for N chunks, given their rows [N, H, C, ...] and S [N, H, Dk, Dv]."""
    q, k, v, decay, beta = rows
    keys = k.mT
    cum_decay = decay.cumsum(-1)  # c, [N, H, C]
    decay_differences = cum_decay[..., :, None] - cum_decay[..., None, :]  # c_i - c_j
    pair_decay = decay_differences.clamp(max=0).exp()
    exp_decay = cum_decay.exp()

    # A, and the weights of U in the outputs, [N, H, C, C].
    a = (k @ keys * pair_decay * beta[..., None]).tril(-1)
    weights = (q @ keys * pair_decay).tril()

    # The factors from which R and the outputs are computed, [N, H, C, D].
    k_in = k * (beta * exp_decay)[..., None]
    q_in = q * exp_decay[..., None]
    v_in = v * beta[..., None]

    update = _Solve.apply(a, v_in - k_in @ state)
    out = q_in @ state + weights @ update
    end_state = next_state(state, keys, update, cum_decay)
    return out, update, end_state


def run_row(
    rows: DeltaRows, states: DeltaStates, slots: Tensor, positions: Tensor, *, num_padded: int
) -> Tensor:
    """Return the outputs [n, H, Dv] for the next row of each of n cached sequences; positions and slots are int64 [n].

    Stores each row's key, decay and update in `states`; S stays unchanged.
    num_padded: number of rows to which matmul inputs are padded (`padded_rows`).
    """
    column = positions % DELTA_CHUNK  # index of each row in its chunk
    states.keys[slots, :, :, column] = rows.k
    states.decays[slots, :, column] = rows.decay

    # The rows of the N states to read, and the index of each sequence among these rows.
    state_rows: slice | Tensor = slots
    sequence = torch.arange(len(slots), device=slots.device)
    state_index = sequence
    if slots.device.type == "cpu" and int(slots.max()) < 2 * len(slots):
        # Read all states in place, up to the highest slot. With 64 sequences and states of 1 MiB, copying would make a
        # step 3 to 4 times as slow.
        state_rows = slice(int(slots.max()) + 1)
        state_index = slots
    state, keys, updates, decays = (select_rows(pool, state_rows) for pool in states[1:])

    # The sequence for each state. Idle slots repeat the computation for the first sequence, and the results are
    # discarded.
    sequence_at = slots.new_zeros(len(state))
    sequence_at[state_index] = sequence
    q, k, v, _, beta = (x[sequence_at] for x in rows)  # [N, H, ...]
    own_column = column[sequence_at][:, None, None]

    # In A, a row interacts only with earlier rows; in the weights, a row also interacts with itself.
    columns = torch.arange(DELTA_CHUNK, device=slots.device)
    is_before = columns < own_column
    is_seen = columns <= own_column
    cum_decay = torch.where(is_seen, decays, 0.0).cumsum(-1)  # c, [N, H, C]
    own_cum_decay = cum_decay[..., -1:]
    pair_decay = (own_cum_decay - cum_decay).clamp(max=0).exp()
    exp_decay = apply_activation(own_cum_decay[..., 0], torch.exp)  # [N, H]
    scores = _stack_padded(num_padded, k, q) @ keys
    k_scores = scores[..., 0, :]  # [N, H, C]
    q_scores = scores[..., 1, :]
    a = torch.where(is_before, k_scores * pair_decay, 0.0)
    weights = torch.where(is_seen, q_scores * pair_decay, 0.0)

    # The row of U, [N, H, Dv].
    k_in = k * (beta * exp_decay)[..., None]
    q_in = q * exp_decay[..., None]
    state_products = _stack_padded(num_padded, k_in, q_in) @ state
    rhs = v * beta[..., None] - state_products[..., 0, :]
    update = _solve_row(a * beta[..., None], rhs, updates)
    update = update[state_index]
    updates[state_index, :, column] = update  # for the matmul below, in case `updates` is a copy
    states.updates[slots, :, column] = update

    weighted_updates = _stack_padded(num_padded, weights) @ updates
    out = state_products[..., 1, :] + weighted_updates[..., 0, :]
    return out[state_index]


def _stack_padded(num_padded: int, *rows: Tensor) -> Tensor:
    """Stack rows [n, H, D] and pad the stack to [n, H, num_padded, D].

    A matmul with fewer rows might dispatch to a different kernel.
    """
    stacked = torch.stack(rows, 2)
    num_missing_rows = num_padded - len(rows)
    return F.pad(stacked, (0, 0, 0, num_missing_rows))


def _solve_row(a: Tensor, rhs: Tensor, solved: Tensor) -> Tensor:
    """Return one row [N, H, D] of U, given the rows of A [N, H, C] and R, and the earlier rows of U [N, H, C, D]."""
    row = a[..., None, :].contiguous()  # [N, H, 1, C]
    known_terms = row @ solved
    return rhs - known_terms[..., 0, :]


class _Solve(torch.autograd.Function):
    """Solves (1 + A) U = R for U, with strictly lower triangular A [N, H, C, C] and R [N, H, C, D]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, rhs: Tensor) -> Tensor:
        """Return U."""
        if a.device.type == "cpu":
            solved = torch.zeros_like(rhs)
            for i in range(DELTA_CHUNK):
                solved[..., i, :] = _solve_row(a[..., i, :], rhs[..., i, :], solved)
        else:
            solved = torch.linalg.solve_triangular(a, rhs, upper=False, unitriangular=True)
        ctx.save_for_backward(a, solved)
        return solved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to A and R."""
        a, solved = ctx.saved_tensors
        grad_rhs = torch.linalg.solve_triangular(a.mT, grad, upper=True, unitriangular=True)
        grad_a = -(grad_rhs @ solved.mT).tril(-1)
        return grad_a, grad_rhs.contiguous()


def padded_rows(shape: DeltaNet, device: torch.device) -> int:
    """Return the number of rows to which `run_row` pads its matmul inputs."""
    return min_batch_rows(shape) or 2 if device.type == "cpu" else 2


@cache_measurement
def min_batch_rows(shape: DeltaNet) -> int | None:
    """Return the smallest padded row count at which `run_row` matches `run_chunks` bitwise on this CPU.

    Return None if even 16 rows are not enough.
    """
    length = DELTA_CHUNK + 9
    generator = torch.Generator().manual_seed(0)
    randn = functools.partial(torch.randn, 3 * length, shape.num_value_heads, generator=generator)
    rows = DeltaRows(
        q=normalize(randn(shape.key_head_dim)),
        k=normalize(randn(shape.key_head_dim)),
        v=randn(shape.value_head_dim),
        decay=-randn().abs(),
        beta=randn().sigmoid(),
    )
    layout = PackedLayout((Sequence(length),) * 3, rows.q.device)
    expected = run_chunks(rows, index_chunks(layout))
    for num_padded in (2, 4, 8, 16):
        decoded = (_run_rows(rows, shape, length, num_sequences, num_padded) for num_sequences in (1, 3))
        if all(torch.equal(outputs, expected[: len(outputs)]) for outputs in decoded):
            return num_padded
    return None


def _run_rows(rows: DeltaRows, shape: DeltaNet, length: int, num_sequences: int, num_padded: int) -> Tensor:
    """Return `run_row`'s outputs [num_sequences x length, H, Dv] for the first sequences, each with `length` rows."""
    slots = torch.arange(num_sequences)
    cache = StateCache(shape, num_sequences, dtype=torch.float32, device=slots.device)
    states = cache.layers[shape.layers[0]]
    outputs = []
    for position in range(length):
        positions = torch.full_like(slots, position)
        cache.begin_step(slots, positions)
        row = DeltaRows(*(x[slots * length + position] for x in rows))
        outputs.append(run_row(row, states, slots, positions, num_padded=num_padded))
    return torch.stack(outputs, 1).flatten(0, 1)
