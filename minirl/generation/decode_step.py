"""One decode step, run eagerly: the newest token of each running request goes in, the next is sampled."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.generation.sampling import sample
from minirl.model.attention import DecodeLayout
from minirl.model.transformer import Transformer


def decode(model: Transformer, tokens: Tensor, layout: DecodeLayout, sampling: Sequence[Tensor]) -> Tensor:
    """Sample the next tokens; returns the result of `sample_packed`. On CUDA it never waits for the device.

    tokens int32 [B]: the newest token of each request; layout: their positions and where the cache holds their keys.
    """
    hidden = model(tokens, layout.positions, layout)
    # The sampled token comes one position after the token put in.
    return sample_packed(model, hidden, layout.positions + 1, sampling)


def sample_packed(
    model: Transformer, hidden: Tensor, positions: Tensor, sampling: Sequence[Tensor]
) -> Tensor:
    """The results of `sample` from hidden states [B, D], as int32 [2, B] for one download.

    Tokens [B], and the bits of their logprobs [B] in fp32.
    positions int64 [B]: those of the sampled tokens. sampling: see `RunningRequests.sampling`; on the device.
    """
    keys, temperature, *truncation = sampling
    tokens, logprobs = sample(
        hidden,
        model.lm_head.weight,
        keys=keys,
        positions=positions,
        temperature=temperature,
        truncation=truncation,
    )
    bits = logprobs.float().view(torch.int32)
    packed = torch.stack([tokens.int(), bits])
    return packed
