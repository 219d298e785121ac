"""The portable attention kernel: two products and a softmax over blocks of BLOCK keys, bitwise repeatable.

Every product has the same shape whoever asks and the blocks are added in order in fp32, so a row's result has the same
bits in training, prefill and decode (`numerics`). Which rows go into which product is planned once for all layers:
`index_packed` for streams of whole sequences, `index_decode` for one new token per cached sequence.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model import batch_invariance, padding

BLOCK = 128  # keys of one product, and tokens of a cache block
QUERIES = (16, 32, 64)  # queries of one product where sequences are packed; the least that holds a tile's


@functools.cache
def min_queries(head_dim: int, dtype: torch.dtype) -> int:
    """The least number of queries that decoding may multiply with a block of keys and of values, on this machine's CPU.

    A probe: from there on a row has the bits of `attend_packed`'s products. MIN_ROWS where nothing less will do.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 64, head_dim), (3, BLOCK, head_dim), (3, 64, BLOCK), (3, BLOCK, head_dim))
    q, k, p, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    scores, out, stored = q @ k.transpose(1, 2), p @ v, k.transpose(1, 2).contiguous()
    for rows in (1, 2, 4, 8):
        few = [slice(i, i + rows) for i in range(0, 64, rows)]
        same_scores = all(torch.equal(torch.bmm(q[:, i].contiguous(), stored), scores[:, i]) for i in few)
        if same_scores and all(torch.equal(torch.bmm(p[:, i].contiguous(), v), out[:, i]) for i in few):
            return rows
    return padding.MIN_ROWS


@dataclass(frozen=True)
class _Tiles:
    """n tiles of R queries that see the same number of key blocks.

    queries [n x K x R] and keys [n x K x blocks x BLOCK]: rows of the model's q [T' x K, g x C] and k, v [T' x K, C];
    where a sequence has no such token, another of its own. mask [n, 1, R, 1, blocks x BLOCK], additive.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PackedIndex:
    """The products of a stream: its tiles, and where among their queries each row of q is, [T' x K]."""

    tiles: list[_Tiles]
    place: Tensor


def index_packed(
    lengths: Sequence[int], num_shared: Sequence[int], row: Tensor, *, window: int | None, num_kv: int
) -> PackedIndex:
    """Plan attention over sequences of these lengths, end to end; the first `num_shared` tokens of each ask nothing.

    row int64 [T]: the model's row of each token of the stream.
    """
    found: dict[
        tuple[int, int], list[tuple[int, int, int, int]]
    ] = {}  # tiles by their numbers of blocks and queries
    stream = 0
    for length, shared in zip(lengths, num_shared, strict=True):
        for start in range(shared, length, QUERIES[-1]):
            end = min(start + QUERIES[-1], length)
            first = 0 if window is None else max(0, start - window + 1) // BLOCK
            size = -(-end // BLOCK) - first, next(n for n in QUERIES if n >= end - start)
            found.setdefault(size, []).append((stream, start, end, first * BLOCK))
        stream += length
    device, row = row.device, row.cpu()
    tiles, place, offset = [], torch.empty(sum(lengths) - sum(num_shared), num_kv, dtype=torch.int64), 0
    for (num_blocks, num_queries), members in found.items():
        stream, start, end, first = (x[:, None] for x in torch.tensor(members).T)
        ahead, key = start + torch.arange(num_queries), first + torch.arange(num_blocks * BLOCK)  # [n, ...]
        is_query, query = (
            ahead < end,
            ahead.minimum(end - 1),
        )  # the last once more: a row of -inf would give NaN
        hidden = key[:, None] > query[:, :, None]
        if window is not None:
            hidden |= key[:, None] <= query[:, :, None] - window
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None, :, None]
        queries, keys = row[stream + query], row[stream + key.where(key < end, 0)]
        slot = offset + torch.arange(queries.numel() * num_kv).view(len(members), num_kv, -1).transpose(1, 2)
        place[queries[is_query]] = slot[is_query]
        offset += slot.numel()
        queries, keys = (
            (x[:, None] * num_kv + torch.arange(num_kv)[:, None]).flatten() for x in (queries, keys)
        )
        tiles.append(_Tiles(queries.to(device), keys.to(device), mask.to(device)))
    return PackedIndex(tiles, place.flatten().to(device))


def attend_packed(q: Tensor, k: Tensor, v: Tensor, plan: PackedIndex) -> Tensor:
    """Causal attention of q [T', H, C] over k, v [T', K, C] -> [T', H, C]; rows beyond the plan's give 0."""
    (num_heads, dim), num_kv = q.shape[1:], k.shape[1]
    num_rows = len(plan.place) // num_kv
    if num_rows == 0:
        return 0 * q + 0 * (k.sum() + v.sum())
    groups = num_heads // num_kv
    q, k, v = q.reshape(-1, groups * dim), k.reshape(-1, dim), v.reshape(-1, dim)
    outputs = []
    for tiles in plan.tiles:
        n, _, num_queries, _, num_keys = tiles.mask.shape
        qs = q.index_select(0, tiles.queries).view(n * num_kv, num_queries * groups, dim)
        ks, vs = (x.index_select(0, tiles.keys).view(n * num_kv, num_keys, dim) for x in (k, v))
        scores = torch.bmm(qs, ks.transpose(1, 2)).view(n, num_kv, num_queries, groups, num_keys)
        probs = _softmax(scores, tiles.mask, dim).view(n * num_kv, -1, num_keys)
        products = map(torch.bmm, probs.split(BLOCK, 2), vs.split(BLOCK, 1))
        outputs.append(_sum_in_order(products).to(q.dtype).view(-1, groups * dim))
    out = torch.cat(outputs).index_select(0, plan.place).view(num_rows, num_heads, dim)
    return out if num_rows == len(q) // num_kv else F.pad(out, (0, 0, 0, 0, 0, len(q) // num_kv - num_rows))


@dataclass(frozen=True)
class DecodeIndex:
    """Which blocks each of B rows reads, in order: `blocks` [B, n], the block table, 0 where a row has fewer.

    The rest is for the portable kernel, which multiplies whole blocks with the queries of all their users: first the
    `num_live` lowest blocks of the pool with `num_users` users each, then the `shared` ones, which have more, with
    `num_sharing` (a group shares its prompt's). One user's queries at one block and key head are a slot of g rows.
    Indices of rows: query [slots] into q as [B x K, g x C]; score [B x K x g x n] into the products with the keys; prob
    [slots x g] back into score's order; out [n x B' x H] into the products with the values; slots without a user read
    row 0. unused [n, B', 1, 1]: places of `out` that are no block. B' is B with the padding of `padding.pad_rows`.
    """

    num_live: int
    num_users: int
    num_sharing: int
    blocks: Tensor
    shared: Tensor
    query: Tensor
    score: Tensor
    prob: Tensor
    out: Tensor
    unused: Tensor

    def to(self, device: torch.device) -> "DecodeIndex":
        """A copy on `device`."""
        fields: dict[str, Any] = {
            name: x.to(device) if isinstance(x, Tensor) else x for name, x in vars(self).items()
        }
        return DecodeIndex(**fields)


def block_table(tables: Sequence[Sequence[int]]) -> Tensor:
    """The blocks of each row, int32 [B, n], 0 where a row has fewer than n."""
    n = max(map(len, tables))
    return torch.tensor([[*blocks, *[0] * (n - len(blocks))] for blocks in tables], dtype=torch.int32)


def index_decode(
    tables: Sequence[Sequence[int]], *, num_kv: int, groups: int, min_users: int, num_padded: int
) -> DecodeIndex:
    """Plan what rows with these block tables read. A block meets at least `min_users` rows' queries; on the host."""
    rows, num_blocks, blocks = (
        len(tables),
        torch.tensor([len(blocks) for blocks in tables]),
        block_table(tables),
    )
    n = blocks.shape[1]
    used = torch.arange(n) < num_blocks[:, None]
    users = _users(blocks[used].long(), num_users=min_users)
    slot = torch.zeros(rows, n, num_kv, dtype=torch.int64)
    slot[used] = users.slots(num_kv)
    slot = torch.where(
        used[:, :, None], slot, slot[:, :1]
    )  # a row that has fewer reads its own first, not another's
    query = torch.zeros(users.num_slots * num_kv, dtype=torch.int64)
    query[slot[used]] = torch.arange(rows * num_kv).view(rows, 1, num_kv).expand(-1, n, -1)[used]
    score = slot.permute(0, 2, 1)[:, :, None] * groups + torch.arange(groups)[:, None]  # [B, K, g, n]
    is_used = used[:, None, None].expand_as(score)
    prob = torch.zeros(len(query) * groups, dtype=torch.int64)
    prob[score[is_used]] = is_used.flatten().nonzero()[:, 0]
    out = F.pad(score.permute(3, 0, 1, 2).flatten(2), (0, 0, 0, num_padded - rows)).flatten()
    unused = F.pad(~used.T[:, :, None, None], (0, 0, 0, 0, 0, num_padded - rows), value=True)
    counts = users.num_live, users.num_users, users.num_sharing
    return DecodeIndex(*counts, blocks, users.shared, query, score.flatten(), prob, out, unused)


@dataclass(frozen=True)
class _Users:
    """Places for the users of blocks: `num_users` each for the first `num_live`, `num_sharing` for the `shared` ones.

    For each entry of a block table: `start`, the places before its block's, and `place` and `width` within them.
    """

    num_live: int
    num_users: int
    num_sharing: int
    shared: Tensor
    start: Tensor
    place: Tensor
    width: Tensor

    @property
    def num_slots(self) -> int:
        return self.num_live * self.num_users + len(self.shared) * self.num_sharing

    def slots(self, num_kv: int) -> Tensor:
        """The slot of each entry at each key head [entries, K]: blocks, then key heads, then users."""
        return (self.start * num_kv + self.place)[:, None] + self.width[:, None] * torch.arange(num_kv)


def _users(block: Tensor, *, num_users: int) -> _Users:
    """Places for the entries of block tables, whose blocks are `block` [entries]."""
    counts = torch.bincount(block)
    order = block.argsort(stable=True)
    place = torch.empty_like(block)
    place[order] = torch.arange(len(block)) - (counts.cumsum(0) - counts)[block[order]]
    num_live, num_sharing, is_shared = len(counts), int(counts.max()), counts > num_users
    shared_start = num_live * num_users + (is_shared.cumsum(0) - 1) * num_sharing
    start = torch.where(is_shared, shared_start, torch.arange(num_live) * num_users)[block]
    width = torch.where(is_shared, num_sharing, num_users)[block]
    return _Users(num_live, num_users, num_sharing, is_shared.nonzero()[:, 0], start, place, width)


def decode(q: Tensor, keys: Tensor, values: Tensor, plan: DecodeIndex, mask: Tensor) -> Tensor:
    """Attention of the newest tokens q [B', H, C] over a pool's keys [S, K, C, BLOCK] and values [S, K, BLOCK, C].

    Products over the live pool block by block, without gathering keys; a softmax over each row's own blocks, under the
    additive mask [B, 1, 1, n x BLOCK].
    """
    (num_heads, dim), rows, num_kv, n = q.shape[1:], len(mask), keys.shape[1], plan.blocks.shape[1]
    groups = num_heads // num_kv
    # Blocks, and the number of queries that each of them meets
    parts: list[tuple[slice | Tensor, int]] = [(slice(0, plan.num_live), plan.num_users * groups)]
    if len(plan.shared):
        parts.append((plan.shared, plan.num_sharing * groups))
    qs = q.reshape(-1, groups * dim).index_select(0, plan.query).view(-1, dim)
    scores = _products(qs, keys, parts).index_select(0, plan.score).view(rows, num_kv, groups, n * BLOCK)
    probs = _softmax(scores, mask, dim).view(-1, BLOCK).index_select(0, plan.prob)
    out = _products(probs, values, parts).index_select(0, plan.out).view(n, -1, num_heads, dim)
    if n > 1:
        out = out.masked_fill_(plan.unused, 0)
    return _sum_in_order(out.unbind(0)).to(q.dtype)[: len(q)]


def _products(rows: Tensor, pool: Tensor, parts: Sequence[tuple[slice | Tensor, int]]) -> Tensor:
    """`rows` [.., i] times the matrices [i, j] of the parts' blocks, m rows each; results [.., j] end to end."""
    matrices = [pool[blocks].flatten(0, 1) for blocks, _ in parts]
    shares = rows.split([len(matrix) * m for matrix, (_, m) in zip(matrices, parts, strict=True)])
    products = [
        torch.bmm(x.view(-1, m, x.shape[1]), matrix).flatten(0, 1)
        for x, matrix, (_, m) in zip(shares, matrices, parts, strict=True)
    ]
    return products[0] if len(products) == 1 else torch.cat(products)


def _softmax(scores: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Softmax in fp32 of scores [..., keys] over sqrt(dim), under an additive fp32 mask; in the scores' dtype."""
    return torch.softmax(torch.add(mask, scores, alpha=1 / math.sqrt(dim)), -1).to(scores.dtype)


def _sum_in_order(parts: Iterable[Tensor]) -> Tensor:
    first, *rest = parts
    total = first.to(batch_invariance.at_least_fp32(first.dtype))
    for part in rest:
        total = total + part
    return total
