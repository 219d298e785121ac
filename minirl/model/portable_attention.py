"""The portable attention kernel: plain PyTorch operations with bitwise reproducible results.

Attention multiplies queries by keys, takes the softmax, and multiplies the probabilities by values. Keys and values are
split into key blocks of BLOCK tokens. Each matmul with values sums over exactly one key block, and the results of all
key blocks are added in order in fp32. A masked key has probability 0 and adds nothing, so including additional key
blocks changes nothing. A token's output is therefore bitwise identical in training, prefill and decoding (see
`batch_invariance`).

An index specifies which queries to multiply by which keys, and serves all layers with the same window.
`build_packed_index` builds the index for `attend_packed` (packed whole sequences), and `build_decode_index` builds the
index for `decode` (one new token per cached sequence). `additive_causal_mask` builds the mask for both kernels.

Shapes: H query heads; K key/value (KV) heads; g = H / K query heads per KV head; C channels per head; T' computed
tokens (see `attention.PackedLayout`).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model import batch_invariance

# An `attention.Sequence`: the length, the parent, and the number of tokens shared with the parent.
_PackedSequence = tuple[int, int | None, int]
# Blocks of a pool, and the rows to multiply by these blocks. Every (block, KV head) pair has the same number of rows.
_BlockSet = tuple[slice | Tensor, slice]
# Number of tokens per key block, and per cache block on the CPU. Masked keys cost as much as visible keys, so short
# sequences favor small blocks. Time of a bf16 update relative to blocks of 128 tokens: 0.8x for sequences of 15 tokens,
# 1x for 1,000 tokens, 1.1x for 4,000 tokens.
BLOCK = 32
# Decoding runs its matmuls directly on the pool, without copying, over all blocks up to the highest block that is read.
# If at most 1 / COPY_FACTOR of these blocks are read, decoding instead copies the blocks that are read and runs the
# matmuls on the copies.
COPY_FACTOR = 1.5
# Query block sizes, in tokens, for packed sequences. Each block has the smallest size that fits its queries.
QUERY_BLOCK_SIZES = (16, 32, 64)
# Row counts that `min_invariant_queries` tries.
PROBED_ROWS = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 96, 112, 128)


@batch_invariance.cache_measurement
def min_invariant_queries(head_dim: int, dtype: torch.dtype) -> int | None:
    """Return the smallest number of queries that `decode` may multiply by a key block on this machine's CPU.

    The number is determined empirically: with at least this many rows, each row is bitwise identical across all matmuls
    laid out as in `decode` and `attend_packed`. Return None if 16 rows are too few.
    """
    max_probed_rows = PROBED_ROWS[-1]
    q, k = batch_invariance.make_cancelling_operands(4, max_probed_rows, head_dim, 2 * BLOCK, dtype)
    probs, v = batch_invariance.make_cancelling_operands(4, max_probed_rows, BLOCK, head_dim, dtype)
    # Probabilities and values span two key blocks, but only the second block takes part in the matmul.
    probs = F.pad(probs, (BLOCK, 0))
    v = F.pad(v.transpose(1, 2), (0, 0, BLOCK, 0))
    mismatched_row_counts = [rows for rows in PROBED_ROWS if not _rows_match_bitwise(q, k, probs, v, rows)]
    max_mismatched_rows = max(mismatched_row_counts, default=0)
    return next((rows for rows in (1, 2, 4, 8, 16) if rows > max_mismatched_rows), None)


def _rows_match_bitwise(
    q: Tensor,
    k: Tensor,
    probs: Tensor,
    v: Tensor,
    num_rows: int,
) -> bool:
    """Return whether matmuls of `num_rows` rows match the full matmuls bitwise, for batches of 1, 2 and n matrices.

    Multiplies q [n, R, C] by k, and probs [n, R, 2 x BLOCK] by the second block of v; k and v are [n, 2 x BLOCK, C].
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    out = torch.bmm(probs[..., BLOCK:], v[:, BLOCK:])
    # The cache stores a key block as [C, BLOCK], whereas packed keys [keys, C] are passed to the matmul as a transposed
    # view.
    cached_k = k[:, BLOCK:].transpose(1, 2).contiguous()
    cached_v = v[:, BLOCK:].contiguous()
    for n in (1, 2, len(q)):
        for start in range(0, q.shape[1] - num_rows + 1, num_rows):
            rows = slice(start, start + num_rows)
            row_q, row_probs = q[:n, rows].contiguous(), probs[:n, rows].contiguous()
            # The operands of each matmul, and the full product whose rows the result should match.
            matmul_cases = [
                (row_q, cached_k[:n], scores[..., BLOCK:]),
                (row_probs[..., BLOCK:].contiguous(), cached_v[:n], out),
            ]
            if num_rows >= QUERY_BLOCK_SIZES[0]:
                matmul_cases.append((row_q, k[:n].transpose(1, 2), scores))
                matmul_cases.append((row_probs[..., BLOCK:], v[:n, BLOCK:], out))
            if not all(torch.equal(torch.bmm(x, y), expected[:n, rows]) for x, y, expected in matmul_cases):
                return False
    return True


class _QueryBlocks(NamedTuple):
    """n query blocks of R queries that attend to the same number of key blocks, multiplied as one batched matmul.

    queries int64 [n x K x R]: the queries, as rows of q [T' x K, g x C].
    keys int64 [n x K x key blocks x BLOCK]: the keys that these queries attend to, as rows of k and v [T' x K, C].
    mask fp32 [n, 1, R, 1, key blocks x BLOCK]: added to the scores; 0 where a query attends to a key, -inf elsewhere.

    Past the end of a sequence, `queries` and `keys` repeat another query or key of the same sequence.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor


class PackedIndex(NamedTuple):
    """The queries and keys of packed sequences, grouped into the query blocks that `attend_packed` multiplies.

    output_index int64 [T' x K]: index of each row of q [T' x K, g x C] in the concatenated query blocks.
    """

    query_blocks: list[_QueryBlocks]
    output_index: Tensor


class _QuerySpan(NamedTuple):
    """One query block of a sequence. Positions are relative to the start of the sequence."""

    sequence_start: int  # index of the sequence's first token among the packed tokens
    first_query: int  # position of the first query
    end: int  # position after the last query; the last query's token is the newest visible key
    first_key: int  # start position of the oldest key block that the first query attends to


def build_packed_index(layout: Any, window: int | None, num_kv_heads: int) -> PackedIndex:
    """Build the index for attention over packed sequences.

    layout: the sequences' `attention.PackedLayout`, untyped because importing the type would close an import cycle.

    Tokens that a sequence shares with its parent have no queries in that sequence, because the model processes these
    tokens as part of the parent.

    Example: sequences of 64 and 72 tokens, K = 1, no window. Their query blocks are

        queries                         R    key blocks              outputs
        first 0..63                     64   0, 1 (keys 0..63)       0..63
        second 0..63                    64   0, 1                    64..127
        second 64..71 (71 repeated)     16   0, 1, 2 (keys 0..95)    128..143

    The first two query blocks have the same shape and form one `_QueryBlocks` with n = 2. Keys 72..95 do not exist, so
    the index repeats key 0, which the mask hides. `output_index` is 0..135, so the outputs of the repeated query are
    skipped.
    """
    device = layout.hidden_index.device
    hidden_index = layout.hidden_index.cpu()
    query_blocks: list[_QueryBlocks] = []
    for (num_key_blocks, num_queries), spans in _query_spans(layout.sequences, window).items():
        # Each of these four tensors is [n, 1]: one number per query block.
        sequence_start, first_query, end, first_key = torch.tensor(spans).T.unsqueeze(2)
        query = first_query + torch.arange(num_queries)  # [n, R]
        # Beyond the end of a sequence, repeat the last query, because the softmax of a query without keys would be NaN.
        query = query.minimum(end - 1)

        key_positions = first_key + torch.arange(num_key_blocks * BLOCK)  # [n, keys]
        mask = additive_causal_mask(key_positions[:, None], query[:, :, None], window)  # [n, R, keys]
        # Beyond the end of a sequence, use the sequence's first key. Another sequence's key could be NaN, and masked
        # keys are still multiplied.
        key_positions = key_positions.where(key_positions < end, 0)

        query_hidden_index = hidden_index[sequence_start + query]
        key_hidden_index = hidden_index[sequence_start + key_positions]
        block_batch = _QueryBlocks(
            queries=_kv_head_rows(query_hidden_index, num_kv_heads).to(device),
            keys=_kv_head_rows(key_hidden_index, num_kv_heads).to(device),
            mask=mask[:, None, :, None].to(device),
        )
        query_blocks.append(block_batch)
    # Outputs have the same order as the queries, and only the first output of a repeated query is used.
    queries = torch.cat([block_batch.queries for block_batch in query_blocks])
    _, output_index = np.unique(queries.cpu(), return_index=True)
    return PackedIndex(query_blocks, torch.from_numpy(output_index).to(device))


def _query_spans(
    sequences: Iterable[_PackedSequence], window: int | None
) -> dict[tuple[int, int], list[_QuerySpan]]:
    """Split sequences into query blocks, grouped by shape: the number of key blocks and the number of queries R."""
    spans: dict[tuple[int, int], list[_QuerySpan]] = {}
    max_queries = QUERY_BLOCK_SIZES[-1]
    sequence_start = 0
    for length, _, num_shared_tokens in sequences:
        for first_query in range(num_shared_tokens, length, max_queries):
            end = min(first_query + max_queries, length)
            num_queries = next(size for size in QUERY_BLOCK_SIZES if size >= end - first_query)
            first_key = 0
            if window is not None:
                oldest_key = max(0, first_query - window + 1)
                first_key = oldest_key // BLOCK * BLOCK
            num_key_blocks = -(-(end - first_key) // BLOCK)  # rounded up
            span = _QuerySpan(sequence_start, first_query, end, first_key)
            spans.setdefault((num_key_blocks, num_queries), []).append(span)
        sequence_start += length
    return spans


def _kv_head_rows(hidden_index: Tensor, num_kv_heads: int) -> Tensor:
    """Return the rows of a matrix [T' x K, ...] for the hidden states at indices [n, m] and all KV heads, as [n x K x
    m].

    Row t x K + h belongs to KV head h of token t.
    """
    kv_head = torch.arange(num_kv_heads)[:, None]
    rows = hidden_index[:, None] * num_kv_heads + kv_head  # [n, K, m]
    return rows.flatten()


def additive_causal_mask(
    key: Tensor,
    query: Tensor,
    window: int | None,
) -> Tensor:
    """Return a mask, fp32: 0 where a query attends to a key, -inf elsewhere.

    The int64 position tensors `key` and `query` are broadcast against each other.
    """
    is_masked = key > query
    if window is not None:
        is_masked |= key <= query - window
    return torch.zeros(is_masked.shape).masked_fill(is_masked, -torch.inf)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: PackedIndex,
) -> Tensor:
    """Compute causal attention of q [T', H, C] over k and v [T', K, C] -> [T', H, C]."""
    q_shape = q.shape
    num_kv_heads, dim = k.shape[1:]
    num_queries_per_kv = q_shape[1] // num_kv_heads
    q = q.reshape(-1, num_queries_per_kv * dim)
    k = k.reshape(-1, dim)
    v = v.reshape(-1, dim)
    outputs = []
    for blocks in index.query_blocks:
        n, _, num_queries, _, num_keys = blocks.mask.shape
        num_rows = num_queries * num_queries_per_kv
        block_q = q.index_select(0, blocks.queries).view(-1, num_rows, dim)
        block_k = k.index_select(0, blocks.keys).view(-1, num_keys, dim)
        block_v = v.index_select(0, blocks.keys).view(-1, num_keys, dim)
        scores = batch_invariance.bmm(block_q, block_k.transpose(1, 2))
        scores = scores.view(n, num_kv_heads, num_queries, num_queries_per_kv, num_keys)
        probs = _softmax(scores, blocks.mask, dim).view(-1, num_rows, num_keys)
        # One matmul per key block.
        partial_outputs = map(batch_invariance.bmm, probs.split(BLOCK, 2), block_v.split(BLOCK, 1))
        block_out = _sum_in_order(partial_outputs).to(q.dtype)
        outputs.append(block_out.view(-1, num_queries_per_kv * dim))
    return torch.cat(outputs).index_select(0, index.output_index).view(q_shape)


class DecodeIndex(NamedTuple):
    """The blocks of a cache pool that each of B requests reads in a decode step, for all layers with the same window.

    A request has up to n entries: the blocks in its block table, starting with the block of the oldest key that a token
    in the last block can attend to.
    key_positions int64 [B, n x BLOCK]: the position of each entry's keys in the request's sequence.
    is_unused_entry bool [B, 1, n, 1]: entries beyond a request's last block, whose results are set to 0.

    The portable kernel multiplies each block once, for all requests that read the block (its readers).
    Each reader has one slot per KV head. A slot contains the g query heads that share the KV head, one matmul row each.
    All blocks of a batched matmul must have the same number of slots, so there are up to two `block_sets`:

    - Each live block has `min_readers` slots per KV head. Normally, the live blocks are all blocks of the pool up to
      the highest block that is read, and they are multiplied without being copied. If requests read only a few of these
      blocks, those few are copied, and the live blocks are the copies (ids int64).
    - Blocks with more than `min_readers` readers, such as the full blocks of a group's prompt, are listed a second
      time, after the live blocks (ids int64). Every such entry has as many slots per KV head as the most-shared block
      needs. These blocks' slots in the list of live blocks stay empty.

    Slots are ordered by block, then KV head, then reader. The kernel gathers rows with these int64 indices:

    query_rows [slots x g]: the query heads of each slot, as rows of q [B x H, C].
    score_rows [B x H x n]: for each query head and entry, the row of the scores in the key products [slots x g, BLOCK],
        which is also the row of the results in the value products [slots x g, C].
    prob_rows [slots x g]: the inverse of `score_rows`, as rows of the probabilities [B x H x n, BLOCK].

    Empty slots read row 0, and their results are never read.

    Example: three requests, two of which share a prompt whose first block is full; K = 1, g = 2, min_readers = 1.

        block tables   request 0: [0, 1]   request 1: [0, 3]   request 2: [2]
        block_sets     blocks 0 to 3, rows 0 to 7; block 0 again, which has two readers, rows 8 to 11
        slot           0         1          2          3          4          5
        block          0         1          2          3          0          0
        reader         none      request 0  request 2  request 1  request 0  request 1
        query          0, 0      0, 1       4, 5       2, 3       0, 1       2, 3

    Request 1 reads block 0 in slot 5 and block 3 in slot 3. Query heads 0 and 1 of a slot are rows 2 x slot and 2 x
    slot + 1 of the products, so `score_rows` is [10, 6] for head 0 of request 1 and [11, 7] for head 1.
    """

    block_sets: Sequence[_BlockSet]
    key_positions: Tensor
    is_unused_entry: Tensor
    query_rows: Tensor
    score_rows: Tensor
    prob_rows: Tensor


def build_decode_index(
    tables: np.ndarray,
    *,
    window: int | None,
    num_kv_heads: int,
    num_queries_per_kv: int,
    min_readers: int,
) -> DecodeIndex:
    """Build the index for one decode step from the requests' block tables, on the CPU.

    tables int32 [B, columns]: block tables; entries past the block of a request's newest token are -1.
    num_queries_per_kv: number of query heads per KV head.
    min_readers: number of slots per live block and KV head. Matmuls with fewer queries could round differently (see
    `min_invariant_queries`).
    """
    num_blocks = (tables >= 0).sum(1)
    first_attended_block = np.zeros_like(num_blocks)
    if window is not None:
        # The oldest key that the first token of the last block attends to.
        oldest_key = (num_blocks - 1) * BLOCK - window + 1
        first_attended_block = oldest_key.clip(min=0) // BLOCK
    num_attended_blocks = num_blocks - first_attended_block
    relative_block_index = np.arange(num_attended_blocks.max())  # [n]
    is_used = relative_block_index < num_attended_blocks[:, None]  # [B, n]
    # One value per used entry (E), ordered by request.
    request, entry_column = is_used.nonzero()
    entry_blocks = tables[request, first_attended_block[request] + entry_column]

    block_sets, slot = _assign_slots(entry_blocks, num_kv_heads, num_queries_per_kv, min_readers)

    # Entries past a request's last block point to that last block again. Another request's block could contain NaN, and
    # NaN plus the -inf of the mask is NaN.
    request_starts = num_attended_blocks.cumsum() - num_attended_blocks
    clamped_column = np.minimum(relative_block_index, num_attended_blocks[:, None] - 1)
    entry_index = request_starts[:, None] + clamped_column  # [B, n]
    # A slot holds g rows of the products, one per query head that shares the KV head.
    first_row = slot[entry_index].transpose(0, 2, 1) * num_queries_per_kv  # [B, K, n]
    score = first_row[:, :, None] + np.arange(num_queries_per_kv)[:, None]  # [B, K, g, n]
    is_used_score = np.broadcast_to(is_used[:, None, None], score.shape)
    prob = np.zeros(block_sets[-1][1].stop, np.int64)
    prob[score[is_used_score]] = is_used_score.ravel().nonzero()[0]
    first_key = first_attended_block[:, None] * BLOCK
    keys = first_key + np.arange(len(relative_block_index) * BLOCK)
    return DecodeIndex(
        block_sets=block_sets,
        key_positions=torch.from_numpy(keys),
        is_unused_entry=torch.from_numpy(~is_used)[:, None, :, None],
        query_rows=torch.from_numpy(prob // len(relative_block_index)),
        score_rows=torch.from_numpy(score.ravel()),
        prob_rows=torch.from_numpy(prob),
    )


def _assign_slots(
    block: np.ndarray,
    num_kv_heads: int,
    num_queries_per_kv: int,
    min_readers: int,
) -> tuple[list[_BlockSet], np.ndarray]:
    """Return the block sets of a decode step, and each entry's slot for each KV head, int64 [E, K].

    block int32 [E]: each entry's block, ordered by request.
    """
    readers_per_block = np.bincount(block)
    live_block_ids = np.arange(len(readers_per_block))
    live_block_index = block
    live_blocks: slice | Tensor = slice(0, len(live_block_ids))
    read_block_ids = readers_per_block.nonzero()[0]
    if len(live_block_ids) >= COPY_FACTOR * len(read_block_ids):
        live_block_ids = read_block_ids
        live_block_index = np.searchsorted(live_block_ids, block)
        live_blocks = torch.from_numpy(live_block_ids)
        readers_per_block = readers_per_block[live_block_ids]

    head = np.arange(num_kv_heads)
    # A block with at most `min_readers` readers keeps its slots among the live blocks.
    slot = (live_block_index[:, None] * num_kv_heads + head) * min_readers
    num_live_slots = len(live_block_ids) * num_kv_heads * min_readers
    block_sets: list[_BlockSet] = [(live_blocks, slice(0, num_live_slots * num_queries_per_kv))]
    max_readers = int(readers_per_block.max())
    if max_readers > min_readers:
        shared_block_index = (readers_per_block > min_readers).nonzero()[0]
        reads_shared_block = readers_per_block[live_block_index] > min_readers
        shared_index = np.searchsorted(shared_block_index, live_block_index[reads_shared_block])
        slot[reads_shared_block] = (
            num_live_slots + (shared_index[:, None] * num_kv_heads + head) * max_readers
        )
        end = num_live_slots + len(shared_block_index) * num_kv_heads * max_readers
        block_sets.append(
            (
                torch.from_numpy(live_block_ids[shared_block_index]),
                slice(num_live_slots * num_queries_per_kv, end * num_queries_per_kv),
            )
        )
    if max_readers > 1:
        # Number the readers of each block 0, 1, ... in the order of the entries: sort the entries by block, and
        # subtract the number of entries for lower blocks from each entry's index.
        entries_by_block = live_block_index.argsort(kind="stable")
        num_preceding_entries = readers_per_block.cumsum() - readers_per_block
        reader_index = np.arange(len(entries_by_block)) - num_preceding_entries.repeat(readers_per_block)
        slot[entries_by_block] += reader_index[:, None]
    return block_sets, slot


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    index: DecodeIndex,
    mask: Tensor,
) -> Tensor:
    """Compute attention of the newest tokens q [B, H, C] over a pool -> [B, H, C].

    keys [S, K, C, BLOCK] and values [S, K, BLOCK, C]: the pool of S blocks.
    mask fp32 [B, 1, n x BLOCK]: added to the scores; 0 where a request attends to a key, -inf elsewhere.
    Each block is multiplied once for all sequences that share it. The softmax covers each request's own blocks.
    """
    num_requests, num_heads, dim = q.shape
    # Gather request rows into slots, multiply, and gather the results back, first for keys, then for values (see
    # `DecodeIndex`).
    q_per_block = q.reshape(-1, dim).index_select(0, index.query_rows)
    scores_per_block = _multiply_blocks(q_per_block, keys, index.block_sets)
    scores = scores_per_block.index_select(0, index.score_rows).view(num_requests, num_heads, -1)
    probs = _softmax(scores, mask, dim)
    probs_per_block = probs.view(-1, BLOCK).index_select(0, index.prob_rows)
    out_per_block = _multiply_blocks(probs_per_block, values, index.block_sets)
    out = out_per_block.index_select(0, index.score_rows).view(num_requests, num_heads, -1, dim)
    if out.shape[2] > 1:
        # Unused entries repeat the last block's result, which must be counted only once.
        out = out.masked_fill_(index.is_unused_entry, 0)
    return _sum_in_order(out.unbind(2)).to(q.dtype)


def select_rows(pool: Tensor, rows: slice | Tensor) -> Tensor:
    """Return these rows of a cache pool: a view for a slice, a copy for row indices int64 [n]."""
    # On the CPU, `index_select` copies large rows 4 to 5 times as fast as `pool[rows]`.
    return pool[rows] if isinstance(rows, slice) else pool.index_select(0, rows)


def _multiply_blocks(rows: Tensor, pool: Tensor, block_sets: Sequence[_BlockSet]) -> Tensor:
    """Multiply rows [slots x g, i] by the matrices [i, j] of their blocks in the pool [S, K, i, j].

    Rows are ordered by block set, block and KV head. Returns [slots x g, j].
    """
    products = []
    for blocks, row_slice in block_sets:
        matrices = select_rows(pool, blocks).flatten(0, 1)  # [blocks x K, i, j]
        block_rows = rows[row_slice].view(len(matrices), -1, rows.shape[1])
        products.append(batch_invariance.bmm(block_rows, matrices).flatten(0, 1))
    return products[0] if len(products) == 1 else torch.cat(products)


def _softmax(scores: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Compute softmax(scores [..., keys] / sqrt(dim) + mask) in at least fp32; return it in the scores' dtype."""
    masked_scores = torch.add(mask, scores, alpha=1 / math.sqrt(dim))
    return torch.softmax(masked_scores, -1).to(scores.dtype)


def _sum_in_order(parts: Iterable[Tensor]) -> Tensor:
    """Sum tensors sequentially, accumulating in fp32 (in fp64 for fp64 inputs)."""
    first, *rest = parts
    total = first.to(batch_invariance.at_least_fp32(first.dtype))
    for part in rest:
        total = total + part
    return total
