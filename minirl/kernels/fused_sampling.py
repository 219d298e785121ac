"""Sample tokens from logits by two Triton kernels: the twin on CUDA of what `sampling.sample` does with them.

The first reads the logits once and makes the sums of blocks of the vocabulary; the second finds a block in these sums,
and the token in the block. So no copy of the logits [B, V] is made, in fp32 or in fp64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirl.model.padding import next_power_of_two

BLOCK = 512  # tokens per block of the two-level search, as many as in `sampling.inverse_cdf`


def sample_logits(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample tokens int64 [B], with logprobs fp32 [B], from logits fp32 [B, V] that no temperature has divided.

    temperature fp32 [B]: as in `sampling.sample`. uniform fp64 [B]: chooses the token by inverting the cumulative
    distribution. On CUDA it never waits for the device.
    """
    num_requests, vocab_size = logits.shape
    num_blocks = -(-vocab_size // BLOCK)
    greatest = logits.new_empty(num_requests, num_blocks)
    likeliest = torch.empty_like(greatest, dtype=torch.int32)
    totals = torch.empty_like(greatest, dtype=torch.float64)
    blocks_kernel[(num_requests, num_blocks)](
        logits,
        temperature,
        greatest,
        likeliest,
        totals,
        vocab_size,
        BLOCK=BLOCK,
    )
    tokens = torch.empty_like(uniform, dtype=torch.int64)
    logprobs = logits.new_empty(num_requests)
    tokens_kernel[(num_requests,)](
        logits,
        temperature,
        uniform,
        greatest,
        likeliest,
        totals,
        tokens,
        logprobs,
        vocab_size,
        num_blocks,
        BLOCK=BLOCK,
        PADDED_BLOCKS=next_power_of_two(num_blocks),
    )
    return tokens, logprobs


@triton.jit
def blocks_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    greatest,
    likeliest,
    totals,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """The first kernel: a program sums up one block of one request."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(temperature + request)
    divisor = tl.where(t == 0, 1.0, t)
    z = tl.load(logits + request * vocab_size + token, mask=token < vocab_size, other=-float("inf"))
    z = z / divisor
    top = tl.max(z, 0)
    # A block in which all logits are -inf has total 0.
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp(z - base).to(tl.float64), 0)
    place = request * tl.num_programs(1) + block
    tl.store(greatest + place, top)
    tl.store(likeliest + place, tl.argmax(z, 0))
    tl.store(totals + place, total)


@triton.jit
def tokens_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    uniform,
    greatest,
    likeliest,
    totals,
    tokens,
    logprobs,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    """The second kernel: a program chooses the token of one request."""
    request = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + request)
    divisor = tl.where(t == 0, 1.0, t)
    blocks = tl.arange(0, PADDED_BLOCKS)
    place = request * num_blocks + blocks
    tops = tl.load(greatest + place, mask=blocks < num_blocks, other=-float("inf"))
    top = tl.max(tops, 0)
    sums = tl.load(totals + place, mask=blocks < num_blocks, other=0.0)
    weights = sums * tl.exp((tops - top).to(tl.float64))
    # A sum of NaN is NaN, a maximum is not: so the logprob shows that logits were NaN.
    log_total = top + tl.log(tl.sum(weights, 0))

    # The first block whose end exceeds the target, and the sum of all blocks before it.
    ends = tl.cumsum(weights, 0)
    target = tl.load(uniform + request) * tl.max(ends, 0)
    block = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), num_blocks - 1)
    block_start = tl.sum(tl.where(blocks == block - 1, ends, 0.0), 0)

    # The token in the block. The two levels round differently, so the target may lie beyond the end of its block.
    # Then take the last token of the block that has any probability.
    token_in_block = block * BLOCK + tl.arange(0, BLOCK)
    row = logits + request * vocab_size
    z = tl.load(row + token_in_block, mask=token_in_block < vocab_size, other=-float("inf")) / divisor
    base = tl.load(greatest + request * num_blocks + block)
    scale = tl.exp((base - top).to(tl.float64))
    cdf = tl.cumsum(tl.exp(z - base).to(tl.float64) * scale, 0)
    first_above = tl.sum((cdf <= target - block_start).to(tl.int32), 0)
    last_possible = tl.sum((cdf < tl.max(cdf, 0)).to(tl.int32), 0)
    sampled = block * BLOCK + tl.minimum(first_above, last_possible)

    best = tl.argmax(tops, 0)
    best_token = best * BLOCK + tl.load(likeliest + request * num_blocks + best)
    token = tl.minimum(tl.where(t == 0, best_token, sampled), vocab_size - 1)
    tl.store(tokens + request, token)
    tl.store(logprobs + request, tl.load(row + token) / divisor - log_total)
