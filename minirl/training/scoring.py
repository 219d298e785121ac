"""Run a model over a packed batch: compute logprobs and entropies of its tokens, or the outputs of a scalar head.

Element t of every per-token tensor belongs to token t. The logprob of token t, and the value of the state before token
t, come from the hidden state of token t - 1. Only `_previous_token_index` implements this shift.

Only sampled tokens go through the LM head. Logits [T, V] are never materialized, in training or under no_grad: at any
time, only the logits of one token chunk for one vocabulary chunk exist.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.errors import refuse
from minirl.model.attention import to_device
from minirl.model.batch_invariance import at_least_fp32, mm_fp32_out
from minirl.model.logprobs import (
    VOCAB_CHUNK,
    chunk_logits,
    chunk_width,
    index_in_chunk,
    log_softmax,
    logit_divisor,
)
from minirl.model.transformer import Transformer
from minirl.training.batch import Batch
from minirl.training.losses import repeat_over_tokens

TOKEN_CHUNK = 512  # tokens per chunk of logits on the CPU
# Logprobs are clamped to this minimum before they are multiplied by the probability, which is 0 at this logprob even in
# fp64. Without the clamp, -inf * 0 would be NaN.
MIN_LOGPROB = -1e4
# Logprob assigned to a sampled token outside a model's vocabulary: roughly the log of the smallest normal fp32 number.
# With -inf, the KL would be infinite and end the run.
UNKNOWN_TOKEN_LOGPROB = -87.0


def score_batch(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies, fp32 [T], of a batch's sampled tokens; 0 elsewhere.

    Each token is scored at its sampling temperature. Both results are differentiable with respect to the parameters.
    Not collective.
    """
    targets = batch.tokens[batch.loss_index]
    states, divisor = sampling_hidden_states(model, batch), token_logit_divisors(batch)
    logprobs, entropies = head_logprobs(states, model.head, targets, divisor)
    return batch.scatter_to_tokens(logprobs), batch.scatter_to_tokens(entropies)


def score_teacher(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Like `score_batch`, but for a model whose vocabulary may lack some tokens, e.g. the policy's vocabulary padding.

    A sampled token outside the model's vocabulary gets UNKNOWN_TOKEN_LOGPROB.
    """
    is_in_vocab = batch.tokens < model.config.vocab_size
    logprobs, entropies = score_batch(model, clamp_unknown_tokens(model, batch))
    return logprobs.where(is_in_vocab | ~batch.loss_mask, UNKNOWN_TOKEN_LOGPROB), entropies


def predict_values(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return a scalar head's outputs, as two per-token tensors, fp32 [T].

    At each sampled token, the first result is the value of the state before the token. At each sequence's last token,
    the second result is the value of the state after the token, which is the reward if the model is a reward model.
    Both results are 0 elsewhere, and differentiable with respect to the parameters. Not collective.
    """
    before, last = _previous_token_index(batch), batch.last_token_index
    hidden = _hidden_states_at(model, clamp_unknown_tokens(model, batch), torch.cat([before, last]))
    # Multiply and sum one state at a time, because a matmul with one column is not batch-invariant.
    upcast_dtype = at_least_fp32(hidden.dtype)
    value_head_weight = model.score.weight.to(upcast_dtype)
    head_outputs = (hidden.to(upcast_dtype) * value_head_weight).sum(-1)
    values, scores = head_outputs.split([len(before), len(last)])
    end_values = values.new_zeros(len(batch.tokens))
    end_values[last] = scores
    return batch.scatter_to_tokens(values), end_values


def clamp_unknown_tokens(model: Transformer, batch: Batch) -> Batch:
    """Map tokens missing from a teacher's or value model's vocabulary to the last token of that vocabulary.

    The policy's vocabulary may be larger than the model's.
    """
    return batch.replace(tokens=batch.tokens.clamp(max=model.config.vocab_size - 1))


def sampling_hidden_states(model: Transformer, batch: Batch) -> Tensor:
    """Return the final hidden states [M, D] that the batch's tokens were sampled from. Not collective."""
    return _hidden_states_at(model, batch, _previous_token_index(batch))


def _previous_token_index(batch: Batch) -> Tensor:
    """Return the packed-batch index of the token before each sampled token, int64 [M] (the next-token shift)."""
    return batch.loss_index - 1


def _hidden_states_at(model: Transformer, batch: Batch, token_index: Tensor) -> Tensor:
    """Return the final hidden states [n, D] of the tokens at these indices in the packed batch, int64 [n]."""
    layout = batch.layout()
    hidden = model(batch.tokens[layout.computed_tokens], layout.positions, layout)
    return hidden.index_select(0, layout.hidden_index[token_index])


def token_logit_divisors(batch: Batch) -> Tensor:
    """Return the `logit_divisor` of the sampled tokens' temperatures, [M, 1]."""
    temperatures = torch.tensor([sequence.temperature for sequence in batch.sequences])
    temperatures = to_device(temperatures, batch.tokens.device)
    return logit_divisor(repeat_over_tokens(temperatures, batch.lengths)[batch.loss_index])


def head_logprobs(states: Tensor, head: Tensor, targets: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logprobs [M] of targets [M], and the entropies [M] of their distributions. Not collective.

    states: hidden states [M, D]. head: [V, D]. divisor [M, 1]: divides the logits; see `logit_divisor`.
    """
    if states.device.type == "cpu":
        chunk_sizes = (TOKEN_CHUNK, VOCAB_CHUNK)
    else:  # all tokens at once, so that each pass reads the head's weight only once
        chunk_sizes = (max(1, len(states)), chunk_width(len(states), len(head)))
    return ChunkedLogprobs.apply(states, head, targets, divisor, *chunk_sizes)


def check_skipped_gradient(
    objective: Tensor, new: Tensor, entropy: Tensor, micro: Batch, is_skipped: Tensor | None
) -> None:
    """Reject a microbatch's objective if it has a gradient for rollouts that the script skips.

    new, entropy: the results of `score_batch` that `objective` was computed from. is_skipped: bool [P, G] over the
    step's rollouts, or None if none is skipped. Raises InputError. Not collective.
    """
    if is_skipped is None:
        return
    is_skipped_sequence = is_skipped.flatten()[micro.rollout_index]
    if not is_skipped_sequence.any():
        return
    gradients = torch.autograd.grad(objective, (new, entropy), retain_graph=True, materialize_grads=True)
    refuse(
        any(
            (micro.sequences_to_tokens(is_skipped_sequence) & (gradient.abs() > 0)).any()
            for gradient in gradients
        ),
        "skippable_rollouts: skips rollouts that have a gradient in this script's token_loss or token_advantages; move "
        "the advantage computation to `advantages`, or set is_skipped = None in main to train on all rollouts",
    )


class ChunkedLogprobs(torch.autograd.Function):
    """Logprobs [M] of targets [M], and entropies [M] of their distributions.

    The inputs are hidden states [M, D] and a head [V, D]. Only `token_chunk` x `vocab_chunk` logits exist at any time.
    Backward recomputes the logits, and also keeps one vocabulary chunk of the head's gradient in fp32.

    With logits z, temperature T (divisor [M, 1]), p = softmax(z / T), target y and entropy H, the gradients are

        d logprob / dz_j = (1[j = y] - p_j) / T
        d H / dz_j = -p_j (log p_j + H) / T
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        divisor: Tensor,
        token_chunk: int,
        vocab_chunk: int = VOCAB_CHUNK,
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        divisor = divisor.to(at_least_fp32(hidden.dtype))
        head_chunks = head.split(vocab_chunk)
        token_chunks = zip(*(x.split(token_chunk) for x in (hidden, targets[:, None], divisor)), strict=True)
        results = [_score_token_chunk(head_chunks, *chunk) for chunk in token_chunks]
        logprobs, entropies, totals = (torch.cat(parts) for parts in zip(*results, strict=True))
        # If the loss does not use the entropies, their gradient is None instead of zeros.
        ctx.set_materialize_grads(False)
        ctx.token_chunk = token_chunk
        ctx.vocab_chunk = vocab_chunk
        ctx.save_for_backward(hidden, head, targets, divisor, entropies, totals)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """See the class."""
        hidden, head, targets, divisor, entropies, totals = ctx.saved_tensors
        # The incoming gradients, multiplied by the factor 1 / T of the formulas.
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropies)
        scaled_grad_logprobs = grad_logprobs[:, None] / divisor
        entropy_grad = None if grad_entropies is None else grad_entropies[:, None] / divisor
        grad_hidden = torch.zeros_like(hidden, dtype=divisor.dtype)
        grad_head = torch.empty_like(head) if ctx.needs_input_grad[1] else None
        for i, head_chunk in enumerate(head.split(ctx.vocab_chunk)):
            chunk_start = i * ctx.vocab_chunk
            # The gradient is summed in fp32 and rounded to the head's dtype once, after the last token chunk.
            grad_head_chunk = torch.zeros_like(head_chunk, dtype=divisor.dtype)
            for start in range(0, len(hidden), ctx.token_chunk):
                chunk = slice(start, start + ctx.token_chunk)
                logits = chunk_logits(hidden[chunk], head_chunk, divisor[chunk])
                logprobs = log_softmax(logits, totals[chunk] if totals.numel() else None)
                grad_logits = _logit_gradient(
                    logprobs,
                    targets[chunk, None] - chunk_start,
                    entropies[chunk, None],
                    logprob_grad=scaled_grad_logprobs[chunk],
                    entropy_grad=None if entropy_grad is None else entropy_grad[chunk],
                )
                grad_hidden[chunk].add_(mm_fp32_out(grad_logits, head_chunk, head.dtype))
                if grad_head is not None:
                    grad_head_chunk.add_(mm_fp32_out(grad_logits.t(), hidden[chunk], head.dtype))
            if grad_head is not None:
                grad_head[chunk_start : chunk_start + ctx.vocab_chunk] = grad_head_chunk
        return grad_hidden.to(hidden.dtype), grad_head, *[None] * 4


def _score_token_chunk(
    head_chunks: Sequence[Tensor],
    hidden: Tensor,
    targets: Tensor,
    divisor: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs [n] and entropies [n] of the targets [n, 1] in one chunk of tokens, and the totals [n, chunks].

    hidden [n, D]; divisor [n, 1]: the temperatures. A total is the logsumexp of one vocabulary chunk's logits. With a
    single vocabulary chunk, totals are not needed, so the returned tensor is empty.
    """
    if len(head_chunks) == 1:
        logprobs = log_softmax(chunk_logits(hidden, head_chunks[0], divisor), None)
        target_logprobs = logprobs.gather(1, targets)[:, 0]
        return target_logprobs, _entropies(logprobs), divisor.new_empty(0)
    # Allocate the results before the loop: small tensors between the freed logits would keep malloc from reusing that
    # memory.
    chunk_logsumexps = divisor.new_empty(len(hidden), len(head_chunks))
    entropies = divisor.new_empty(len(hidden), len(head_chunks))
    target_logits = divisor.new_empty(len(hidden), 1)
    chunk_start = 0
    for i, head_chunk in enumerate(head_chunks):
        logits = chunk_logits(hidden, head_chunk, divisor)
        index, is_in_chunk = index_in_chunk(targets - chunk_start, len(head_chunk))
        target_logits.copy_(torch.where(is_in_chunk, logits.gather(1, index), target_logits))
        chunk_logsumexps[:, i] = logits.logsumexp(-1)
        # Conditional logprobs, given that the token is in this vocabulary chunk.
        logprobs = logits.sub_(chunk_logsumexps[:, i, None])
        entropies[:, i] = _entropies(logprobs)
        chunk_start += len(head_chunk)
    target_logprobs = log_softmax(target_logits, chunk_logsumexps)[:, 0]
    # The entropy of choosing a chunk, plus the mean entropy of choosing a token within a chunk.
    chunk_logprobs = torch.log_softmax(chunk_logsumexps, -1)
    entropy_terms = chunk_logprobs.exp() * (entropies - chunk_logprobs)
    return target_logprobs, entropy_terms.nan_to_num(0.0).sum(-1), chunk_logsumexps


def _entropies(logprobs: Tensor) -> Tensor:
    """Return the entropies [n] of logprobs [n, W]. Overwriting the logprobs avoids a copy and extra memory traffic."""
    logprobs.mul_(logprobs.exp()).nan_to_num_(0.0)  # 0 log 0 is 0
    return -logprobs.sum(-1)


def _logit_gradient(
    logprobs: Tensor,
    targets: Tensor,
    entropies: Tensor,
    *,
    logprob_grad: Tensor,
    entropy_grad: Tensor | None,
) -> Tensor:
    """Return the gradient with respect to the logits [n, W]; it overwrites their logprobs [n, W] in place.

    See `ChunkedLogprobs` for the formulas. targets [n, 1] count from the start of the vocabulary chunk; entropies [n,
    1] are over the whole vocabulary. logprob_grad and entropy_grad [n, 1] are the incoming gradients divided by the
    temperature; entropy_grad is None if no entropy has a gradient.
    """
    # For every token j: -p_j (logprob_grad + entropy_grad (log p_j + H)).
    grad = logprobs
    if entropy_grad is None:
        grad.exp_().mul_(-logprob_grad)
    else:
        probs = logprobs.exp()
        grad.add_(entropies).clamp_(min=MIN_LOGPROB)
        grad.mul_(entropy_grad).add_(logprob_grad)
        grad.mul_(probs.neg_())
    # If the target is in this vocabulary chunk, add logprob_grad to the target's gradient.
    index, is_in_chunk = index_in_chunk(targets, grad.shape[1])
    return grad.scatter_add_(1, index, logprob_grad * is_in_chunk)
