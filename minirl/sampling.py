"""The next token and its exact logprob, with noise that is a function of the request and the position.

A request's key is 64 bits from (seed, purpose, prompt, sample). The uniform of a token is a hash of the key and the
token's position, so the same request draws the same noise in any batch, on any rank, in any order. The token is the
inverse of the cumulative distribution at that uniform, in fp64: an fp32 cumulative sum leaves most tokens of a large
vocabulary unreachable. Logprobs are natural logs at the sampling temperature; the same `log_softmax` scores them.
"""

import torch
from torch import Tensor

from minirl import numerics

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


def request_key(seed: int, *, purpose: str, prompt: int, sample: int) -> int:
    """The key of one request, a signed 64-bit int. `prompt` counts prompts over the whole run.

    Mixed in a chain: a sum or xor of mixed parts would collide.
    """
    key = _mix_int(seed & _MASK)
    for part in (PURPOSES[purpose], prompt, sample):
        key = _mix_int(key ^ (part & _MASK))
    return _signed(key)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """fp64 uniforms in [0, 1) [B] for int64 `keys` [B] at token `positions` [B]."""
    bits = _mix(_mix(keys) + positions)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities [T, V] of fp32 `logits` [T, V] at `temperature` [T, 1]."""
    return torch.log_softmax(logits / temperature, -1)


def inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """The token [B] at which the cumulative distribution of `logprobs` [B, V] passes `uniform` [B] (fp64)."""
    rows, vocab = logprobs.shape
    probs = torch.nn.functional.pad(logprobs.double().exp(), (0, -vocab % CDF_BLOCK)).view(rows, -1, CDF_BLOCK)
    block_ends = probs.sum(-1).cumsum(-1)  # [B, V / CDF_BLOCK]
    total = block_ends[:, -1:]
    target = uniform[:, None] * total  # below total, since a uniform is at most 1 - 2^-53
    block = (block_ends <= target).sum(-1, keepdim=True)
    before = torch.where(block > 0, block_ends.gather(1, (block - 1).clamp(min=0)), torch.zeros_like(total))
    within = probs.gather(1, block[:, :, None].expand(-1, -1, CDF_BLOCK))[:, 0]
    token = (within.cumsum(-1) <= target - before).sum(-1)
    # The two levels round differently: never pass the block's last token that has any probability.
    last = (torch.arange(CDF_BLOCK, device=probs.device) * (within > 0)).amax(-1)
    return block[:, 0] * CDF_BLOCK + torch.minimum(token, last)


def sample(
    hidden: Tensor, head: Tensor, *, keys: Tensor, positions: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Next tokens int64 [B] and their logprobs fp32 [B] from hidden [B, D] and the head's weight [V, D].

    keys int64 [B]; positions int64 [B]: of the tokens to be sampled; temperature fp32 [B], 0 for the likeliest token
    (whose logprob is then at temperature 1).
    """
    greedy = temperature == 0
    logits = numerics.head_logits(hidden, head)
    logprobs = log_softmax(logits, torch.where(greedy, 1.0, temperature)[:, None])
    tokens = torch.where(greedy, logits.argmax(-1), inverse_cdf(logprobs, uniforms(keys, positions)))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
