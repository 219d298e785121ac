"""A Triton kernel for decode attention over block tables on CUDA.

The kernel reads pools in the same layout as the portable kernel: a key block [C, BLOCK] can be used as the right-hand
operand of the score matmul without being transposed. Scores, softmax and sums are computed in fp32. Each program
processes the keys of one request and KV head, or a split of these keys if there are few requests. Data beyond a
request's keys, even NaN, has no effect, so blocks need not be cleared. The launch depends only on argument shapes, so a
CUDA graph can replay the launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirl.model.padding import next_power_of_two

# Maximum size of a key tile in bytes, per channel and in total. Value tiles have the same size. These limits keep a
# program's shared memory within the 99 KiB of the smallest devices, and avoid register spills
# (`benchmarks/paged_resources.py`).
MAX_CHANNEL_BYTES = 128
MAX_TILE_BYTES = 32768
# Triton's compile options. num_stages is the number of tiles loaded from memory at the same time.
OPTIONS = {"num_warps": 4, "num_stages": 3}
# Number of programs needed to saturate the GPU. If requests x KV heads is smaller than MIN_PROGRAMS, the keys are
# split.
MIN_PROGRAMS = 512


def decode(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor, *, window: int | None
) -> Tensor:
    """Compute attention of the newest tokens q [B', H, C] over a pool -> [B', H, C].

    keys [S, K, C, BLOCK] and values [S, K, BLOCK, C]: the pool of S blocks.
    blocks int32 [B, n] and lengths int32 [B] >= 1: as in `attention.PagedMetadata`.
    Output rows beyond the first B are arbitrary.
    """
    num_padded, num_heads, dim = q.shape
    num_kv_heads = keys.shape[1]
    max_blocks = blocks.shape[1]
    groups = num_heads // num_kv_heads
    num_splits = 1
    while num_padded * num_kv_heads * num_splits < MIN_PROGRAMS and num_splits < max_blocks:
        num_splits *= 2
    # Each split returns the weighted mean of its values, and the log of the split's weight. If there is only one split,
    # its mean is the result.
    mean_dtype = q.dtype if num_splits == 1 else torch.float32
    means = q.new_empty(num_padded, num_kv_heads, num_splits, groups, dim, dtype=mean_dtype)
    log_weights = q.new_empty(num_padded, num_kv_heads, num_splits, groups, dtype=torch.float32)
    grid = (len(lengths), num_kv_heads, num_splits)
    attend_blocks[grid](
        q.contiguous(),
        keys,
        values,
        blocks.contiguous(),
        lengths,
        means,
        log_weights,
        max_blocks,
        window or 0,
        dim**-0.5,
        **constants(num_kv_heads, groups, dim, keys.shape[-1], keys.dtype),
        **OPTIONS,
    )
    if num_splits == 1:
        return means.view(num_padded, num_heads, dim)
    weights = log_weights.softmax(2)[..., None]
    mean = (means * weights).sum(2)
    return mean.to(q.dtype).view(num_padded, num_heads, dim)


def constants(num_kv_heads: int, groups: int, dim: int, block: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the kernel's compile-time constants, keyed by name.

    groups: number of query heads per KV head. dim: head dimension. block: number of tokens per block.
    """
    padded_dim = _padded_size(dim)
    return {
        "NUM_KV": num_kv_heads,
        "GROUPS": groups,
        "DIM": dim,
        "PADDED_GROUPS": _padded_size(groups),
        "PADDED_DIM": padded_dim,
        "BLOCK": block,
        "TILE": min(block, min(MAX_CHANNEL_BYTES, MAX_TILE_BYTES // padded_dim) // dtype.itemsize),
    }


def _padded_size(size: int) -> int:
    """Return the next power of two, but at least 16, the minimum size for `tl.dot`."""
    return max(16, next_power_of_two(size))


@triton.jit
def attend_blocks(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    blocks,
    lengths,
    means,
    log_weights,
    max_blocks,
    window,
    scale,
    NUM_KV: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute attention for one split of one request and KV head. Triton compiles this kernel on first use."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    group = tl.arange(0, PADDED_GROUPS)
    dim = tl.arange(0, PADDED_DIM)
    key = tl.arange(0, TILE)
    is_channel = dim < DIM
    is_query = (group < GROUPS)[:, None] & is_channel
    query_row = (request * NUM_KV + head) * GROUPS + group
    query = tl.load(q + query_row[:, None] * DIM + dim, mask=is_query, other=0.0)

    # The request attends to keys begin..end - 1, addressed through its block table; each split gets the same number of
    # tiles.
    end = tl.load(lengths + request)
    begin = tl.maximum(end - window, 0) if window > 0 else 0
    first_tile = begin // TILE
    end_tile = tl.cdiv(end, TILE)
    tiles_per_split = tl.cdiv(end_tile - first_tile, num_splits)
    split_start = first_tile + split * tiles_per_split
    split_end = tl.minimum(first_tile + (split + 1) * tiles_per_split, end_tile)

    # Online softmax (https://arxiv.org/abs/1805.02867): keep the maximum score so far, the sum of the weights exp(score
    # - maximum), and the weighted sum of the values. When the maximum rises, rescale both sums.
    running_max = tl.full([PADDED_GROUPS], -float("inf"), tl.float32)
    running_sum = tl.zeros([PADDED_GROUPS], tl.float32)
    mean = tl.zeros([PADDED_GROUPS, PADDED_DIM], tl.float32)
    for tile in range(split_start, split_end):
        first_key = tile * TILE
        block = tl.load(blocks + request * max_blocks + first_key // BLOCK).to(tl.int64)
        block_start = (block * NUM_KV + head) * DIM * BLOCK
        # With the hint, each load of keys is 16 bytes wide; without it, the loads compile to 2 bytes each.
        offset = tl.multiple_of(first_key % BLOCK, TILE) + key
        is_seen = (first_key + key < end) & (first_key + key >= begin)
        # Mask the scores rather than the keys, because masking key loads with `is_seen` would prevent wide loads.
        k = tl.load(
            keys + block_start + dim[:, None] * BLOCK + offset,
            mask=is_channel[:, None],
            other=0.0,
        )
        v = tl.load(
            values + block_start + offset[:, None] * DIM + dim,
            mask=is_seen[:, None] & is_channel,
            other=0.0,
        )
        scores = tl.dot(query, k, input_precision="ieee") * scale
        scores = tl.where(is_seen, scores, -float("inf"))
        # The maximum is finite, because every tile contains a visible key.
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        probs = tl.exp(scores - new_max[:, None])
        rescale = tl.exp(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(probs, 1)
        mean = mean * rescale[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        running_max = new_max

    output_row = ((request * NUM_KV + head) * num_splits + split) * GROUPS + group
    # A split without keys has sum 0, mean 0 and weight exp(-inf).
    divisor = tl.where(running_sum > 0, running_sum, 1.0)
    mean = mean / divisor[:, None]
    tl.store(means + output_row[:, None] * DIM + dim, mean, mask=is_query)
    tl.store(log_weights + output_row, running_max + tl.log(divisor), mask=group < GROUPS)
