"""Train a reward model on preference pairs with the Bradley-Terry loss (arXiv:2203.02155 eq. 1).

torchrun --nproc-per-node 8 docs/examples/reward_model.py --model DIR --chat --data pairs.jsonl --eval-data other.jsonl

Rows: {"prompt": text or messages, "chosen": text, "rejected": text}. The checkpoint is a sequence classifier; use it as
`--reward-model runs/NAME/checkpoints/000300`. Sampling and policy-loss flags have no effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from minirl.data.prompts import PromptStream
from minirl.errors import refuse
from minirl.model.transformer import Transformer
from minirl.ranks.process_group import rank, world_size
from minirl.report.metrics import StepMetrics
from minirl.run.checks import check_shared_flags
from minirl.run.config import RunConfig, Schedule
from minirl.run.flags import run_script
from minirl.run.run import Run
from minirl.run.setup import Setup
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import Batch, sequence_infos_from_lengths
from minirl.training.scoring import predict_values


@dataclass(frozen=True)
class Config(RunConfig):
    """The flags of this script."""

    prompts_per_step: int = 64  # pairs per optimizer step, across all ranks
    num_minibatches: int | None = 1
    lr_schedule: Schedule = "linear"
    """learning rate schedule after the warm-up"""
    lr: float | None = 1e-5
    max_new_tokens: int | None = 1
    """tokens to generate (a reward model needs none)"""
    margin: float = 0.0  # [Objective] target margin of the chosen score over the rejected score
    center_coef: float = 0.01  # coefficient of the squared sum of both scores; keeps scores near 0
    frozen_layers: int = 0  # number of layers to freeze, from the first, with the embedding (0 disables)


# The prompt's token ids with the chosen completion, and with the rejected completion.
Pair = tuple[list[int], list[int]]


def encode_pair(prompts: PromptStream, ordinal: int) -> Pair:
    """Return a row's pair, encoded as for `--reward-model`. Raises InputError naming the row."""
    row = prompts.row(ordinal)
    sequences = []
    for field in ("chosen", "rejected"):
        text = row.columns.get(field)
        refuse(not isinstance(text, str), f"{row.origin}: no text in the field {field!r}")
        ids = prompts.tokenizer.encode_with_completion(row.prompt, text)
        refuse(len(ids) > prompts.max_tokens, f"{row.origin}: {len(ids)} tokens, {prompts.max_tokens} fit")
        sequences.append(ids)
    return sequences[0], sequences[1]


def local_microbatches(pairs: Sequence[Pair], max_tokens: int) -> list[list[Pair]]:
    """Return this rank's pairs in microbatches. Every rank has the same number of microbatches."""
    sequences = sequence_infos_from_lengths(len(chosen) + len(rejected) for chosen, rejected in pairs)
    per_rank = plan_microbatches(sequences, num_ranks=world_size(), max_tokens=max_tokens)
    return [[pairs[sequence.rollout_index] for sequence in micro] for micro in per_rank[rank()]]


def score_pairs(model: Transformer, pairs: Sequence[Pair], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the scores, fp32 [n], of the chosen and of the rejected completions."""
    sequences = [ids for pair in pairs for ids in pair]
    tokens = torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64, device=device)
    is_sampled = torch.zeros_like(tokens, dtype=torch.bool)
    batch = Batch(sequence_infos_from_lengths(map(len, sequences)), tokens, is_sampled)
    _, end_values = predict_values(model, batch)
    scores = end_values[batch.last_token_index]
    return scores[::2], scores[1::2]


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, center_coef: float = 0.0
) -> Tensor:
    """Return the Bradley-Terry loss [N] of score pairs [N], -log sigmoid(chosen - rejected - margin).

    Source: arXiv:2203.02155 eq. 1. The term center_coef * (chosen + rejected)^2 keeps scores near 0 (arXiv:2312.09244).
    """
    preference = -logsigmoid(chosen - rejected - margin)
    return preference + center_coef * (chosen + rejected).square()


def main(config: Config) -> int:
    """Train, and return the exit code. Runs on every rank."""
    check_shared_flags(config)
    refuse(config.updates_per_step > 1, "--num-epochs, --num-minibatches: a step is one optimizer step here")
    if config.dry_run:
        from minirl.extras.dry_run import print_plan

        return print_plan(config, rewards={}, scalar_head=True)
    setup = Setup(config, name="reward_model", rewards={}, scalar_head=True)
    max_tokens = setup.sizes.max_tokens_per_microbatch
    frozen = tuple(f"model.layers.{i}." for i in range(config.frozen_layers))
    frozen += ("model.embed_tokens.",) if frozen else ()
    model = setup.load_model(
        setup.model_config, setup.model_folder, is_frozen=lambda name: name.startswith(frozen)
    )
    optimizer = model.make_optimizer()
    run = Run(setup, {"reward_model": (model, optimizer)})
    held_out = [encode_pair(setup.held_out, i) for i in range(setup.held_out.num_prompts)]
    progress = run.progress

    for step in run.steps():
        metrics = StepMetrics(step)
        metrics.begin("update")
        ordinals = range(progress.num_served, progress.num_served + config.prompts_per_step)
        microbatches = local_microbatches(
            [encode_pair(setup.prompts, ordinal) for ordinal in ordinals], max_tokens
        )
        for i, pairs in enumerate(microbatches):
            chosen, rejected = score_pairs(model.module, pairs, run.device)
            losses = bradley_terry_loss(
                chosen, rejected, margin=config.margin, center_coef=config.center_coef
            )
            loss = losses.sum() / config.prompts_per_step
            model.backward(loss, is_last=i == len(microbatches) - 1)
            metrics.add_total("policy/loss", loss)
            metrics.add_values("reward/accuracy", chosen > rejected)
        lr = config.learning_rate(progress, config.peak_lr)
        metrics.add("optim/lr", lr)
        metrics.add("optim/grad_norm", model.step(optimizer, lr=lr, max_grad_norm=config.max_grad_norm))
        progress.update += 1
        progress.num_served = ordinals.stop
        if step == config.num_steps or (config.eval_every and step % config.eval_every == 0):
            for pairs in local_microbatches(held_out, max_tokens):
                with torch.no_grad():
                    chosen, rejected = score_pairs(model.decoder, pairs, run.device)
                metrics.add_values("eval/accuracy", chosen > rejected)
        run.finish_step(step, metrics)

    return run.close()


if __name__ == "__main__":
    run_script(main, Config, description=__doc__ or "")
