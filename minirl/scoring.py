"""Logprobs, entropies and values of the tokens of a stream, under gradient or not, never holding logits [T, V].

Element t of every stream is about token t: its logprob, and the value of the state it was sampled in, come from the
hidden state at t - 1. That shift happens in `_states_before` and nowhere else. Only selected tokens (those the policy
sampled) pass the head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minirl import numerics
from minirl.attention import PackedLayout
from minirl.batch import Batch
from minirl.model import Transformer
from minirl.sampling import log_softmax

CHUNK = 256  # rows of logits alive at once


def score(
    model: Transformer, tokens: Tensor, layout: PackedLayout, *, select: Tensor, temperature: float, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [T] in fp32 of `tokens` int64 [T] where `select` bool [T]; 0 elsewhere.

    `select` must be false at the first token of each sequence. Differentiable in the parameters. Not collective.
    """
    hidden = model(tokens[layout.kept], layout.positions, layout)
    chosen = select.nonzero()[:, 0]
    logprobs, entropies = ChunkedLogprobs.apply(
        _states_before(hidden, chosen, layout), model.lm_head.weight, tokens[chosen], temperature, chunk
    )
    zeros = logprobs.new_zeros(len(tokens))
    return zeros.index_put((chosen,), logprobs), zeros.index_put((chosen,), entropies)


def predict(model: Transformer, tokens: Tensor, layout: PackedLayout, *, select: Tensor) -> tuple[Tensor, Tensor]:
    """What a model with a scalar head says, in fp32: of the state before each selected token [T], 0 elsewhere, and of
    the state after the last token of each sequence [N].

    The first are a value model's values (`select` as in `score`), the second a reward model's scores. Differentiable in
    the parameters. Not collective.
    """
    hidden = model(tokens[layout.kept], layout.positions, layout)
    chosen, last = select.nonzero()[:, 0], layout.row[layout.cu_seqlens[1:].long() - 1]
    states = torch.cat([_states_before(hidden, chosen, layout), hidden.index_select(0, last)])
    wide = numerics.at_least_fp32(states.dtype)  # row by row: a product with one column is not row-invariant
    values, after = (states.to(wide) * model.score.weight.to(wide)).sum(-1).split([len(chosen), len(last)])
    return values.new_zeros(len(tokens)).index_put((chosen,), values), after


def _states_before(hidden: Tensor, chosen: Tensor, layout: PackedLayout) -> Tensor:
    """Hidden states [M, D] that the tokens at `chosen` [M] were sampled from: the one next-token shift."""
    return hidden.index_select(0, layout.row[chosen - 1])


@contextmanager
def unparked(model: Transformer, device: torch.device, *, park: bool) -> Iterator[None]:
    """Have a frozen model on `device` for the block; `park` sends it back to host memory afterwards."""
    model.to(device)
    yield
    if park:
        model.to("cpu")


@torch.no_grad()
def score_frozen(model: Transformer, batch: Batch, microbatches: Sequence[Sequence[int]], temperature: float) -> Tensor:
    """Logprobs [T] of a batch's sampled tokens, without gradient, by microbatch; 0 elsewhere. Not collective."""
    logprobs = torch.zeros_like(batch.sample_logprobs)
    for sequences in microbatches:
        part = batch.select(sequences)
        scored, _ = score(model, part.tokens, part.layout(), select=part.loss_mask, temperature=temperature)
        logprobs[batch.token_index(sequences)] = scored.to(logprobs.dtype)
    return logprobs


@torch.no_grad()
def predict_frozen(model: Transformer, batch: Batch, microbatches: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """`predict` for a batch, without gradient, by microbatch: values [T] and what comes after the end [N].

    Not collective.
    """
    values = torch.zeros_like(batch.sample_logprobs)
    after = values.new_zeros(len(batch.lengths))
    for sequences in microbatches:
        part = batch.select(sequences)
        before, last = predict(model, part.tokens, part.layout(), select=part.loss_mask)
        values[batch.token_index(sequences)], after[list(sequences)] = before.to(values), last.to(values)
    return values, after


class ChunkedLogprobs(torch.autograd.Function):
    """Logprobs and entropies [M] of targets [M] from hidden [M, D] and a head [V, D], in chunks of rows.

    Backward makes the logits again. With p = softmax(z / T): d logprob / dz_j = (1[j = y] - p_j) / T and
    d entropy / dz_j = -p_j (log p_j + entropy) / T.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        ctx.temperature, ctx.chunk = temperature, chunk
        wide = numerics.at_least_fp32(hidden.dtype)
        logprobs, entropies = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(2))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            all_logprobs = _all_logprobs(hidden[rows], head, temperature)
            logprobs[rows] = all_logprobs.gather(1, targets[rows, None])[:, 0]
            entropies[rows] = -(all_logprobs.exp() * all_logprobs).nan_to_num(0.0).sum(-1)
        ctx.save_for_backward(hidden, head, targets, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        """See the class."""
        hidden, head, targets, entropies = ctx.saved_tensors
        wide = entropies.dtype
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=wide)
        is_entropy_used = bool(grad_entropies.any())
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            all_logprobs = _all_logprobs(hidden[rows], head, ctx.temperature)
            probs = all_logprobs.exp()
            grad = -grad_logprobs[rows, None] * probs
            if is_entropy_used:
                weighted = (probs * (all_logprobs + entropies[rows, None])).nan_to_num(0.0)
                grad -= grad_entropies[rows, None] * weighted
            grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            grad /= ctx.temperature
            grad_hidden[rows] = (grad.to(head.dtype) @ head).to(hidden.dtype)
            grad_head.addmm_(grad.t(), hidden[rows].to(wide))
        return grad_hidden, grad_head.to(head.dtype), None, None, None


def _all_logprobs(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = numerics.head_logits(hidden, head)
    return log_softmax(logits, torch.full((len(logits), 1), temperature, dtype=logits.dtype, device=logits.device))
