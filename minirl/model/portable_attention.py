"""The portable attention kernel: plain PyTorch operations whose results are bitwise repeatable.

Attention is a product of queries with keys, a softmax, and a product of the probabilities with values.
Keys and values are cut into key blocks of BLOCK tokens. Each product with values sums over exactly one key
block, and the results of the key blocks are added in their order in fp32. A masked key has probability 0 and
adds nothing, so it does not matter how many key blocks are multiplied. A token's output therefore has the
same bits in training, prefill and decoding (see `batch_invariance`).

An index says which queries are multiplied with which keys. It holds for all layers with the same window:
`index_packed` makes it for `attend_packed` (a stream of whole sequences), `index_decode` for `decode` (one
new token for each cached sequence). `mask_keys` makes the mask of either.

In shapes: H query heads; K key heads; g = H / K query heads that share a key head; C channels of a head;
T' tokens that the model computes (see `attention.PackedLayout`).
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model import batch_invariance

# Blocks of a pool, and the rows that are multiplied with them: equally many for each block and key head.
_BlockSet = tuple[slice | Tensor, slice]
# Tokens of a key block, and of the cache on the CPU. A masked key costs as much as another one: of sequences of 15
# tokens, an update takes 0.8 times as long as with 128, of 1,000 as long, of 4,000 in bf16 1.1 times.
BLOCK = 32
# Decoding multiplies the lowest blocks of a pool where they lie. If they are at least this many times as many as it
# reads, it copies those first.
COPY_FACTOR = 1.5
# Tokens of a query block in packed streams. A block gets the least of these sizes that holds its queries.
QUERY_BLOCK_SIZES = (16, 32, 64)
# Numbers of rows that `min_queries` tries.
PROBED_ROWS = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 96, 112, 128)


@batch_invariance.measured
def min_queries(head_dim: int, dtype: torch.dtype) -> int | None:
    """Return the least number of queries that `decode` may multiply with a key block on this machine's CPU.

    It is measured on products laid out as `decode` and `attend_packed` call them: from this number of rows on, each row
    has the same bits in all of them. None if 16 rows are too few.
    """
    num_rows = PROBED_ROWS[-1]
    q, k = batch_invariance.cancelling_operands(4, num_rows, head_dim, 2 * BLOCK, dtype)
    probs, v = batch_invariance.cancelling_operands(4, num_rows, BLOCK, head_dim, dtype)
    # The values of two key blocks, of which the second is multiplied.
    probs = F.pad(probs, (BLOCK, 0))
    v = F.pad(v.transpose(1, 2), (0, 0, BLOCK, 0))
    varying = [rows for rows in PROBED_ROWS if not _rows_match_bitwise(q, k, probs, v, rows)]
    most_varying = max(varying, default=0)
    return next((rows for rows in (1, 2, 4, 8, 16) if rows > most_varying), None)


def _rows_match_bitwise(
    q: Tensor,
    k: Tensor,
    probs: Tensor,
    v: Tensor,
    num_rows: int,
) -> bool:
    """Return whether products of `num_rows` rows have the bits of those of all rows, for 1, 2 and n matrices.

    q [n, R, C] is multiplied with k, and probs [n, R, 2 x BLOCK] with the second block of v; k and v [n, 2 x BLOCK, C].
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    out = torch.bmm(probs[..., BLOCK:], v[:, BLOCK:])
    # The cache stores a key block as [C, BLOCK], while a packed stream multiplies a transposed view.
    cached_k = k[:, BLOCK:].transpose(1, 2).contiguous()
    cached_v = v[:, BLOCK:].contiguous()
    for n in (1, 2, len(q)):
        for start in range(0, q.shape[1] - num_rows + 1, num_rows):
            rows = slice(start, start + num_rows)
            some_q, some_probs = q[:n, rows].contiguous(), probs[:n, rows].contiguous()
            # Two factors, and where their product is among those of all rows.
            products = [
                (some_q, cached_k[:n], scores[..., BLOCK:]),
                (some_probs[..., BLOCK:].contiguous(), cached_v[:n], out),
            ]
            if num_rows >= QUERY_BLOCK_SIZES[0]:
                products.append((some_q, k[:n].transpose(1, 2), scores))
                products.append((some_probs[..., BLOCK:], v[:n, BLOCK:], out))
            if not all(torch.equal(torch.bmm(x, y), expected[:n, rows]) for x, y, expected in products):
                return False
    return True


class _QueryBlocks(NamedTuple):
    """n query blocks of R queries each that see the same number of key blocks: one batched product.

    queries int64 [n x K x R]: the block's queries, as rows of q [T' x K, g x C].
    keys int64 [n x K x key blocks x BLOCK]: the keys that they see, as rows of k and of v [T' x K, C].
    mask fp32 [n, 1, R, 1, key blocks x BLOCK]: 0 where a query sees a key, else -inf; added to the scores.

    Where a sequence has no such query or key, the index names another one of the same sequence.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor


class PackedIndex(NamedTuple):
    """Which queries and keys of a stream `attend_packed` multiplies with each other.

    output_index int64 [T' x K]: where each row of q [T' x K, g x C] is among the queries of all query blocks.
    """

    query_blocks: list[_QueryBlocks]
    output_index: Tensor


class _QuerySpan(NamedTuple):
    """A query block of one sequence. Positions count from the start of the sequence."""

    stream_start: int  # where the sequence starts in the stream
    first_query: int  # position
    end: int  # position after the last query, and after the newest key that it sees
    first_key: int  # position where the oldest key block starts that the first query sees


def index_packed(
    lengths: Iterable[int],
    num_shared: Iterable[int],
    hidden_index: Tensor,
    *,
    window: int | None,
    num_kv_heads: int,
) -> PackedIndex:
    """Index attention over a stream of sequences of these lengths.

    num_shared: how many tokens at the start of each sequence have no queries here, because the model computes them as
    part of an earlier sequence.
    hidden_index int64 [T]: where each token of the stream is among the model's hidden states.

    Example: sequences of 64 and 72 tokens, K = 1, no window. Their query blocks are

        queries                         R    key blocks              outputs
        first 0..63                     64   0, 1 (keys 0..63)       0..63
        second 0..63                    64   0, 1                    64..127
        second 64..71 (71 repeated)     16   0, 1, 2 (keys 0..95)    128..143

    The first two have the same shape and are one `_QueryBlocks` with n = 2. Keys 72..95 do not exist: the
    index names key 0 instead, and the mask hides it. `output_index` is 0..135, which leaves out the outputs
    of the repeated query.
    """
    device = hidden_index.device
    hidden_index = hidden_index.cpu()
    query_blocks: list[_QueryBlocks] = []
    for (num_key_blocks, num_queries), spans in _query_spans(lengths, num_shared, window).items():
        # One number for each query block: each of the four is [n, 1].
        stream_start, first_query, end, first_key = torch.tensor(spans).T.unsqueeze(2)
        query = first_query + torch.arange(num_queries)  # [n, R]
        # Beyond the end, repeat the last query: the softmax of a query that sees no key would be NaN.
        query = query.minimum(end - 1)

        key = first_key + torch.arange(num_key_blocks * BLOCK)  # [n, keys]
        mask = mask_keys(key[:, None], query[:, :, None], window)  # [n, R, keys]
        # Beyond the end, name the sequence's first key. Another sequence's key could hold NaN, and masked
        # keys are still multiplied.
        key = key.where(key < end, 0)

        hidden_queries = hidden_index[stream_start + query]
        hidden_keys = hidden_index[stream_start + key]
        blocks = _QueryBlocks(
            queries=_head_rows(hidden_queries, num_kv_heads).to(device),
            keys=_head_rows(hidden_keys, num_kv_heads).to(device),
            mask=mask[:, None, :, None].to(device),
        )
        query_blocks.append(blocks)
    # The outputs are in the order of the queries, and the first output of a repeated query is its own.
    queries = torch.cat([blocks.queries for blocks in query_blocks])
    _, output_index = np.unique(queries.cpu(), return_index=True)
    return PackedIndex(query_blocks, torch.from_numpy(output_index).to(device))


def _query_spans(
    lengths: Iterable[int],
    num_shared: Iterable[int],
    window: int | None,
) -> dict[tuple[int, int], list[_QuerySpan]]:
    """Cut sequences into query blocks, by their shape: the number of key blocks, and R."""
    spans: dict[tuple[int, int], list[_QuerySpan]] = {}
    max_queries = QUERY_BLOCK_SIZES[-1]
    stream_start = 0
    for length, shared in zip(lengths, num_shared, strict=True):
        for first_query in range(shared, length, max_queries):
            end = min(first_query + max_queries, length)
            num_queries = next(size for size in QUERY_BLOCK_SIZES if size >= end - first_query)
            first_key = 0
            if window is not None:
                oldest_key = max(0, first_query - window + 1)
                first_key = oldest_key // BLOCK * BLOCK
            num_key_blocks = -(-(end - first_key) // BLOCK)  # rounded up
            span = _QuerySpan(stream_start, first_query, end, first_key)
            spans.setdefault((num_key_blocks, num_queries), []).append(span)
        stream_start += length
    return spans


def _head_rows(hidden_index: Tensor, num_kv_heads: int) -> Tensor:
    """Return the rows of a matrix [T' x K, ...] for hidden indices [n, m] at each key head: [n x K x m].

    Row t x K + h belongs to head h of token t.
    """
    head = torch.arange(num_kv_heads)[:, None]
    rows = hidden_index[:, None] * num_kv_heads + head  # [n, K, m]
    return rows.flatten()


def mask_keys(
    key: Tensor,
    query: Tensor,
    window: int | None,
) -> Tensor:
    """Return fp32 0 where a query sees a key, else -inf. The positions of both, int64, are broadcast to one shape."""
    is_hidden = key > query
    if window is not None:
        is_hidden |= key <= query - window
    return torch.zeros(is_hidden.shape).masked_fill(is_hidden, -torch.inf)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: PackedIndex,
) -> Tensor:
    """Causal attention of q [T', H, C] over k and v [T', K, C] -> [T', H, C]."""
    shape = q.shape
    num_kv_heads, dim = k.shape[1:]
    groups = shape[1] // num_kv_heads
    q = q.reshape(-1, groups * dim)
    k = k.reshape(-1, dim)
    v = v.reshape(-1, dim)
    outputs = []
    for blocks in index.query_blocks:
        n, _, num_queries, _, num_keys = blocks.mask.shape
        num_rows = num_queries * groups
        block_q = q.index_select(0, blocks.queries).view(-1, num_rows, dim)
        block_k = k.index_select(0, blocks.keys).view(-1, num_keys, dim)
        block_v = v.index_select(0, blocks.keys).view(-1, num_keys, dim)
        scores = batch_invariance.bmm(block_q, block_k.transpose(1, 2))
        scores = scores.view(n, num_kv_heads, num_queries, groups, num_keys)
        probs = _softmax(scores, blocks.mask, dim).view(-1, num_rows, num_keys)
        # One product for each key block.
        products = map(batch_invariance.bmm, probs.split(BLOCK, 2), block_v.split(BLOCK, 1))
        block_out = _sum_in_order(products).to(q.dtype)
        outputs.append(block_out.view(-1, groups * dim))
    return torch.cat(outputs).index_select(0, index.output_index).view(shape)


class DecodeIndex(NamedTuple):
    """Which blocks of a cache pool each of B requests reads in a decode step, in all layers with the same window.

    A request reads up to n blocks, its entries: those of its block table from the first one that its token sees.
    keys int64 [B, n x BLOCK]: the position of each key in them, in the request's sequence.
    unused_entries bool [B, 1, n, 1]: entries beyond the last block of a request. Their results are set to 0.

    The portable kernel multiplies each block once, with the queries of all requests that read it, its users. Each user
    has a slot at each key head, for the g query heads that share this key head: g rows of the products. All blocks of
    one batched product must have equally many slots, so there are up to two `block_sets`, each with its rows:

    - The live blocks have `min_users` slots each at every key head: all blocks of the pool up to the highest one that
      is read, which are multiplied where they lie; or, if most of these are not read, only those that are (int64),
      which are copied.
    - Blocks with more users (a group shares the full blocks of its prompt) come again after the live blocks (int64),
      with a slot for each of the most users of a block; their first slots stay empty.

    Slots are ordered by block, then key head, then user. The kernel gathers rows by these int64 indices:

    query [slots x g]: the query heads of each slot, as rows of q [B x H, C].
    score [B x H x n]: where each query head and entry finds its scores, as a row of the products with keys
        [slots x g, BLOCK], and its result, as a row of the products with values [slots x g, C].
    prob [slots x g]: the inverse of `score`, as a row of the probabilities [B x H x n, BLOCK].

    Empty slots read row 0, and nothing reads their results.

    Example: three requests, two of one prompt whose first block is full; K = 1, g = 2, min_users = 1.

        block tables   request 0: [0, 1]   request 1: [0, 3]   request 2: [2]
        block_sets     blocks 0 to 3, rows 0 to 7; and because block 0 has two users: block 0, rows 8 to 11
        slot           0         1          2          3          4          5
        block          0         1          2          3          0          0
        user           none      request 0  request 2  request 1  request 0  request 1
        query          0, 0      0, 1       4, 5       2, 3       0, 1       2, 3

    Request 1 reads block 0 in slot 5 and block 3 in slot 3. Its query heads 0 and 1 are the rows 2 x slot and
    2 x slot + 1 of the products, so `score` is [10, 6] for head 0 and [11, 7] for head 1.
    """

    block_sets: Sequence[_BlockSet]
    keys: Tensor
    unused_entries: Tensor
    query: Tensor
    score: Tensor
    prob: Tensor


def index_decode(
    tables: np.ndarray,
    *,
    window: int | None,
    num_kv_heads: int,
    groups: int,
    min_users: int,
) -> DecodeIndex:
    """Index a decode step of requests with these block tables, on the CPU.

    tables int32 [B, columns]: -1 beyond the last block of a request, which has its token.
    groups: query heads per key head.
    min_users: slots of each live block at each key head. Products of fewer queries could round differently
    (see `min_queries`).
    """
    num_blocks = (tables >= 0).sum(1)
    first_block = np.zeros_like(num_blocks)
    if window is not None:
        # The oldest key is that which the first token of the last block sees.
        oldest_key = (num_blocks - 1) * BLOCK - window + 1
        first_block = oldest_key.clip(min=0) // BLOCK
    num_entries = num_blocks - first_block
    column = np.arange(num_entries.max())  # [n]
    is_used = column < num_entries[:, None]  # [B, n]
    # Of each of the E used entries, the requests end to end.
    request, column_of_entry = is_used.nonzero()
    block = tables[request, first_block[request] + column_of_entry]

    block_sets, slot = _assign_slots(block, num_kv_heads, groups, min_users)

    # Beyond its last block, a request reads this one again. Another request's block could hold NaN, and NaN plus the
    # mask's -inf is NaN.
    first_entry = num_entries.cumsum() - num_entries
    column_of_own = np.minimum(column, num_entries[:, None] - 1)
    entry = first_entry[:, None] + column_of_own  # [B, n]
    # A slot is g rows of the products, one for each query head that shares the key head.
    first_row = slot[entry].transpose(0, 2, 1) * groups  # [B, K, n]
    score = first_row[:, :, None] + np.arange(groups)[:, None]  # [B, K, g, n]
    is_score = np.broadcast_to(is_used[:, None, None], score.shape)
    prob = np.zeros(block_sets[-1][1].stop, np.int64)
    prob[score[is_score]] = is_score.ravel().nonzero()[0]
    first_key = first_block[:, None] * BLOCK
    keys = first_key + np.arange(len(column) * BLOCK)
    return DecodeIndex(
        block_sets=block_sets,
        keys=torch.from_numpy(keys),
        unused_entries=torch.from_numpy(~is_used)[:, None, :, None],
        query=torch.from_numpy(prob // len(column)),
        score=torch.from_numpy(score.ravel()),
        prob=torch.from_numpy(prob),
    )


def _assign_slots(
    block: np.ndarray,
    num_kv_heads: int,
    groups: int,
    min_users: int,
) -> tuple[list[_BlockSet], np.ndarray]:
    """Return the block sets of a decode step, and the slot of each entry at each key head, int64 [E, K].

    block int32 [E]: the block of each entry, the requests end to end.
    """
    num_users = np.bincount(block)
    live = np.arange(len(num_users))
    live_index = block
    live_blocks: slice | Tensor = slice(0, len(live))
    read = num_users.nonzero()[0]
    if len(live) >= COPY_FACTOR * len(read):
        live = read
        live_index = np.searchsorted(live, block)
        live_blocks = torch.from_numpy(live)
        num_users = num_users[live]

    head = np.arange(num_kv_heads)
    # With at most `min_users` users, the slots of a block are its own at each key head.
    slot = (live_index[:, None] * num_kv_heads + head) * min_users
    num_slots = len(live) * num_kv_heads * min_users
    block_sets: list[_BlockSet] = [(live_blocks, slice(0, num_slots * groups))]
    most_users = int(num_users.max())
    if most_users > min_users:
        shared = (num_users > min_users).nonzero()[0]
        is_shared = num_users[live_index] > min_users
        shared_index = np.searchsorted(shared, live_index[is_shared])
        slot[is_shared] = num_slots + (shared_index[:, None] * num_kv_heads + head) * most_users
        end = num_slots + len(shared) * num_kv_heads * most_users
        block_sets.append((torch.from_numpy(live[shared]), slice(num_slots * groups, end * groups)))
    if most_users > 1:
        # Number the users of each block 0, 1, ... in the order of the entries. Once the entries are sorted by
        # block, that is an entry's position less the number of entries of lower blocks.
        order = live_index.argsort(kind="stable")
        num_lower = num_users.cumsum() - num_users
        user = np.arange(len(order)) - num_lower.repeat(num_users)
        slot[order] += user[:, None]
    return block_sets, slot


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    index: DecodeIndex,
    mask: Tensor,
) -> Tensor:
    """Attention of the newest tokens q [B, H, C] over a pool -> [B, H, C].

    keys [S, K, C, BLOCK] and values [S, K, BLOCK, C]: the pool of S blocks.
    mask fp32 [B, 1, n x BLOCK]: 0 where a request sees the key, else -inf; added to the scores.
    Each block is multiplied for all its users at once. The softmax is over each request's own blocks.
    """
    num_requests, num_heads, dim = q.shape
    # From requests to slots, multiply, and back to requests; twice. The shapes are in `DecodeIndex`.
    slot_q = q.reshape(-1, dim).index_select(0, index.query)
    slot_scores = _multiply_blocks(slot_q, keys, index.block_sets)
    scores = slot_scores.index_select(0, index.score).view(num_requests, num_heads, -1)
    probs = _softmax(scores, mask, dim)
    slot_probs = probs.view(-1, BLOCK).index_select(0, index.prob)
    slot_out = _multiply_blocks(slot_probs, values, index.block_sets)
    out = slot_out.index_select(0, index.score).view(num_requests, num_heads, -1, dim)
    if out.shape[2] > 1:
        # Entries without a block have the result of the last block, which must not count twice.
        out = out.masked_fill_(index.unused_entries, 0)
    return _sum_in_order(out.unbind(2)).to(q.dtype)


def _multiply_blocks(
    rows: Tensor,
    pool: Tensor,
    block_sets: Sequence[_BlockSet],
) -> Tensor:
    """Multiply rows [slots x g, i] with the matrices [i, j] of their blocks in the pool [S, K, i, j].

    Rows are in the order of the sets, their blocks and key heads. Returns [slots x g, j].
    """
    products = []
    for blocks, part in block_sets:
        matrices = pool[blocks].flatten(0, 1)  # [blocks x K, i, j]
        factors = rows[part].view(len(matrices), -1, rows.shape[1])
        products.append(batch_invariance.bmm(factors, matrices).flatten(0, 1))
    return products[0] if len(products) == 1 else torch.cat(products)


def _softmax(scores: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Softmax of scores [..., keys] / sqrt(dim) + mask in fp32, rounded to the scores' dtype."""
    masked_scores = torch.add(mask, scores, alpha=1 / math.sqrt(dim))
    return torch.softmax(masked_scores, -1).to(scores.dtype)


def _sum_in_order(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors one after another in fp32 (fp64 for fp64)."""
    first, *rest = parts
    total = first.to(batch_invariance.at_least_fp32(first.dtype))
    for part in rest:
        total = total + part
    return total
