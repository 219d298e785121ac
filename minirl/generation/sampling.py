"""The next token and its exact logprob, with noise that is a function of the request and the position.

A request's key is 64 bits from (seed, purpose, prompt, sample). The uniform of a token is a hash of the key and the
token's position, so the same request draws the same noise in any batch, on any rank, in any order. The token is the
inverse of the cumulative distribution at that uniform, in fp64: an fp32 cumulative sum leaves most tokens of a large
vocabulary unreachable. Logprobs are natural logs at the sampling temperature; the same tiles of logits and the same
`log_softmax` score them.
"""

import torch
from torch import Tensor

from minirl.model.logprobs import chunk_logits, log_softmax, vocab_chunk_size

PURPOSES = {"train": 1, "eval": 2, "toy": 3}
CDF_BLOCK = 512  # tokens per first-level sum
_MASK = (1 << 64) - 1


def _mix_int(x: int) -> int:
    """The splitmix64 finaliser (Steele et al., OOPSLA 2014) on a Python int of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _mix(x: Tensor) -> Tensor:
    """`_mix_int` on int64 tensors, whose products wrap around."""

    def shifted(x: Tensor, bits: int) -> Tensor:  # int64 shifts carry the sign in: mask it off
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shifted(x, 31)


def request_key(seed: int, *, purpose: str, prompt_ordinal: int, sample: int) -> int:
    """The key of one request, a signed 64-bit int. `prompt_ordinal` counts prompts over the whole run.

    Mixed in a chain: a sum or xor of mixed parts would collide.
    """
    key = _mix_int(seed & _MASK)
    for part in (PURPOSES[purpose], prompt_ordinal, sample):
        key = _mix_int(key ^ (part & _MASK))
    return _signed(key)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """fp64 uniforms in [0, 1) [B] for int64 `keys` [B] at token `positions` [B]."""
    bits = _mix(_mix(keys) + positions)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """The token [B] at which the cumulative distribution of `logprobs` [B, V] passes `uniform` [B] (fp64)."""
    rows, vocab = logprobs.shape
    if vocab <= CDF_BLOCK:
        cdf = logprobs.double().exp().cumsum(-1)
        return _first_above(cdf, uniform[:, None] * cdf[:, -1:])[:, 0]
    padded = torch.nn.functional.pad(logprobs, (0, -vocab % CDF_BLOCK), value=-torch.inf)
    probs = padded.double().exp_().view(rows, -1, CDF_BLOCK)
    block_ends = probs.sum(-1).cumsum(-1)  # [B, V / CDF_BLOCK]
    target = uniform[:, None] * block_ends[:, -1:]
    block = _first_above(block_ends, target)
    before = torch.nn.functional.pad(block_ends, (1, 0)).gather(1, block)
    cdf = probs[torch.arange(rows, device=block.device), block[:, 0]].cumsum(-1)
    # The two levels round differently: never pass the block's last token that has any probability.
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    token = block * CDF_BLOCK + torch.minimum(_first_above(cdf, target - before), last)
    return token[:, 0].clamp_(max=vocab - 1)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """The first place [B, 1] where `cdf` [B, W] exceeds `target` [B, 1], at most the last.

    There is one where target is a uniform times the cdf's end, since a uniform is at most 1 - 2^-53, unless all is NaN:
    then the token's logprob tells.
    """
    return torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)


def sample(
    hidden: Tensor, head: Tensor, *, keys: Tensor, positions: Tensor, temperature: Tensor, tile: int = 0
) -> tuple[Tensor, Tensor]:
    """Next tokens int64 [B] and their logprobs fp32 [B] from hidden [B, D] and the head's weight [V, D].

    keys int64 [B]; positions int64 [B]: of the tokens to be sampled; temperature fp32 [B], 0 for the likeliest token
    (whose logprob is then at temperature 1); tile: as `vocab_chunk_size`.
    """
    greedy = temperature == 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    tiles = [
        chunk_logits(hidden, part, divisor) for part in head.split(tile or vocab_chunk_size(head.device))
    ]
    logits, totals = tiles[0], None
    if len(tiles) > 1:
        logits, totals = torch.cat(tiles, -1), torch.stack([part.logsumexp(-1) for part in tiles], -1)
    logprobs = log_softmax(logits, totals)
    tokens = inverse_cdf(logprobs, uniforms(keys, positions))
    if greedy.is_cuda or greedy.any():  # to look at them on CUDA is to wait for the device
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
