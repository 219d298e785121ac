"""Models that are not trained: parked in host memory, and run over a batch without gradient."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from minirl.model.layers import Linear
from minirl.model.transformer import Transformer
from minirl.training.batch import Batch, Microbatch
from minirl.training.sharded_model import ShardedModel

# Streams [T, ...] of a batch, computed without gradient.
OutputFunction = Callable[[Transformer, Batch], Sequence[Tensor]]


@contextmanager
def on_device(model: Transformer, device: torch.device) -> Iterator[None]:
    """Put a frozen model's weights on `device` for the block; after it they are only in host memory.

    Nothing writes to them, so the host keeps its tensors, and parking drops the device's. For CUDA the host's tensors
    are pinned at the first use, at up to twice their bytes (torch rounds each one up to a power of two): copies of
    them do not wait for the host. On the CPU nothing is copied. Not collective.
    """
    host = []
    try:
        for parameter in model.parameters():
            if device.type == "cuda":
                parameter.data = parameter.data.pin_memory()  # a pinned tensor is returned as it is
            host.append(parameter.data)
            parameter.data = parameter.data.to(device, non_blocking=True)
        yield
    finally:
        # The device may have had no room for all of them.
        for parameter, host_data in zip(model.parameters(), host, strict=False):
            parameter.data = host_data


class FrozenModel:
    """A model that does not change while a step's rollouts are scored, and the streams that it computes for them.

    The policy is one until its update. A script may write to the parameters of `model` between two steps, for a moving
    average of the policy's weights.
    """

    def __init__(
        self,
        model: Transformer | ShardedModel,
        outputs: OutputFunction,
        *,
        names: Sequence[str],
        device: torch.device,
    ):
        """model: a sharded one is run as its `scorer`; another one is parked between its uses (`on_device`).

        names: those in `Batch` of the first streams that `outputs` returns, which drops any further ones.
        """
        self.model = model.scorer if isinstance(model, ShardedModel) else model
        self._is_offloaded = self.model is model
        self._outputs = outputs
        self._names = names
        self._device = device

    @torch.no_grad()
    def add_streams(self, batch: Batch, microbatches: Iterable[Microbatch]) -> Batch:
        """The batch, on the model's device, with the streams of the sequences in these microbatches; NaN elsewhere.

        Collective if the model's weights are sharded.
        """
        streams: dict[str, Tensor] = {}
        with on_device(self.model, self._device) if self._is_offloaded else nullcontext():
            for sequences in microbatches:
                token_index = batch.token_index(sequences)
                outputs = self._outputs(self.model, batch.select(sequences))
                for name, output in zip(self._names, outputs, strict=False):
                    if name not in streams:
                        streams[name] = output.new_full((len(batch.tokens), *output.shape[1:]), torch.nan)
                    streams[name][token_index] = output
        return batch.replace(**streams)


def without_adapters(outputs: OutputFunction) -> OutputFunction:
    """The outputs of the model under the adapters, on the same storage: a reference that takes no memory."""

    def run_outputs(model: Transformer, batch: Batch) -> Sequence[Tensor]:
        scales = {m: m.lora_scale for m in model.modules() if isinstance(m, Linear)}
        for layer in scales:
            layer.lora_scale = 0.0
        try:
            return outputs(model, batch)
        finally:
            for layer, scale in scales.items():
                layer.lora_scale = scale

    return run_outputs
