"""Decode attention over block tables, as a Triton kernel: what CUDA uses where flash-attn is not installed.

It reads the pools as the portable kernel lays them out: a key block [C, BLOCK] is the right factor of its product as
it lies, and one layout serves both. Scores, softmax and sums are fp32. A program reads the keys of one row and key
head, or a share of them where rows are few. What a block holds beyond a row's keys has no effect, even NaN: nothing
needs clearing. What is launched depends on the arguments' shapes alone, so that a CUDA graph can replay it.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from minirl.model.portable_attention import BLOCK

TILE = 64  # keys of one product: two programs of head dimension 128 fit a multiprocessor's shared memory
PROGRAMS = 512  # enough to fill the device; with fewer rows x key heads the keys are split


def decode(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor, *, window: int | None
) -> Tensor:
    """Attention of the newest tokens q [B', H, C] over a pool's keys [S, K, C, BLOCK] and values [S, K, BLOCK, C].

    blocks int32 [B, n] and lengths int32 [B] >= 1: as in `DecodeRead`. Rows of q beyond theirs give anything.
    """
    (rows, num_heads, dim), num_kv = q.shape, keys.shape[1]
    groups, num_splits = num_heads // num_kv, 1
    while rows * num_kv * num_splits < PROGRAMS and num_splits < blocks.shape[1]:
        num_splits *= 2
    q, blocks = q.contiguous(), blocks.contiguous()
    narrow = num_splits == 1  # nothing is left to add up
    parts = q.new_empty(rows, num_kv, num_splits, groups, dim, dtype=q.dtype if narrow else torch.float32)
    weights = q.new_empty(rows, num_kv, num_splits, groups, dtype=torch.float32)
    _kernel()[len(lengths), num_kv, num_splits](
        q,
        keys,
        values,
        blocks,
        lengths,
        parts,
        weights,
        blocks.shape[1],
        window or 0,
        dim**-0.5,
        NUM_KV=num_kv,
        GROUPS=groups,
        DIM=dim,
        WIDE_GROUPS=max(
            16, 1 << (groups - 1).bit_length()
        ),  # a product has 16 rows or more, and powers of two
        WIDE_DIM=max(16, 1 << (dim - 1).bit_length()),
        BLOCK=BLOCK,
        TILE=TILE,
        num_warps=4,
        num_stages=3,
    )
    if narrow:
        return parts.view(rows, num_heads, dim)
    mean = (parts * weights.softmax(2)[..., None]).sum(2)
    return mean.to(q.dtype).view(rows, num_heads, dim)


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def attend_blocks(  # type: ignore[no-untyped-def]
        q, keys, values, blocks, lengths, parts, weights, num_blocks, window, scale,
        NUM_KV: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDE_GROUPS: tl.constexpr,
        WIDE_DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row, head, split, num_splits = (
            tl.program_id(0),
            tl.program_id(1),
            tl.program_id(2),
            tl.num_programs(2),
        )
        group, dim, key = tl.arange(0, WIDE_GROUPS), tl.arange(0, WIDE_DIM), tl.arange(0, TILE)
        is_dim, is_query = dim < DIM, (group < GROUPS)[:, None] & (dim < DIM)
        query = tl.load(
            q + ((row * NUM_KV + head) * GROUPS + group[:, None]) * DIM + dim, mask=is_query, other=0.0
        )
        end = tl.load(lengths + row)
        begin = tl.maximum(end - window, 0) if window > 0 else 0
        first = begin // TILE
        share = tl.cdiv(tl.cdiv(end, TILE) - first, num_splits)
        most = tl.full([WIDE_GROUPS], -float("inf"), tl.float32)
        total = tl.zeros([WIDE_GROUPS], tl.float32)
        mean = tl.zeros([WIDE_GROUPS, WIDE_DIM], tl.float32)
        for tile in range(first + split * share, tl.minimum(first + (split + 1) * share, tl.cdiv(end, TILE))):
            block = tl.load(blocks + row * num_blocks + tile * TILE // BLOCK).to(tl.int64)
            # The hint makes the loads of keys 16 bytes wide: without it they are compiled to 2 bytes each.
            start, place = (
                (block * NUM_KV + head) * DIM * BLOCK,
                tl.multiple_of(tile * TILE % BLOCK, TILE) + key,
            )
            seen = (tile * TILE + key < end) & (tile * TILE + key >= begin)
            # Not masked by `seen`, which would break wide loads along the keys: the scores are.
            k = tl.load(keys + start + dim[:, None] * BLOCK + place, mask=is_dim[:, None], other=0.0)
            v = tl.load(values + start + place[:, None] * DIM + dim, mask=seen[:, None] & is_dim, other=0.0)
            scores = tl.dot(query, k, input_precision="ieee") * scale
            scores = tl.where(seen, scores, -float("inf"))
            new_most = tl.maximum(most, tl.max(scores, 1))  # finite: every tile has a key that is seen
            probs, shrink = tl.exp(scores - new_most[:, None]), tl.exp(most - new_most)
            total = total * shrink + tl.sum(probs, 1)
            mean = mean * shrink[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
            most = new_most
        place = ((row * NUM_KV + head) * num_splits + split) * GROUPS + group
        # A split without keys has weight exp(-inf).
        mean = mean / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(parts + place[:, None] * DIM + dim, mean, mask=is_query)
        tl.store(weights + place, most + tl.log(tl.where(total > 0, total, 1.0)), mask=group < GROUPS)

    return attend_blocks
