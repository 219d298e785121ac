"""Frozen models, which score batches under no_grad and are offloaded to host memory between uses."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from minirl.model.layers import Linear
from minirl.model.transformer import Transformer
from minirl.training.batch import Batch, Microbatch
from minirl.training.sharded_model import ShardedModel

# Computes per-token outputs [T, ...] for a batch, under no_grad.
OutputFunction = Callable[[Transformer, Batch], Sequence[Tensor]]


@contextmanager
def on_device(model: Transformer, device: torch.device) -> Iterator[None]:
    """Keep a frozen model's weights on `device` during the block; afterwards they are only in host memory.

    Nothing writes to the weights, so the host keeps its tensors, and offloading just drops the device's copies. For
    CUDA, the host's tensors are pinned at first use, so copies do not block the host. Pinned memory
    takes up to twice the size of the tensors, because torch rounds each tensor up to a power of two. On the CPU nothing
    is copied. Not collective.
    """
    host_tensors = []
    try:
        for parameter in model.parameters():
            if device.type == "cuda":
                parameter.data = parameter.data.pin_memory()  # does not copy a tensor that is already pinned
            host_tensors.append(parameter.data)
            parameter.data = parameter.data.to(device, non_blocking=True)
        yield
    finally:
        # The device may have run out of memory before the last weights were copied.
        for parameter, host_data in zip(model.parameters(), host_tensors, strict=False):
            parameter.data = host_data


class FrozenModel:
    """A model that stays fixed while it scores a step's rollouts, and the per-token tensors that it adds to the batch.

    Before the update, the policy itself can be run as a `FrozenModel`. A script may write to `model`'s parameters
    between steps, for example to keep a moving average of the policy's weights.
    """

    def __init__(
        self,
        model: Transformer | ShardedModel,
        outputs: OutputFunction,
        *,
        names: Sequence[str],
        device: torch.device,
    ):
        """model: a sharded model is run through its `scorer`; any other model is offloaded between uses (`on_device`).

        names: names of the `Batch` fields that hold the first per-token tensors returned by `outputs`; any further
        tensors are dropped.
        """
        self.model = model.scorer if isinstance(model, ShardedModel) else model
        self._is_offloaded = self.model is model
        self._outputs = outputs
        self._names = names
        self._device = device

    @torch.no_grad()
    def add_outputs(self, batch: Batch, microbatches: Iterable[Microbatch]) -> Batch:
        """Return the batch with this model's per-token tensors added.

        The tensors have values for the sequences in these microbatches, and NaN elsewhere. The batch must be on the
        model's device. Collective if the model's weights are sharded.
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
    """Wrap `outputs` to run with the adapters disabled, as a reference model that takes no extra memory."""

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
