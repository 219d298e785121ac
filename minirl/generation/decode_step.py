"""One decode step, run eagerly: the newest token of each running request goes in, the next is sampled."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minirl.generation.sampling import sample
from minirl.model.attention import DecodeLayout
from minirl.model.transformer import Transformer


@dataclass(frozen=True)
class DecodeStep:
    """The inputs of one decode step.

    tokens int32 [B]: the newest token of each request; layout: their positions and where the cache holds
    their keys; keys int64 [B] (of the sampling noise), temperature fp32 [B] and truncation of the next tokens: see
    `sampling.sample`.
    """

    tokens: Tensor
    layout: DecodeLayout
    keys: Tensor
    temperature: Tensor
    truncation: Sequence[Tensor] = ()

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors that change from step to step, except the portable kernel's index and mask."""
        tensors = [self.tokens, self.layout.positions, self.keys, self.temperature, *self.truncation]
        for cached in self.layout.caches:
            assert cached.read is not None, "not a decode layout"
            tensors += [cached.block, cached.offset, cached.read.blocks, cached.read.lengths]
        return tensors if self.layout.slots is None else [*tensors, self.layout.slots]

    def with_inputs(self, tensors: list[Tensor]) -> "DecodeStep":
        """The same step with other tensors, in the order of `inputs`."""
        tokens, positions, keys, temperature, *left = tensors
        truncation, left = left[: len(self.truncation)], left[len(self.truncation) :]
        caches = []
        for cached in self.layout.caches:
            assert cached.read is not None, "not a decode layout"
            block, offset, blocks, lengths, *left = left
            read = replace(cached.read, blocks=blocks, lengths=lengths)
            caches.append(replace(cached, block=block, offset=offset, read=read))
        layout = replace(self.layout, positions=positions, caches=caches, slots=left[0] if left else None)
        return DecodeStep(tokens, layout, keys, temperature, truncation)


def decode(model: Transformer, step: DecodeStep) -> Tensor:
    """Sample the next tokens; returns the result of `sample_packed`. On CUDA it never waits for the device."""
    hidden = model(step.tokens, step.layout.positions, step.layout)
    return sample_packed(
        model,
        hidden,
        keys=step.keys,
        # The sampled token comes one position after the token put in.
        positions=step.layout.positions + 1,
        temperature=step.temperature,
        truncation=step.truncation,
    )


def sample_packed(model: Transformer, hidden: Tensor, **sampling: Any) -> Tensor:
    """The results of `sample` from hidden states [B, D], as int32 [2 + W, B] for one download.

    Tokens [B], the bits of their logprobs [B] in fp32, and the columns of kept_ids [B, W]. sampling: the further
    arguments of `sample`.
    """
    slices = model.slices
    gather = None if slices is None else functools.partial(slices.gather, total=model.config.vocab_size)
    tokens, logprobs, kept_ids = sample(hidden, model.lm_head.weight, gather=gather, **sampling)
    bits = logprobs.float().view(torch.int32)
    packed = torch.stack([tokens.int(), bits])
    if kept_ids.shape[1]:
        packed = torch.cat([packed, kept_ids.T])
    if slices is not None and packed.device.type == "cuda":
        slices.broadcast(packed)  # so that ranks stay together even if their kernels differ in a bit
    return packed
