"""Models that are not trained: parked in host memory, and run over a batch without gradient."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from minirl.model.layers import Linear
from minirl.model.transformer import Transformer
from minirl.ranks.process_group import gather_objects
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import Batch
from minirl.training.scoring import scalar_outputs
from minirl.training.sharded_model import ShardedModel

# Streams of a batch, computed without gradient: [T], or [T, D] for hidden states.
Outputs = Callable[[Transformer, Batch], Sequence[Tensor]]


@contextmanager
def unparked(model: Transformer, device: torch.device, *, park: bool) -> Iterator[None]:
    """Put a frozen model's weights on `device` for the block; with `park`, only in host memory after it.

    Nothing writes to them, so the host keeps its tensors, and parking drops the device's. For CUDA the host's tensors
    are pinned at the first use, at up to twice their bytes (torch rounds each one up to a power of two): copies of
    them do not wait for the host. On the CPU nothing is copied. Not collective.
    """
    host = []
    for parameter in model.parameters():
        if park and device.type == "cuda":
            parameter.data = parameter.data.pin_memory()  # a pinned tensor is returned as it is
        host.append(parameter.data)
        parameter.data = parameter.data.to(device, non_blocking=True)
    yield
    if park:
        for parameter, parked in zip(model.parameters(), host, strict=True):
            parameter.data = parked


class FrozenModel:
    """A model that does not change while a step's rollouts are scored, and the streams that it computes for them.

    The policy is one until its update. A script may write to the parameters of `model` between two steps, for a moving
    average of the policy's weights.
    """

    def __init__(
        self,
        model: Transformer | ShardedModel,
        outputs: Outputs,
        *,
        names: Sequence[str],
        device: torch.device,
        park: bool = False,
        has_states: bool = False,
    ):
        """model: a sharded one is run as its `scorer`, and is not parked where ranks gather its weights.

        names: those in `Batch` of the first streams that `outputs` returns, which drops any further ones.

        park: see `unparked`. has_states: the streams are hidden states [T, D] in the model's dtype, not numbers [T] in
        fp32.
        """
        self.model = model.scorer if isinstance(model, ShardedModel) else model
        self._gathered = model if isinstance(model, ShardedModel) and model.shards_weights else None
        self._outputs = outputs
        self._names = tuple(names)
        self._device = device
        self._park = park
        self._shape = (self.model.config.hidden_size,) if has_states else ()
        self._dtype = next(self.model.parameters()).dtype if has_states else torch.float32

    @torch.no_grad()
    def add_to(self, batch: Batch, microbatches: Iterable[Sequence[int]]) -> Batch:
        """The batch, on the model's device, with the streams of the sequences in these microbatches; NaN elsewhere.

        Collective if the model's weights are sharded.
        """
        missing = batch.tokens.new_full((len(batch.tokens), *self._shape), torch.nan, dtype=self._dtype)
        streams = {name: missing.clone() for name in self._names}
        with self._on_device():
            for indices in microbatches:
                if not indices and self._gathered is None:
                    continue
                token_index = batch.token_index(indices)
                outputs = self._outputs(self.model, batch.select(indices))
                for stream, output in zip(streams.values(), outputs, strict=False):
                    stream[token_index] = output.to(stream.dtype)
        return batch.replace(**streams)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Put the weights on the device for the block; the head's stay gathered for users of hidden states."""
        if self._gathered is None:
            with unparked(self.model, self._device, park=self._park):
                yield
        else:
            yield
            if not self._shape:
                self._gathered.reshard()


def after_prompts(
    outputs: Outputs, prompt_ids: Callable[[int], Sequence[int]], *, max_tokens: int, is_sharded: bool
) -> Outputs:
    """The outputs at the sampled tokens, for a model that reads other prompts before them; 0 elsewhere.

    prompt_ids: see `Batch.with_prompts`. max_tokens: limit of a microbatch with these prompts. is_sharded: each pass
    through the model is collective, so all ranks make as many.
    """

    def outputs_of(model: Transformer, batch: Batch) -> Sequence[Tensor]:
        other = batch.with_prompts(prompt_ids)
        (microbatches,) = plan_microbatches(other.lengths, other.prefixes, num_ranks=1, max_tokens=max_tokens)
        if is_sharded:
            num_passes = max(gather_objects(len(microbatches)))
            microbatches += [[]] * (num_passes - len(microbatches))
        parts = []
        for indices in microbatches:
            seen = other.select(indices)
            parts.append([stream[seen.loss_index] for stream in outputs(model, seen)])
        # The microbatches have the sequences in another order than the batch.
        index = batch.token_index(list(itertools.chain(*microbatches)))
        order = index[batch.loss_mask[index]].argsort()
        return [batch.scatter(torch.cat(values)[order]) for values in zip(*parts, strict=True)]

    return outputs_of


def under_adapters(outputs: Outputs) -> Outputs:
    """The outputs of the model under the adapters, on the same storage: a reference that takes no memory."""

    def outputs_of(model: Transformer, batch: Batch) -> Sequence[Tensor]:
        scales = {m: m.lora_scale for m in model.modules() if isinstance(m, Linear)}
        for layer in scales:
            layer.lora_scale = 0.0
        streams = outputs(model, batch)
        for layer, scale in scales.items():
            layer.lora_scale = scale
        return streams

    return outputs_of


def values_of(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """The values [T] before the sampled tokens, and those of the states after the last tokens; 0 elsewhere."""
    values, scores = scalar_outputs(model, batch.tokens, batch.layout(), select=batch.loss_index)
    end_values = torch.zeros_like(values)
    end_values[batch.last_index] = scores
    return values, end_values
