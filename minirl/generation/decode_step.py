"""One decode step without a graph: the newest tokens of all running requests through the model, and the next ones."""

from dataclasses import dataclass, replace

from torch import Tensor

from minirl.generation.sampling import sample
from minirl.model.attention import Cached, DecodeLayout, PoolWrite
from minirl.model.transformer import Transformer


@dataclass(frozen=True)
class DecodeStep:
    """The newest tokens int64 [B] of rows, their layout, and for the next ones keys int64 [B], temperature fp32 [B]."""

    tokens: Tensor
    layout: DecodeLayout
    keys: Tensor
    temperature: Tensor

    @property
    def pools(self) -> list[Cached]:
        """The layout's pools, each once."""
        return list({id(cached): cached for cached, _ in self.layout.caches.values()}.values())

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors that differ from step to step, but for the portable kernel's plan."""
        tensors = [self.tokens, self.layout.positions, self.keys, self.temperature]
        for cached in self.pools:
            assert cached.read is not None, "not a decode layout"
            tensors += [cached.write.block, cached.write.offset, cached.read.blocks, cached.read.lengths]
        return tensors

    def with_inputs(self, tensors: list[Tensor]) -> "DecodeStep":
        """The same step on other tensors, in the order of `inputs`."""
        tokens, positions, keys, temperature, *rest = tensors
        moved = {}
        for i, cached in enumerate(self.pools):
            block, offset, blocks, lengths = rest[4 * i : 4 * i + 4]
            assert cached.read is not None, "not a decode layout"
            read = replace(cached.read, blocks=blocks, lengths=lengths)
            moved[id(cached)] = replace(cached, write=PoolWrite(None, block, offset), read=read)
        caches = {layer: (moved[id(cached)], index) for layer, (cached, index) in self.layout.caches.items()}
        return DecodeStep(tokens, DecodeLayout(positions, caches), keys, temperature)


def decode(model: Transformer, step: DecodeStep) -> tuple[Tensor, Tensor]:
    """The next tokens int64 [B] and their logprobs fp32 [B]. On CUDA nothing in it waits for the device."""
    positions = step.layout.positions
    hidden = model(step.tokens, positions, step.layout)
    head = model.lm_head.weight
    return sample(hidden, head, keys=step.keys, positions=positions + 1, temperature=step.temperature)
