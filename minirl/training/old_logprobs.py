"""Logprobs of the policy before a step's first update, to which the ratios of its losses are."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from minirl.model.transformer import Transformer
from minirl.training.batch import Batch
from minirl.training.scoring import score_batch


@torch.no_grad()
def score_old_logprobs(
    model: Transformer, batch: Batch, microbatches: Iterable[Sequence[int]], temperature: float
) -> Tensor:
    """Logprobs [T] of a batch's sampled tokens by the model as it is now, 0 elsewhere.

    The model runs without gradient over one microbatch (sequence indices) after another. Not collective.
    """
    logprobs = torch.zeros_like(batch.sample_logprobs)
    for indices in microbatches:
        micro = batch.select(indices)
        scored, _ = score_batch(model, micro, temperature=temperature)
        logprobs[batch.token_index(indices)] = scored.to(logprobs.dtype)
    return logprobs
