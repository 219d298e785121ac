"""The KL divergence between the policy and a teacher over the whole vocabulary, with gradient for the policy.

Neither's logits [T, V] ever exist as a whole: forward makes those of a few tokens, backward those of a vocabulary
chunk.
"""

from typing import Any

import torch
from torch import Tensor

from minirl.errors import refuse
from minirl.model.batch_invariance import at_least_fp32, wide_mm
from minirl.model.logprobs import MAX_LOGITS, chunk_logits
from minirl.model.transformer import Transformer
from minirl.training.batch import Batch
from minirl.training.scoring import divisor_of_batch, outputs_of_head, states_before

# Up to four tensors of a tile's size exist at the same time.
TILE_LOGITS = MAX_LOGITS // 4


def teacher_states(model: Transformer, batch: Batch) -> tuple[Tensor]:
    """The hidden states [T, D] that the batch's sampled tokens are predicted from; 0 elsewhere."""
    return (batch.scatter(states_before(model, batch)),)


def score_with_teacher(
    model: Transformer, batch: Batch, teacher: Transformer, *, is_forward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs and entropies [T] by `score_batch`, and the KL divergence [T], all in fp32; 0 elsewhere.

    The batch has `teacher_states`; only the teacher's head is used, on whatever device it is. is_forward: see
    `Divergence`. Differentiable in the model's parameters. Not collective. Raises InputError if tokens were sampled
    from truncated distributions.
    """
    refuse(
        len(batch.kept.ids),
        "--teacher-kl: compares whole vocabularies, and a turn was sampled with top_k; use --teacher-kl sampled",
    )
    index = batch.loss_index
    states = states_before(model, batch)
    head = model.lm_head.weight
    divisor = divisor_of_batch(batch)
    logprobs, entropies = outputs_of_head(states, head, batch.tokens[index], divisor)
    teacher_head = teacher.lm_head.weight.to(states.device, non_blocking=True)
    divergence = Divergence.apply(
        states, head, batch.teacher_states[index], teacher_head, divisor, is_forward
    )
    return batch.scatter(logprobs), batch.scatter(entropies), batch.scatter(divergence)


class Divergence(torch.autograd.Function):
    """KL(p || q) [M] of a policy p and a teacher q, or KL(q || p) with `is_forward`, from states and heads of both.

    States [M, D] and head [V, D] of the policy, [M, D'] and [V, D'] of the teacher. With logits z and temperature T
    (divisor [M, 1]), p = softmax(z / T), and q likewise, the gradients are

        d KL(p || q) / dz_j = p_j (log p_j - log q_j - KL(p || q)) / T
        d KL(q || p) / dz_j = (p_j - q_j) / T
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        head: Tensor,
        teacher_states: Tensor,
        teacher_head: Tensor,
        divisor: Tensor,
        is_forward: bool,
    ) -> Tensor:
        """See the class."""
        divisor = divisor.to(at_least_fp32(states.dtype))
        num_tokens = max(1, TILE_LOGITS // len(head))
        results = []
        tiles = (tensor.split(num_tokens) for tensor in (states, teacher_states, divisor))
        for own, other, temperature in zip(*tiles, strict=True):
            p, p_total = _logprobs(own, head, temperature)
            q, q_total = _logprobs(other, teacher_head, temperature)
            if is_forward:
                p, q = q, p
            results.append(((p.exp() * (p - q)).sum(-1), p_total, q_total))
        divergence, totals, teacher_totals = map(torch.cat, zip(*results, strict=True))
        ctx.is_forward = is_forward
        ctx.save_for_backward(
            states, head, totals, teacher_states, teacher_head, teacher_totals, divisor, divergence
        )
        return divergence

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See the class."""
        states, head, totals, other, other_head, other_totals, divisor, divergence = ctx.saved_tensors
        scale = grad[:, None] / divisor
        grad_states = torch.zeros_like(states, dtype=divisor.dtype)
        grad_head = torch.empty_like(head) if ctx.needs_input_grad[1] else None
        width = max(1, TILE_LOGITS // max(1, len(states)))
        for first in range(0, len(head), width):
            tile = slice(first, first + width)
            p = chunk_logits(states, head[tile], divisor).sub_(totals[:, None])
            q = chunk_logits(other, other_head[tile], divisor).sub_(other_totals[:, None])
            grad_logits = p.exp()
            if ctx.is_forward:
                grad_logits.sub_(q.exp_())
            else:
                grad_logits.mul_(p.sub_(q).sub_(divergence[:, None]))
            grad_logits.mul_(scale)
            grad_states.add_(wide_mm(grad_logits, head[tile], head.dtype))
            if grad_head is not None:
                grad_head[tile] = wide_mm(grad_logits.t(), states, head.dtype)
        return grad_states.to(states.dtype), grad_head, *[None] * 4


def _logprobs(states: Tensor, head: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs [M, V], and the logsumexp [M] of their logits. divisor [M, 1]: the temperatures."""
    logits = chunk_logits(states, head, divisor)
    totals = logits.logsumexp(-1)
    return logits.sub_(totals[:, None]), totals
