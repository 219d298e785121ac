"""The KL divergence between the policy and a teacher over the whole vocabulary, with gradient for the policy.

Logits [T, V] exist of neither as a whole: only those of one tile, a token chunk and a vocabulary chunk, do.
"""

from typing import Any

import torch
from torch import Tensor

from minirl.model import device_kernels
from minirl.model.batch_invariance import at_least_fp32, wide_mm
from minirl.model.logprobs import VOCAB_CHUNK, chunk_logits, chunk_width, log_softmax
from minirl.model.transformer import Transformer
from minirl.training.batch import Batch
from minirl.training.scoring import TOKEN_CHUNK, outputs_of_head, states_before

# Tensors of a tile's size that exist at the same time.
TILES = 4


def states_as(name: str, model: Transformer, batch: Batch) -> dict[str, Tensor]:
    """Final hidden states [T, D] before a batch's sampled tokens, as the stream of this name; 0 elsewhere."""
    return {name: batch.scatter(states_before(model, batch.tokens, batch.layout(), batch.loss_index))}


def score_with_teacher(
    model: Transformer, batch: Batch, teacher_head: Tensor, *, temperature: float, is_forward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs and entropies [T] as of `score_batch`, and the KL divergence [T], all in fp32; 0 elsewhere.

    teacher_head [V, D']: on any device; the batch has `teacher_states`. is_forward: see `ChunkedDivergence`.
    Differentiable in the model's parameters. Not collective.
    """
    index = batch.loss_index
    states = states_before(model, batch.tokens, batch.layout(), index)
    head = model.lm_head.weight
    logprobs, entropies = outputs_of_head(states, head, batch.tokens[index], temperature)
    token_chunk, vocab_chunk = TOKEN_CHUNK, VOCAB_CHUNK
    if device_kernels.are_used(states.device):
        token_chunk, vocab_chunk = max(1, len(states)), chunk_width(TILES * len(states), len(head))
    divergence = ChunkedDivergence.apply(
        states,
        head,
        batch.teacher_states[index],
        teacher_head.to(states.device, non_blocking=True),
        temperature,
        is_forward,
        token_chunk,
        vocab_chunk,
    )
    return batch.scatter(logprobs), batch.scatter(entropies), batch.scatter(divergence)


class ChunkedDivergence(torch.autograd.Function):
    """KL(p || q) [M] of a policy p and a teacher q, or KL(q || p) with `is_forward`, from states and heads of both.

    States [M, D] and head [V, D] of the policy, [M, D'] and [V, D'] of the teacher. With logits z and temperature T,
    p = softmax(z / T), and q likewise, the gradients are

        d KL(p || q) / dz_j = p_j (log p_j - log q_j - KL(p || q)) / T
        d KL(q || p) / dz_j = (p_j - q_j) / T
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        temperature: float,
        is_forward: bool,
        token_chunk: int,
        vocab_chunk: int,
    ) -> Tensor:
        """See the class."""
        divisor = hidden.new_full((1, 1), temperature, dtype=at_least_fp32(hidden.dtype))
        heads = list(zip(head.split(vocab_chunk), teacher_head.split(vocab_chunk), strict=True))
        # Of each token and vocabulary chunk: logsumexps of the two, and the divergence if the token is in the chunk.
        totals = divisor.new_empty(2, len(hidden), len(heads))
        within = divisor.new_empty(len(hidden), len(heads))
        for start in range(0, len(hidden), token_chunk):
            chunk = slice(start, start + token_chunk)
            for i, (own, other) in enumerate(heads):
                logits = (
                    chunk_logits(hidden[chunk], own, divisor),
                    chunk_logits(teacher_hidden[chunk], other, divisor),
                )
                for side in range(2):
                    totals[side, chunk, i] = logits[side].logsumexp(-1)
                    logits[side].sub_(totals[side, chunk, i, None])
                p, q = reversed(logits) if is_forward else logits
                within[chunk, i] = p.exp().mul_(p - q).sum(-1)
        p, q = totals.log_softmax(-1).flip(0) if is_forward else totals.log_softmax(-1)
        divergence = (p.exp() * (within + p - q)).sum(-1)
        ctx.is_forward, ctx.token_chunk, ctx.vocab_chunk = is_forward, token_chunk, vocab_chunk
        ctx.save_for_backward(hidden, head, teacher_hidden, teacher_head, divisor, totals, divergence)
        return divergence

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See the class."""
        hidden, head, teacher_hidden, teacher_head, divisor, totals, divergence = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=divisor.dtype)
        grad_head = torch.empty_like(head)
        for first in range(0, len(head), ctx.vocab_chunk):
            words = slice(first, first + ctx.vocab_chunk)
            # In fp32: it is rounded to the head's dtype once, after the sum over all token chunks.
            grad_words = torch.zeros_like(head[words], dtype=divisor.dtype)
            for start in range(0, len(hidden), ctx.token_chunk):
                chunk = slice(start, start + ctx.token_chunk)
                p = log_softmax(chunk_logits(hidden[chunk], head[words], divisor), totals[0, chunk])
                q = log_softmax(
                    chunk_logits(teacher_hidden[chunk], teacher_head[words], divisor), totals[1, chunk]
                )
                if ctx.is_forward:
                    by_logits = p.exp_().sub_(q.exp_())
                else:
                    by_logits = p.exp().mul_(p.sub_(q).sub_(divergence[chunk, None]))
                by_logits.mul_(grad[chunk, None] / divisor)
                grad_hidden[chunk].add_(wide_mm(by_logits, head[words], head.dtype))
                grad_words.add_(wide_mm(by_logits.t(), hidden[chunk], head.dtype))
            grad_head[words] = grad_words
        return grad_hidden.to(hidden.dtype), grad_head, *[None] * 6
