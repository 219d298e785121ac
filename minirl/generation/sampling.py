"""Sample next tokens with their exact logprobs. Random numbers depend only on the request and the position.

Each request has a 64-bit key derived from (seed, purpose, prompt ordinal, sample, branch). The uniform number that
selects a token is a hash of the key and the token's position, so a request draws the same numbers in any batch, on any
rank and in any order. Tokens are sampled by inverting the cumulative distribution in fp64. In fp32, rounding in the
cumulative sum would make most tokens of a large vocabulary unreachable. Logprobs are natural logarithms at the sampling
temperature. Training scores tokens with the same vocabulary chunks and the same `log_softmax`, so sampling and training
logprobs are bitwise equal.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model.logprobs import VOCAB_CHUNK, chunk_logits, log_softmax, logit_divisor
from minirl.rollouts import MAX_TOP_K

PURPOSES = {"train": 1, "eval": 2}
_MASK_64 = (1 << 64) - 1
# Number of tokens per block in the two-level search of `sample_by_inverse_cdf`.
CDF_BLOCK = 512

Number = TypeVar("Number", int, Tensor)


def _to_signed(x: int) -> int:
    """Reinterpret an unsigned 64-bit number as a signed number."""
    return x - ((x >> 63) << 64)


# Constants of splitmix64 (Steele et al., OOPSLA 2014).
_INCREMENT = _to_signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _to_signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _to_signed(0x94D049BB133111EB)


def _splitmix64(x: Number) -> Number:
    """Hash the lowest 64 bits of x with the splitmix64 finalizer; higher bits of the result are undefined.

    Sums and products wrap around at 64 bits in int64 tensors, whereas Python integers grow beyond 64 bits.
    """
    x = x + _INCREMENT
    x = x ^ _shift_right(x, 30)
    x = x * _MULTIPLIER_1
    x = x ^ _shift_right(x, 27)
    x = x * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Number, bits: int) -> Number:
    """Return the logical right shift of the low 64 bits of x: an arithmetic shift whose sign bits are masked off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def request_key(seed: int, *, purpose: str, prompt_ordinal: int, sample: int, branch: int = 0) -> int:
    """Return a request's RNG key, a signed 64-bit number. `prompt_ordinal` counts prompts over the whole run.

    For a rollout's later branches, the key also depends on `branch`; the first branch (0) adds nothing to the key.
    """
    # Hash each part together with the hash of the previous parts. If the parts were hashed separately and then added or
    # XORed, different requests could get the same key.
    key = _splitmix64(seed) & _MASK_64
    parts = [PURPOSES[purpose], prompt_ordinal, sample]
    if branch:
        parts.append(branch)
    for part in parts:
        key = _splitmix64(key ^ part) & _MASK_64
    return _to_signed(key)


def seeded_uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return uniform random numbers, fp64 [B], in [0, 1) for int64 `keys` [B] and token `positions` [B]."""
    random_bits = _splitmix64(_splitmix64(keys) + positions)
    # A double represents 53 bits exactly, so the upper 53 of the 64 bits become a multiple of 2^-53.
    return _shift_right(random_bits, 11).double() * 2.0**-53


def sample_by_inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first tokens [B] at which the cumulative distribution of `logprobs` [B, V] exceeds `uniform` [B]."""
    batch_size, vocab_size = logprobs.shape
    if vocab_size <= CDF_BLOCK:
        cdf = logprobs.double().exp().cumsum(-1)
        target_cdf = uniform[:, None] * cdf[:, -1:]
        return _first_index_above(cdf, target_cdf)[:, 0]

    # Search in two levels: first find the block of CDF_BLOCK tokens that contains the target, then the token in that
    # block. A cumulative sum over the whole vocabulary would need a second fp64 tensor [B, V]. The uniform number is
    # scaled by the sum of all probabilities, which is not exactly 1 because of rounding.
    num_padding = -vocab_size % CDF_BLOCK
    padded_logprobs = logprobs.new_full(
        (batch_size, vocab_size + num_padding), -torch.inf, dtype=torch.float64
    )
    padded_logprobs[:, :vocab_size] = logprobs
    probs = padded_logprobs.exp_().view(batch_size, -1, CDF_BLOCK)
    block_end_cdf = probs.sum(-1).cumsum(-1)  # the cdf at the end of each block, [B, V / CDF_BLOCK]
    target_cdf = uniform[:, None] * block_end_cdf[:, -1:]
    vocab_block = _first_index_above(block_end_cdf, target_cdf)
    cdf_at_block_starts = F.pad(block_end_cdf, (1, 0))
    target_in_block = target_cdf - cdf_at_block_starts.gather(1, vocab_block)
    row = torch.arange(batch_size, device=vocab_block.device)
    cdf = probs[row, vocab_block[:, 0]].cumsum(-1)
    # The two levels round differently, so the target may lie beyond the end of its block. In that case, take the
    # block's last token with nonzero probability, at which the block's CDF first reaches its final value.
    block_prob = cdf[:, -1:].contiguous()
    last_nonzero_index = torch.searchsorted(cdf, block_prob)
    first_index_above = _first_index_above(cdf, target_in_block)
    index_in_block = torch.minimum(first_index_above, last_nonzero_index)
    token = vocab_block * CDF_BLOCK + index_in_block
    return token[:, 0].clamp_(max=vocab_size - 1)


def _first_index_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Return the first index [B, 1] at which `cdf` [B, W] exceeds `target` [B, 1], or the last index if there is none.

    A uniform number u is at most 1 - 2^-53, so the CDF always exceeds the target, u times the CDF's final value, unless
    the CDF is NaN. A NaN in the CDF is revealed by the sampled token's logprob, which is then NaN, too.
    """
    index = torch.searchsorted(cdf, target, right=True)
    return index.clamp_(max=cdf.shape[1] - 1)


def sample(
    hidden: Tensor,
    head: Tensor,
    positions: Tensor,
    sampling_params: Sequence[Tensor],
    *,
    vocab_chunk: int = VOCAB_CHUNK,
) -> Tensor:
    """Sample tokens from hidden states [B, D] and the head's weight [V, D]. On CUDA, sampling never blocks the host.

    Returns int32 [2, B], so that one copy moves everything to the host: the tokens, and the bits of their fp32
    logprobs.

    positions int64 [B]: positions of the sampled tokens.
    sampling_params: the arrays of `RequestColumns.sampling_params` on the device: keys int64 [B]; temperatures fp32
    [B]; and, if any request uses truncated sampling, top_k int64 [B] and top_p fp64 [B]. Temperature 0 picks the most
    likely token and returns its logprob at temperature 1.
    vocab_chunk: number of vocabulary tokens per matmul with the head; on CUDA, one matmul covers the whole vocabulary.
    """
    keys, temperature, *truncation = sampling_params
    uniform = seeded_uniforms(keys, positions)
    is_on_cpu = hidden.device.type == "cpu"
    divisor = logit_divisor(temperature)
    if is_on_cpu:
        logits = torch.cat([chunk_logits(hidden, chunk, divisor) for chunk in head.split(vocab_chunk)], -1)
    else:
        logits = chunk_logits(hidden, head, divisor)
    if truncation:
        apply_top_k_top_p(logits, temperature, *truncation)
    chunk_logsumexps = None
    if is_on_cpu and logits.shape[1] > vocab_chunk:
        logit_chunks = logits.split(vocab_chunk, -1)
        chunk_logsumexps = torch.stack([chunk.contiguous().logsumexp(-1) for chunk in logit_chunks], -1)
    logprobs = log_softmax(logits, chunk_logsumexps)
    tokens = sample_by_inverse_cdf(logprobs, uniform)
    is_greedy = temperature == 0
    if not is_on_cpu or is_greedy.any():  # on CUDA, this check would make the host wait
        greedy_tokens = logits.argmax(-1)
        tokens = torch.where(is_greedy, greedy_tokens, tokens)
    token_logprobs = logprobs.gather(1, tokens[:, None])[:, 0]
    return torch.stack([tokens.int(), token_logprobs.float().view(torch.int32)])


def apply_top_k_top_p(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Mask tokens excluded by top-k or top-p by setting their logits to -inf, as transformers' logits processors do.

    Modifies the logits in place. The logits are fp32 [B, V] and already divided by the temperature. top_k and top_p [B]
    are `Truncation` fields. A row with top_k 0 or temperature 0 keeps all tokens.
    """
    num_top_logits = min(MAX_TOP_K, logits.shape[1])
    top_logits, ids = logits.topk(num_top_logits)
    is_kept_token = torch.arange(num_top_logits, device=logits.device) < top_k[:, None]
    probs = top_logits.double().masked_fill(~is_kept_token, -torch.inf).softmax(-1)
    cum_prob_before = probs.cumsum(-1) - probs
    # With top_p 1, keep all tokens, even a token whose preceding cumulative probability rounds to 1.
    is_kept_token &= (cum_prob_before < top_p[:, None]) | (top_p[:, None] == 1)
    is_removed_token = torch.ones_like(logits, dtype=torch.bool).scatter_(1, ids, ~is_kept_token)
    is_removed_token &= ((top_k > 0) & (temperature > 0))[:, None]
    logits.masked_fill_(is_removed_token, -torch.inf)
