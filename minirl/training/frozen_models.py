"""Models that are only read: parked in host memory, and run over a batch without gradient."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from minirl.model.transformer import Transformer
from minirl.training.batch import Batch
from minirl.training.scoring import scalar_outputs, score


@contextmanager
def unparked(model: Transformer, device: torch.device, *, park: bool) -> Iterator[None]:
    """Have a frozen model on `device` for the block; `park` sends it back to host memory afterwards."""
    model.to(device)
    yield
    if park:
        model.to("cpu")


@torch.no_grad()
def frozen_logprobs(
    model: Transformer, batch: Batch, microbatches: Sequence[Sequence[int]], temperature: float
) -> Tensor:
    """Logprobs [T] of a batch's sampled tokens, without gradient, by microbatch; 0 elsewhere. Not collective."""
    logprobs = torch.zeros_like(batch.sample_logprobs)
    for sequences in microbatches:
        part = batch.select(sequences)
        scored, _ = score(model, part.tokens, part.layout(), select=part.loss_mask, temperature=temperature)
        logprobs[batch.token_index(sequences)] = scored.to(logprobs.dtype)
    return logprobs


@torch.no_grad()
def frozen_scalar_outputs(
    model: Transformer, batch: Batch, microbatches: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """`predict` for a batch, without gradient, by microbatch: values [T] and what comes after the end [N].

    Not collective.
    """
    values = torch.zeros_like(batch.sample_logprobs)
    after = values.new_zeros(len(batch.lengths))
    for sequences in microbatches:
        part = batch.select(sequences)
        before, last = scalar_outputs(model, part.tokens, part.layout(), select=part.loss_mask)
        values[batch.token_index(sequences)], after[list(sequences)] = before.to(values), last.to(values)
    return values, after
