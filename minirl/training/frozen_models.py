"""Models that are not trained: parked in host memory, and run over a batch without gradient."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from minirl.model.transformer import Transformer
from minirl.training.batch import Batch
from minirl.training.scoring import scalar_outputs, score_batch


@contextmanager
def unparked(model: Transformer, device: torch.device, *, park: bool) -> Iterator[None]:
    """Have a frozen model's weights on `device` for the block; with `park`, afterwards only in host memory.

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


@torch.no_grad()
def frozen_logprobs(
    model: Transformer, batch: Batch, microbatches: Iterable[Sequence[int]], temperature: float
) -> Tensor:
    """Logprobs [T] of a batch's sampled tokens, 0 elsewhere.

    The model runs without gradient over one microbatch (sequence indices) after another. Not collective.
    """
    logprobs = torch.zeros_like(batch.sample_logprobs)
    for indices in microbatches:
        micro = batch.select(indices)
        scored, _ = score_batch(model, micro, temperature=temperature)
        logprobs[batch.token_index(indices)] = scored.to(logprobs.dtype)
    return logprobs


@torch.no_grad()
def frozen_scalar_outputs(
    model: Transformer, batch: Batch, microbatches: Iterable[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """`scalar_outputs` of a batch: values [T] before the sampled tokens and scores [N] after the last tokens.

    The scores of a value model are the values of the states after the last tokens. The model runs without
    gradient over one microbatch (sequence indices) after another. Not collective.
    """
    values = torch.zeros_like(batch.sample_logprobs)
    scores = values.new_zeros(len(batch.lengths))
    for indices in microbatches:
        micro = batch.select(indices)
        micro_values, micro_scores = scalar_outputs(
            model, micro.tokens, micro.layout(), select=micro.loss_index
        )
        values[batch.token_index(indices)] = micro_values.to(values)
        scores[list(indices)] = micro_scores.to(values)
    return values, scores
