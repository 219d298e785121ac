"""Logprobs, entropies and values of the tokens of a stream, under gradient or not, never holding logits [T, V].

Element t of every stream is about token t: its logprob, and the value of the state it was sampled in, come from the
hidden state at t - 1. That shift happens in `_states_before` and nowhere else. Only selected tokens (those the policy
sampled) pass the head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.model import batch_invariance
from minirl.model.attention import PackedLayout
from minirl.model.logprobs import chunk_logits, log_softmax, vocab_chunk_size
from minirl.model.transformer import Transformer
from minirl.ranks import watchdog
from minirl.training.batch import Batch

CHUNK = 512  # rows of logits alive at once
LOWEST = -1e4  # a logprob below it is of probability 0 in fp64 too; -inf times 0 would be NaN


def score(
    model: Transformer,
    tokens: Tensor,
    layout: PackedLayout,
    *,
    select: Tensor,
    temperature: float,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [T] in fp32 of `tokens` int64 [T] where `select` bool [T]; 0 elsewhere.

    `select` must be false at the first token of each sequence. Differentiable in the parameters. Not collective.
    """
    watchdog.heartbeat()
    hidden = model(tokens[layout.computed_tokens], layout.positions, layout)
    chosen = select.nonzero()[:, 0]
    logprobs, entropies = ChunkedLogprobs.apply(
        _states_before(hidden, chosen, layout), model.lm_head.weight, tokens[chosen], temperature, chunk
    )
    zeros = logprobs.new_zeros(len(tokens))
    return zeros.index_put((chosen,), logprobs), zeros.index_put((chosen,), entropies)


def score_batch(model: Transformer, batch: Batch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [T] in fp32 of a batch's sampled tokens; 0 elsewhere. Differentiable, not collective."""
    return score(model, batch.tokens, batch.layout(), select=batch.loss_mask, temperature=temperature)


def value_batch(model: Transformer, batch: Batch) -> Tensor:
    """Values [T] in fp32 of the states before a batch's sampled tokens; 0 elsewhere. Differentiable, not collective."""
    values, _ = scalar_outputs(model, batch.tokens, batch.layout(), select=batch.loss_mask)
    return values


def scalar_outputs(
    model: Transformer, tokens: Tensor, layout: PackedLayout, *, select: Tensor
) -> tuple[Tensor, Tensor]:
    """What a model with a scalar head says, in fp32: of the state before each selected token [T], 0 elsewhere, and of
    the state after the last token of each sequence [N].

    The first are a value model's values (`select` as in `score`), the second a reward model's scores. Differentiable in
    the parameters. Not collective.
    """
    watchdog.heartbeat()
    hidden = model(tokens[layout.computed_tokens], layout.positions, layout)
    chosen, last = select.nonzero()[:, 0], layout.hidden_index[layout.cu_seqlens[1:].long() - 1]
    states = torch.cat([_states_before(hidden, chosen, layout), hidden.index_select(0, last)])
    wide = batch_invariance.at_least_fp32(
        states.dtype
    )  # row by row: a product with one column is not batch-invariant
    values, after = (states.to(wide) * model.score.weight.to(wide)).sum(-1).split([len(chosen), len(last)])
    return values.new_zeros(len(tokens)).index_put((chosen,), values), after


def _states_before(hidden: Tensor, chosen: Tensor, layout: PackedLayout) -> Tensor:
    """Hidden states [M, D] that the tokens at `chosen` [M] were sampled from: the one next-token shift."""
    return hidden.index_select(0, layout.hidden_index[chosen - 1])


class ChunkedLogprobs(torch.autograd.Function):
    """Logprobs and entropies [M] of targets [M] from hidden [M, D] and a head [V, D].

    Holds logits of `chunk` rows and a tile of the vocabulary (`vocab_chunk_size`), and that tile's gradient of the head.
    Backward makes the logits again. With p = softmax(z / T): d logprob / dz_j = (1[j = y] - p_j) / T and
    d entropy / dz_j = -p_j (log p_j + entropy) / T.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk: int, tile: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        tile = tile or vocab_chunk_size(head.device)
        divisor = hidden.new_full((1, 1), temperature, dtype=batch_invariance.at_least_fp32(hidden.dtype))
        chunks = zip(hidden.split(chunk), targets[:, None].split(chunk), strict=True)
        parts = [_score_rows(states, head.split(tile), wanted, divisor) for states, wanted in chunks]
        logprobs, entropies, *totals = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.chunk, ctx.tile = chunk, tile
        ctx.save_for_backward(hidden, head, targets, divisor, entropies, *totals)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        """See the class."""
        hidden, head, targets, divisor, entropies, *totals = ctx.saved_tensors
        by_logprob, by_entropy = (grad[:, None] / divisor for grad in (grad_logprobs, grad_entropies))
        is_entropy_used = bool(grad_entropies.any())
        grad_hidden, grad_head = torch.zeros_like(hidden, dtype=divisor.dtype), torch.empty_like(head)
        for first in range(0, len(head), ctx.tile):
            tile = head[first : first + ctx.tile]
            grad_tile = torch.zeros_like(tile, dtype=divisor.dtype)
            for start in range(0, len(hidden), ctx.chunk):
                rows = slice(start, start + ctx.chunk)
                logits = chunk_logits(hidden[rows], tile, divisor)
                grad = log_softmax(logits, totals[0][rows] if totals else None)
                if is_entropy_used:
                    probs = grad.exp()
                    grad.add_(entropies[rows, None]).clamp_(min=LOWEST).mul_(by_entropy[rows]).add_(
                        by_logprob[rows]
                    )
                    grad.mul_(probs.neg_())
                else:
                    grad.exp_().mul_(-by_logprob[rows])
                place, is_here = _place(targets[rows, None] - first, len(tile))
                grad.scatter_add_(1, place, by_logprob[rows] * is_here)
                grad_hidden[rows].add_(batch_invariance.wide_mm(grad, tile, head.dtype))
                grad_tile.add_(batch_invariance.wide_mm(grad.t(), hidden[rows], head.dtype))
            grad_head[first : first + ctx.tile] = grad_tile
        return grad_hidden.to(hidden.dtype), grad_head, None, None, None, None


def _score_rows(
    hidden: Tensor, tiles: Sequence[Tensor], targets: Tensor, divisor: Tensor
) -> tuple[Tensor, ...]:
    """Logprobs and entropies [T] of targets [T, 1]; with several tiles also the logsumexp of each [T, tiles].

    The entropy is that of the choice of a tile and the mean of those within the tiles.
    """
    if len(tiles) == 1:
        logprobs = log_softmax(chunk_logits(hidden, tiles[0], divisor), None)
        return logprobs.gather(1, targets)[:, 0], _entropies(logprobs)
    # Results go to tensors made before the loop: small ones between freed tiles keep malloc from using those again.
    totals, entropies = divisor.new_empty(2, len(hidden), len(tiles))
    target_logits, first = divisor.new_empty(len(hidden), 1), 0
    for i, tile in enumerate(tiles):
        logits = chunk_logits(hidden, tile, divisor)
        place, is_here = _place(targets - first, len(tile))
        target_logits.copy_(torch.where(is_here, logits.gather(1, place), target_logits))
        totals[:, i] = logits.logsumexp(-1)
        entropies[:, i] = _entropies(logits.sub_(totals[:, i, None]))
        first += len(tile)
    shares = torch.log_softmax(totals, -1)
    entropy = (shares.exp() * (entropies - shares)).nan_to_num(0.0).sum(-1)
    return log_softmax(target_logits, totals)[:, 0], entropy, totals


def _entropies(logprobs: Tensor) -> Tensor:
    """Entropies [T] of logprobs [T, W], which are overwritten: a tile has few passes and one copy."""
    return -logprobs.mul_(logprobs.exp()).nan_to_num_(0.0).sum(-1)


def _place(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Where targets, counted from a tile's start, are in the tile of `width` tokens, and whether they are there."""
    place = targets.clamp(0, width - 1)
    return place, place == targets
