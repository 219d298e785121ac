"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): rows of chunks, which decoding computes bit for bit.

A head's state S [Dk, Dv] maps keys to values. With queries Q, keys K, values V, decays g <= 0 and strengths beta of a
chunk's rows, and c the running sum of g in it:

    A = beta (K K^T) e^(c_i - c_j), strictly lower    R = beta V - (beta e^c K) S    U = (1 + A)^-1 R
    O = (e^c Q) S + lower((Q K^T) e^(c_i - c_j)) U    S' = e^c_last S + (e^(c_last - c) K)^T U

`run_chunks` computes packed sequences, one chunk of all sequences at a time. `run_row` computes the next row of each
cached sequence from `DeltaStates`. On the CPU both have the same bits: a row of U is one product of one row in both.
The other products have at least MIN_ROWS rows, and inner lengths that do not depend on the number of rows. Everything
is fp32 (fp64 in an fp64 model).

In shapes: T rows, H value heads, N chunks (or sequences) x H, C rows of a chunk.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class DeltaRows:
    """T rows of the rule: q, k [T, H, Dk] of length 1 (q / sqrt(Dk)), v [T, H, Dv], decay and beta [T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def select(self, index: Tensor | slice) -> "DeltaRows":
        """These rows."""
        return DeltaRows(*(x[index] for x in vars(self).values()))


@dataclass(frozen=True)
class ChunkIndex:
    """The chunks of packed sequences, in order of their number within their sequence.

    A sequence that shares its first tokens with another one begins with the chunk in which they end, from the other's
    state: up to CHUNK - 1 rows are computed once more.

    rows int64 [chunks, CHUNK]: the index of each row among the T' that the model computes; T' where a chunk has none.
    places int64 [T']: the place of each row in the chunks, end to end.
    steps: for each step, which computes the chunks with that number in their sequence, int64 [n]: the index of each
    chunk's predecessor in the step before. In the first step 0, for a state of zeros.
    last int64 [sequences]: the last chunk of each sequence.
    """

    rows: Tensor
    places: Tensor
    steps: tuple[Tensor, ...]
    last: Tensor


def index_chunks(
    lengths: Sequence[int],
    parents: Sequence[int],
    num_shared: Sequence[int],
    hidden_index: Tensor,
    upload: Callable[[Tensor], Tensor],
) -> ChunkIndex:
    """The chunks of packed sequences; `PackedLayout` explains the arguments, which are on the host.

    parents: the sequence that each one shares its first `num_shared` tokens with.
    upload: copies a tensor from the host to the device of the rows.
    """
    firsts = [shared // CHUNK for shared in num_shared]
    ends = [-(-length // CHUNK) for length in lengths]
    of_sequences = hidden_index.split(list(lengths))
    num_rows = sum(lengths) - sum(num_shared)
    rows: list[Tensor] = []
    places = torch.zeros(num_rows, dtype=torch.int64)
    last = [0] * len(lengths)
    steps: list[Tensor] = []
    in_step: dict[int, int] = {}
    for number in range(max(ends, default=0)):
        previous = []
        in_last_step, in_step = in_step, {}
        for i in range(len(lengths)):
            if not firsts[i] <= number < ends[i]:
                continue
            owner = i
            while number and number - 1 < firsts[owner]:
                owner = parents[owner]
            previous.append(in_last_step.get(owner, 0))
            in_step[i] = len(in_step)
            begin = number * CHUNK
            own = of_sequences[i][begin : begin + CHUNK]
            first_own = max(0, num_shared[i] - begin)
            places[own[first_own:]] = len(rows) * CHUNK + torch.arange(first_own, len(own))
            last[i] = len(rows)
            rows.append(F.pad(own, (0, CHUNK - len(own)), value=num_rows))
        steps.append(torch.tensor(previous))
    if not rows:  # one chunk without rows, so that every parameter has a gradient
        rows = [torch.zeros(CHUNK, dtype=torch.int64)]
        steps = [torch.zeros(1, dtype=torch.int64)]
    return ChunkIndex(
        upload(torch.stack(rows)),
        upload(places),
        tuple(map(upload, steps)),
        upload(torch.tensor(last, dtype=torch.int64)),
    )


@dataclass(frozen=True)
class DeltaStates:
    """One layer's states of cached sequences, each in a slot: [slots, ...].

    tail [.., kernel - 1, channels]: the newest inputs of the convolution. state [.., H, Dk, Dv]: S at the last border
    of a chunk. keys [.., H, C, Dk], updates [.., H, C, Dv] and decays [.., H, C]: K, U and g of the rows since; later
    elements are finite.
    """

    tail: Tensor
    state: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor


def make_states(shape: DeltaNet, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> DeltaStates:
    """States of zeros, from which new sequences begin."""
    wide = at_least_fp32(dtype)
    keys, values = shape.key_head_dim, shape.value_head_dim
    tail = torch.zeros(num_slots, shape.kernel_size - 1, shape.num_channels, dtype=dtype, device=device)
    of_heads = functools.partial(torch.zeros, num_slots, shape.num_value_heads, dtype=wide, device=device)
    return DeltaStates(
        tail,
        state=of_heads(keys, values),
        keys=of_heads(CHUNK, keys),
        updates=of_heads(CHUNK, values),
        decays=of_heads(CHUNK),
    )


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
    rows: DeltaRows, index: ChunkIndex, states: DeltaStates | None = None, slots: Tensor | None = None
) -> Tensor:
    """The outputs [T', H, Dv] of packed sequences. Stores their final states in these slots int64 [sequences]."""
    num_heads = rows.v.shape[1]
    in_chunks = [_in_chunks(x, index.rows) for x in vars(rows).values()]
    q, k, v, decay, beta = in_chunks
    total = decay.cumsum(1)
    between = total[:, :, None] - total[:, None, :]
    pairs = between.clamp(max=0).exp()
    grown = total.exp()
    keys_t = k.transpose(1, 2)
    a = (torch.bmm(k, keys_t) * beta[..., None] * pairs).tril(-1)
    weights = (torch.bmm(q, keys_t) * pairs).tril()
    k_in = k * (beta * grown)[..., None]
    q_in = q * grown[..., None]
    v_in = v * beta[..., None]
    sizes = [num_heads * len(previous) for previous in index.steps]
    of_steps = (x.split(sizes) for x in (a, weights, k_in, q_in, v_in, k, total))
    state = k.new_zeros(1, num_heads, k.shape[-1], v.shape[-1])
    outputs: list[Tensor] = []
    updates: list[Tensor] = []
    begins: list[Tensor] = []
    ends: list[Tensor] = []
    for previous, a_i, weights_i, k_in_i, q_in_i, v_in_i, k_i, total_i in zip(
        index.steps, *of_steps, strict=True
    ):
        begin = state[previous].flatten(0, 1)
        update = _Solve.apply(a_i, v_in_i - torch.bmm(k_in_i, begin))
        end = _next_state(begin, k_i, update, total_i)
        outputs.append(torch.bmm(q_in_i, begin) + torch.bmm(weights_i, update))
        updates.append(update)
        begins.append(begin)
        ends.append(end)
        state = end.unflatten(0, (-1, num_heads))
    if states is not None:
        parts = (torch.cat(begins), torch.cat(ends), k, torch.cat(updates), decay)
        begun, ended, *kept = (x.unflatten(0, (-1, num_heads))[index.last] for x in parts)
        is_full = index.rows[index.last, -1] < len(rows.v)
        states.state[slots] = torch.where(is_full[:, None, None, None], ended, begun)
        for pool, values in zip((states.keys, states.updates, states.decays), kept, strict=True):
            pool[slots] = values
    by_head = torch.cat(outputs).unflatten(0, (-1, num_heads))
    by_row = by_head.transpose(1, 2).flatten(0, 1)
    return by_row[index.places]


def run_row(rows: DeltaRows, states: DeltaStates, slots: Tensor, positions: Tensor) -> Tensor:
    """The outputs [n, H, Dv] of the next row of n cached sequences, which has these positions and slots int64 [n]."""
    num_heads = rows.v.shape[1]
    at = positions % CHUNK
    states.keys[slots, :, at] = rows.k
    states.decays[slots, :, at] = rows.decay
    pools = (states.state, states.keys, states.updates, states.decays)
    state, keys, updates, decays = (pool[slots].flatten(0, 1) for pool in pools)
    q, k, v, beta = (x.flatten(0, 1) for x in (rows.q, rows.k, rows.v, rows.beta))
    own = at.repeat_interleave(num_heads)[:, None]
    column = torch.arange(CHUNK, device=own.device)
    total = decays.cumsum(1)
    between = total.gather(1, own) - total
    pairs = between.clamp(max=0).exp()
    grown = total.exp().gather(1, own)
    of_keys = torch.bmm(_padded(k, q), keys.transpose(1, 2))
    a = torch.where(column < own, of_keys[:, 0] * beta[:, None] * pairs, 0.0)
    weights = torch.where(column <= own, of_keys[:, 1] * pairs, 0.0)
    of_state = torch.bmm(_padded(k * (beta[:, None] * grown), q * grown), state)
    update = _solve_row(a, v * beta[:, None] - of_state[:, 0], updates)
    own_update = own[..., None].expand(-1, -1, updates.shape[-1])
    updates.scatter_(1, own_update, update[:, None])
    states.updates[slots, :, at] = update.unflatten(0, (-1, num_heads))
    _end_chunks(states, slots, at, (state, keys, updates, total))
    out = of_state[:, 1] + torch.bmm(_padded(weights), updates)[:, 0]
    return out.unflatten(0, (-1, num_heads))


def _end_chunks(states: DeltaStates, slots: Tensor, at: Tensor, parts: tuple[Tensor, ...]) -> None:
    """Advance the states of the slots whose chunk is full. parts: their state, keys, updates and c, [n x H, ...]."""
    is_full = at == CHUNK - 1
    if at.device.type == "cpu":
        if not is_full.any():
            return
        heads = is_full.repeat_interleave(len(parts[0]) // len(at))
        slots = slots[is_full]
        parts = tuple(part[heads] for part in parts)
    state, keys, updates, total = parts
    ended = _next_state(state, keys, updates, total).unflatten(0, (len(slots), -1))
    if at.device.type != "cpu":  # without a copy of `is_full` to the host, which a CUDA graph cannot have
        ended = torch.where(is_full[:, None, None, None], ended, states.state[slots])
    states.state[slots] = ended


def _next_state(state: Tensor, keys: Tensor, updates: Tensor, total: Tensor) -> Tensor:
    """The state [N, Dk, Dv] after a chunk, from the state before it, K, U and c."""
    k_out = keys * (total[:, -1:] - total).exp()[..., None]
    kept = state * total.exp()[:, -1, None, None]
    return kept + torch.bmm(k_out.transpose(1, 2), updates)


def _in_chunks(x: Tensor, index: Tensor) -> Tensor:
    """The rows of x [T', H, ...] in their chunks, [chunks x H, CHUNK, ...], with zeros where a chunk has none."""
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    chunks = padded.index_select(0, index.flatten()).unflatten(0, index.shape)
    return chunks.transpose(1, 2).flatten(0, 1).contiguous()


def _padded(*rows: Tensor) -> Tensor:
    """Rows [N, D] as the first of MIN_ROWS rows [N, MIN_ROWS, D]: fewer would take another kernel than a chunk's."""
    padded = rows[0].new_zeros(len(rows[0]), MIN_ROWS, rows[0].shape[1])
    for i, row in enumerate(rows):
        padded[:, i] = row
    return padded


def _solve_row(a: Tensor, right: Tensor, solved: Tensor) -> Tensor:
    """A row [N, D] of the solution, from its row a [N, C] of A and the solution's earlier rows [N, C, D]."""
    return right - torch.bmm(a[:, None].contiguous(), solved)[:, 0]


class _Solve(torch.autograd.Function):
    """U of (1 + A) U = R, for strictly lower A [N, C, C] and R [N, C, D]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, right: Tensor) -> Tensor:
        """See the class."""
        if a.device.type == "cpu":
            solved = torch.zeros_like(right)
            for i in range(a.shape[1]):
                solved[:, i] = _solve_row(a[:, i], right[:, i], solved)
        else:
            solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
        ctx.save_for_backward(a, solved)
        return solved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        a, solved = ctx.saved_tensors
        by_right = torch.linalg.solve_triangular(a.mT, grad, upper=True, unitriangular=True)
        return -torch.bmm(by_right, solved.mT).tril(-1), by_right


@functools.cache
def is_batch_invariant(shape: DeltaNet) -> bool:
    """Measure whether `run_row` has the bits of `run_chunks` on this CPU, for one and for three sequences."""
    generator = torch.Generator().manual_seed(0)
    length = CHUNK + 9
    heads = (3 * length, shape.num_value_heads)
    sizes = (shape.key_head_dim, shape.key_head_dim, shape.value_head_dim)
    q, k, v = (F.normalize(torch.randn(*heads, size, generator=generator), dim=-1) for size in sizes)
    decay = -torch.rand(heads, generator=generator)
    rows = DeltaRows(q, k, v, decay, beta=torch.rand(heads, generator=generator))
    index = index_chunks((length,) * 3, range(3), (0, 0, 0), torch.arange(3 * length), lambda tensor: tensor)
    expected = run_chunks(rows, index)
    for num_sequences in (1, 3):
        slots = torch.arange(num_sequences)
        states = make_states(shape, num_sequences, dtype=torch.float32, device=torch.device("cpu"))
        for position in range(length):
            picked = slots * length + position
            out = run_row(rows.select(picked), states, slots, torch.full_like(slots, position))
            if not torch.equal(out, expected[picked]):
                return False
    return True
