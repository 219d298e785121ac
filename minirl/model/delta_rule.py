"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): rows of chunks, which decoding computes bit for bit.

A head's state S [Dk, Dv] maps keys to values. With queries Q, keys K, values V, decays g <= 0 and strengths beta of a
chunk's rows, and c the running sum of g in it:

    A = beta (K K^T) e^(c_i - c_j), strictly lower    R = beta V - (beta e^c K) S    U = (1 + A)^-1 R
    O = (e^c Q) S + lower((Q K^T) e^(c_i - c_j)) U    S' = e^c_last S + (e^(c_last - c) K)^T U

`run_chunks` computes packed sequences, one chunk of all sequences at a time. `run_row` computes the next row of each
cached sequence from `DeltaStates`, and `end_chunks` the state after a chunk whose rows are all there. On the CPU both
forms have the same bits: a row of U is one product of one row in both. The other products have at least MIN_ROWS rows,
and inner lengths that do not depend on the number of rows. Everything is fp32 (fp64 in an fp64 model).

In shapes: T rows, H value heads, N chunks (or sequences), C rows of a chunk.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model.batch_invariance import activate, at_least_fp32
from minirl.model.padding import MIN_ROWS

CHUNK = 64  # rows


@dataclass(frozen=True)
class DeltaNet:
    """The shape of a gated delta net, and the layers that have it instead of attention."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int

    @property
    def num_channels(self) -> int:
        """Channels of all queries, keys and values together: those of the convolution."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_values

    @property
    def num_values(self) -> int:
        """Channels of all values together."""
        return self.num_value_heads * self.value_head_dim


class DeltaRows(NamedTuple):
    """T rows of the rule: q, k [T, H, Dk] of length 1 (q / sqrt(Dk)), v [T, H, Dv], decay and beta [T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


class Round(NamedTuple):
    """Pieces of packed sequences that are computed together, each from the state after a piece of the round before.

    rows int64 [n]: the pieces' rows, end to end, as indices among the T' rows of the model; T' for padding.
    lengths int64 [pieces]: how many rows each has.
    previous int64 [pieces]: which piece of the round before it follows. In the first round 0, for a state of zeros.
    """

    rows: Tensor
    lengths: Tensor
    previous: Tensor


@dataclass(frozen=True)
class RoundIndex:
    """Packed sequences in pieces.

    places int64 [T']: where each row is in the rows of all rounds, end to end; the first place if it has several.
    ends int64 [sequences]: the places of the sequences' last rows.
    """

    rounds: tuple[Round, ...]
    places: Tensor
    ends: Tensor


def index_rounds(
    sequences: Sequence[Tensor],
    begins: Sequence[Sequence[int]],
    num_rows: int,
    multiple: int,
    upload: Callable[[Tensor], Tensor],
) -> RoundIndex:
    """Cut packed sequences into pieces that begin at these positions of each.

    sequences: the rows of each, as indices among the model's `num_rows`; on the host. It may share its first rows with
    an earlier one, which must then have a piece that ends before its first own piece.
    multiple: the rows of each piece are padded to a multiple of it. upload: copies a tensor to the rows' device.
    """
    # By round: the rows of its pieces, and the piece of the round before that each follows.
    pieces_of: dict[int, list[tuple[Tensor, int]]] = {}
    # By a piece's last row: its round, and its number there.
    ended_by: dict[int, tuple[int, int]] = {}
    for sequence, starts in zip(sequences, begins, strict=True):
        for begin, piece in zip(starts, sequence.tensor_split(list(starts))[1:], strict=True):
            round_before, previous = ended_by[int(sequence[begin - 1])] if begin else (-1, 0)
            pieces = pieces_of.setdefault(round_before + 1, [])
            ended_by[int(piece[-1])] = (round_before + 1, len(pieces))
            pieces.append((F.pad(piece, (0, -len(piece) % multiple), value=num_rows), previous))
    if not pieces_of:  # one piece of padding, so that every parameter has a gradient
        pieces_of[0] = [(torch.full((multiple,), num_rows), 0)]
    rounds = []
    for pieces in pieces_of.values():
        rows, numbers = zip(*pieces, strict=True)
        lengths = [len(piece) for piece in rows]
        rounds.append(Round(torch.cat(rows), torch.tensor(lengths), torch.tensor(numbers)))
    all_rows = torch.cat([part.rows for part in rounds])
    places = torch.full((num_rows + 1,), len(all_rows))
    places.scatter_reduce_(0, all_rows, torch.arange(len(all_rows)), "amin")
    last_rows = torch.cat([all_rows[:0], *(sequence[-1:] for sequence in sequences)])
    uploaded = tuple(Round(*map(upload, part)) for part in rounds)
    return RoundIndex(uploaded, upload(places[:num_rows]), upload(places[last_rows]))


class DeltaStates(NamedTuple):
    """One layer's states of cached sequences, each in a slot: [slots, ...].

    inputs [.., kernel, channels]: the newest inputs of the convolution, that of position p at p % kernel.
    state [.., H, Dk, Dv]: S where the chunk of the newest row begins. keys [.., H, C, Dk], updates [.., H, C, Dv] and
    decays [.., H, C]: K, U and g of the rows since; later elements are finite.
    """

    inputs: Tensor
    state: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor


def make_states(shape: DeltaNet, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> DeltaStates:
    """States of zeros, from which new sequences begin."""
    inputs = torch.zeros(num_slots, shape.kernel_size, shape.num_channels, dtype=dtype, device=device)
    keys, values = shape.key_head_dim, shape.value_head_dim
    pools = []
    for sizes in ((keys, values), (CHUNK, keys), (CHUNK, values), (CHUNK,)):
        of_heads = (num_slots, shape.num_value_heads, *sizes)
        pools.append(torch.zeros(of_heads, dtype=at_least_fp32(dtype), device=device))
    return DeltaStates(inputs, *pools)


def convolve(window: Iterable[Tensor], weight: Tensor) -> Tensor:
    """A causal convolution of each channel, then silu: [T, channels] in at least fp32.

    window: inputs [T, channels] before each row, the oldest first, the row's own last. weight [channels, 1, kernel].
    """
    wide = at_least_fp32(weight.dtype)
    taps = weight[:, 0].to(wide).unbind(1)
    parts = (x.to(wide) * tap for x, tap in zip(window, taps, strict=True))
    return activate(functools.reduce(torch.add, parts), F.silu)


def normalized(x: Tensor) -> Tensor:
    """Vectors [.., D] of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def run_chunks(
    rows: DeltaRows, index: RoundIndex, states: DeltaStates | None = None, slots: Tensor | None = None
) -> Tensor:
    """The outputs [T', H, Dv] of packed sequences. Stores the states after them in these slots int64 [sequences]."""
    in_chunks = torch.cat([part.rows for part in index.rounds])
    chunks = DeltaRows(*(_in_chunks(x, in_chunks) for x in rows))
    sizes = [len(part.previous) for part in index.rounds]
    of_rounds = zip(*(x.split(sizes) for x in chunks), strict=True)
    end = rows.v.new_zeros(1, *rows.k.shape[1:], rows.v.shape[-1])
    begins: list[Tensor] = []
    updates: list[Tensor] = []
    outputs: list[Tensor] = []
    for part, own in zip(index.rounds, of_rounds, strict=True):
        begin = end[part.previous]
        out, update, end = _run_chunk(DeltaRows(*own), begin)
        begins.append(begin)
        updates.append(update)
        outputs.append(out)
    if states is not None:
        kept = (torch.cat(begins), chunks.k, torch.cat(updates), chunks.decay)
        for pool, values in zip(states[1:], kept, strict=True):
            pool[slots] = values[index.ends // CHUNK]
    by_row = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    return by_row[index.places]


def _in_chunks(x: Tensor, index: Tensor) -> Tensor:
    """The rows of x [T', H, ...] at these indices [N x C] in their chunks, [N, H, C, ...]; zeros for padding."""
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    chunks = padded.index_select(0, index).unflatten(0, (-1, CHUNK))
    return chunks.transpose(1, 2).contiguous()


def _run_chunk(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """O, U and S' of chunks, from their rows [N, H, C, ...] and S [N, H, Dk, Dv]."""
    q, k, v, decay, beta = rows
    total = decay.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    pairs = between.clamp(max=0).exp()
    grown = total.exp()
    keys = k.mT
    a = (k @ keys * beta[..., None] * pairs).tril(-1)
    weights = (q @ keys * pairs).tril()
    k_in = k * (beta * grown)[..., None]
    q_in = q * grown[..., None]
    v_in = v * beta[..., None]
    update = _Solve.apply(a, v_in - k_in @ state)
    end = _next_state(state, k, update, total)
    return q_in @ state + weights @ update, update, end


def _next_state(state: Tensor, keys: Tensor, updates: Tensor, total: Tensor) -> Tensor:
    """The state [N, H, Dk, Dv] after a chunk, from the state before it, K, U and c."""
    k_out = keys * (total[..., -1:] - total).exp()[..., None]
    kept = state * total.exp()[..., -1, None, None]
    return kept + k_out.mT @ updates


def run_row(rows: DeltaRows, states: DeltaStates, slots: Tensor, positions: Tensor) -> Tensor:
    """The outputs [n, H, Dv] of the next row of n cached sequences, which has these positions and slots int64 [n]."""
    at = positions % CHUNK
    states.keys[slots, :, at] = rows.k
    states.decays[slots, :, at] = rows.decay
    state, keys, updates, decays = (pool[slots] for pool in states[1:])
    q, k, v, _, beta = rows
    own = (torch.arange(len(at), device=at.device), slice(None), at)
    column = torch.arange(CHUNK, device=at.device)
    is_before = column < at[:, None, None]
    total = decays.cumsum(-1)
    between = total[own][..., None] - total
    pairs = between.clamp(max=0).exp()
    grown = total.exp()[own]
    of_keys = _padded(k, q) @ keys.mT
    a = torch.where(is_before, of_keys[..., 0, :] * beta[..., None] * pairs, 0.0)
    k_in = k * (beta * grown)[..., None]
    q_in = q * grown[..., None]
    of_state = _padded(k_in, q_in) @ state
    update = _solve_row(a, v * beta[..., None] - of_state[..., 0, :], updates)
    updates[own] = update
    states.updates[slots, :, at] = update
    weights = torch.where(column <= at[:, None, None], of_keys[..., 1, :] * pairs, 0.0)
    return of_state[..., 1, :] + (_padded(weights) @ updates)[..., 0, :]


def end_chunks(states: DeltaStates, slots: Tensor) -> None:
    """Advance the states in these slots int64 [n], whose chunks are full; the next row begins another one."""
    state, keys, updates, decays = (pool[slots] for pool in states[1:])
    states.state[slots] = _next_state(state, keys, updates, decays.cumsum(-1))


def _padded(*rows: Tensor) -> Tensor:
    """Rows [n, H, D] as the first of MIN_ROWS rows [n, H, MIN_ROWS, D]: fewer would not take the kernel of a chunk."""
    return F.pad(torch.stack(rows, 2), (0, 0, 0, MIN_ROWS - len(rows)))


def _solve_row(a: Tensor, right: Tensor, solved: Tensor) -> Tensor:
    """A row [N, H, D] of the solution, from its row a [N, H, C] of A and the solution's earlier rows [N, H, C, D]."""
    return right - (a[..., None, :].contiguous() @ solved)[..., 0, :]


class _Solve(torch.autograd.Function):
    """U of (1 + A) U = R, for strictly lower A [N, H, C, C] and R [N, H, C, D]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, right: Tensor) -> Tensor:
        """See the class."""
        if a.device.type == "cpu":
            solved = torch.zeros_like(right)
            for i in range(CHUNK):
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
        return -(by_right @ solved.mT).tril(-1), by_right.contiguous()


@functools.cache
def is_batch_invariant(shape: DeltaNet) -> bool:
    """Measure whether `run_row` has the bits of `run_chunks` on this CPU, for one and for three sequences."""
    length = CHUNK + 9
    sizes = (shape.key_head_dim, shape.key_head_dim, shape.value_head_dim, 1, 1)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, length, shape.num_value_heads, sum(sizes), generator=generator)
    q, k, v, decay, beta = numbers.split(sizes, -1)
    rows = DeltaRows(normalized(q), normalized(k), v, -decay[..., 0].abs(), beta[..., 0].sigmoid())
    sequences = torch.arange(3 * length).split(length)
    index = index_rounds(sequences, [[0, CHUNK]] * 3, 3 * length, CHUNK, lambda tensor: tensor)
    expected = run_chunks(DeltaRows(*(x.flatten(0, 1) for x in rows)), index).unflatten(0, (3, length))
    for n in (1, 3):
        slots = torch.arange(n)
        states = make_states(shape, n, dtype=torch.float32, device=torch.device("cpu"))
        for position in range(length):
            if position == CHUNK:
                end_chunks(states, slots)
            row = DeltaRows(*(x[:n, position] for x in rows))
            out = run_row(row, states, slots, torch.full_like(slots, position))
            if not torch.equal(out, expected[:n, position]):
                return False
    return True
