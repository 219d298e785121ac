"""Logprobs and entropies of tokens on CUDA, in few passes over the logits: the twin of `scoring.ChunkedLogprobs`.

All tokens go through the head together, a chunk of the vocabulary at a time. So the head's weights are read and its
gradient is written once per pass, and what bounds the memory is the width of the chunk. A Triton kernel reads the
logits of a chunk once: in forward it makes statistics of each row, in backward the gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirl.model.batch_invariance import at_least_fp32, head_logits, wide_mm
from minirl.model.logprobs import chunk_width, chunked_entropies, log_softmax, mask_left_out

TILE = 1024  # logits that a kernel reads at a time


class FusedLogprobs(torch.autograd.Function):
    """Logprobs and entropies [M] of targets [M], from hidden states [M, D] and a head [V, D].

    The formulas are those of `scoring.ChunkedLogprobs`. width: tokens of the vocabulary per chunk, `chunk_width` if 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        divisor: Tensor,
        width: int = 0,
        kept_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        width = width or chunk_width(len(hidden), len(head))
        head_chunks = head.split(width)
        divisor = divisor[:, 0].to(at_least_fp32(hidden.dtype))
        totals = divisor.new_empty(len(hidden), len(head_chunks))
        chunk_entropies = torch.empty_like(totals)
        target_logits = divisor.new_empty(len(hidden), 1)
        for i, head_chunk in enumerate(head_chunks):
            logits = mask_left_out(head_logits(hidden, head_chunk), kept_ids, i * width)
            # Fills in column i of totals (logsumexps) and entropies, and the logits of the targets in the chunk.
            # Without tokens the grid is empty, and Triton launches nothing.
            statistics_kernel[(len(logits),)](
                logits,
                targets,
                divisor,
                totals,
                chunk_entropies,
                target_logits,
                i * width,
                len(head_chunk),
                i,
                len(head_chunks),
                TILE=TILE,
            )
            del logits  # before the next ones are made
        entropies = chunked_entropies(totals, chunk_entropies)
        logprobs = log_softmax(target_logits, totals)[:, 0]
        ctx.set_materialize_grads(False)
        ctx.width = width
        ctx.save_for_backward(hidden, head, targets, divisor, entropies, totals.logsumexp(-1), kept_ids)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """See the class."""
        hidden, head, targets, divisor, entropies, totals, kept_ids = ctx.saved_tensors
        zeros = torch.zeros_like(entropies)
        # The incoming gradients, with the 1 / T of the formulas.
        by_logprob = (zeros if grad_logprobs is None else grad_logprobs) / divisor
        by_entropy = (zeros if grad_entropies is None else grad_entropies) / divisor
        grad_hidden = torch.zeros_like(hidden, dtype=divisor.dtype)
        grad_head = torch.empty_like(head) if ctx.needs_input_grad[1] else None
        for first in range(0, len(head), ctx.width):
            head_chunk = head[first : first + ctx.width]
            logits = mask_left_out(head_logits(hidden, head_chunk), kept_ids, first)
            grad = torch.empty_like(logits, dtype=head.dtype)
            gradient_kernel[(len(logits), -(-len(head_chunk) // TILE))](
                logits,
                targets,
                divisor,
                totals,
                entropies,
                by_logprob,
                by_entropy,
                grad,
                first,
                len(head_chunk),
                TILE=TILE,
            )
            del logits
            grad_hidden.add_(wide_mm(grad, head_chunk, head.dtype))
            if grad_head is not None:
                grad_head[first : first + ctx.width] = wide_mm(grad.t(), hidden, head.dtype)
            del grad  # before the next one is made
        return grad_hidden.to(hidden.dtype), grad_head, *[None] * 4


@triton.jit(do_not_specialize=["first", "chunk", "num_chunks"])
def statistics_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    divisor,
    totals,
    entropies,
    target_logits,
    first,
    width,
    chunk,
    num_chunks,
    TILE: tl.constexpr,
):
    """The kernel of forward: a program makes logsumexp and entropy of a row, and finds its target's logit."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(divisor + row)
    # Online, as each tile is read: the greatest logit z, the sum of e = exp(z - greatest), and that of
    # e (z - greatest). When the greatest logit rises by d, the sums become exp(-d) sum and
    # exp(-d) (moment - d sum).
    greatest = temperature * 0 - float("inf")
    total = temperature * 0
    moment = temperature * 0
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        z = tl.load(logits + row * width + column, mask=column < width, other=-float("inf")) / temperature
        new_greatest = tl.maximum(greatest, tl.max(z, 0))
        # As long as all logits are -inf, differences to 0 serve, since those to -inf are NaN.
        base = tl.where(new_greatest == -float("inf"), 0.0, new_greatest)
        e = tl.exp(z - base)
        rise = tl.where(total > 0, base - greatest, 0.0)
        shrink = tl.exp(-rise)
        moment = shrink * (moment - rise * total) + tl.sum(tl.where(e > 0, e * (z - base), 0.0), 0)
        total = shrink * total + tl.sum(e, 0)
        greatest = new_greatest
    log_total = tl.log(total)
    tl.store(totals + row * num_chunks + chunk, greatest + log_total)
    tl.store(entropies + row * num_chunks + chunk, log_total - moment / total)
    target = tl.load(targets + row) - first
    is_in_chunk = (target >= 0) & (target < width)
    target_logit = tl.load(logits + row * width + target, mask=is_in_chunk, other=0.0)
    tl.store(target_logits + row, target_logit / temperature, mask=is_in_chunk)


@triton.jit(do_not_specialize=["first"])
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    divisor,
    totals,
    entropies,
    by_logprob,
    by_entropy,
    grad,
    first,
    width,
    TILE: tl.constexpr,
):
    """The kernel of backward: a program makes the gradient of a tile of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_logit = column < width
    z = tl.load(logits + row * width + column, mask=is_logit, other=0.0) / tl.load(divisor + row)
    logprob = z - tl.load(totals + row)
    by_target = tl.load(by_logprob + row)
    # The probability is 0 where the bound acts, and without it 0 times -inf would be NaN.
    surprise = tl.maximum(logprob + tl.load(entropies + row), -1e4)
    g = -tl.exp(logprob) * (by_target + tl.load(by_entropy + row) * surprise)
    is_target = column == tl.load(targets + row) - first
    g = tl.where(is_target, g + by_target, g)
    tl.store(grad + row * width + column, g, mask=is_logit)
