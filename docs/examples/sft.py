"""Supervised fine-tuning: train on the rows' answers instead of samples.

torchrun --standalone --nproc-per-node 2 docs/examples/sft.py --num-steps 50 --lr 1e-3     # the bundled model and task
torchrun --nproc-per-node 8 docs/examples/sft.py --model DIR --chat --data rows.jsonl --max-new-tokens 1024 --lr 1e-5

Rows: {"prompt": text or messages, "answer": text}. --reward scores greedy completions on --eval-data. Sampling and
policy-loss flags have no effect.
"""

from dataclasses import dataclass
from typing import Any

from minirl.data.prompts import PromptStream
from minirl.episodes.episode import one_turn
from minirl.errors import refuse
from minirl.ranks.process_group import rank, world_size
from minirl.report.metrics import StepMetrics
from minirl.rollouts import RolloutId, SampledSequence, concat_tokens, make_token_stream
from minirl.run.checks import check_shared_flags
from minirl.run.config import RunConfig, Schedule
from minirl.run.flags import run_script
from minirl.run.run import Run
from minirl.run.setup import Setup
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import pack, sequence_infos_from_lengths
from minirl.training.scoring import score_batch


@dataclass(frozen=True)
class Config(RunConfig):
    """The flags of this script."""

    prompts_per_step: int = 64  # rows per optimizer step, across all ranks
    num_minibatches: int | None = 1
    lr_schedule: Schedule = "linear"
    """learning rate schedule after the warm-up"""
    answer_field: str = "answer"  # [Objective] row field with the answer


def make_sequence(prompts: PromptStream, ordinal: int, field: str) -> SampledSequence:
    """Return a row's prompt with its answer and the EOS token marked as sampled. Raises InputError."""
    row = prompts.row(ordinal)
    answer = row.columns.get(field)
    refuse(not isinstance(answer, str), f"{row.origin}: no text in the field {field!r}; see --answer-field")
    prompt_ids = prompts.tokenizer.encode(row)
    ids = [*prompts.tokenizer.encode_appended(answer, row.origin), prompts.tokenizer.backend.eos_token_id]
    length = len(prompt_ids) + len(ids)
    refuse(
        length > prompts.max_tokens,
        f"{row.origin}: {length} tokens with the answer, {prompts.max_tokens} fit",
    )
    completion = make_token_stream(ids)
    completion["is_sampled"] = True
    stream = concat_tokens(make_token_stream(prompt_ids), completion)
    return SampledSequence(stream, len(prompt_ids), RolloutId(ordinal, 0), "stop")


def main(config: Config) -> int:
    """Train, and return the exit code. Runs on every rank."""
    check_shared_flags(config)
    refuse(config.updates_per_step > 1, "--num-epochs, --num-minibatches: a step is one optimizer step here")
    has_scores = config.reward or config.reward_model or not config.data
    rewards: dict[str, Any] | None = None if has_scores else {}
    if config.dry_run:
        from minirl.extras.dry_run import print_plan

        return print_plan(config, rewards=rewards)
    setup = Setup(config, name="sft", rewards=rewards)
    refuse(setup.tokenizer.backend.eos_token_id is None, "the tokenizer has no end-of-sequence token")
    policy = setup.load_model(setup.model_config, setup.model_folder)
    optimizer = policy.make_optimizer()
    collector = setup.make_collector(policy, one_turn)  # for evaluations
    run = Run(setup, {"policy": (policy, optimizer)}, collector)

    for step in run.steps():
        metrics = StepMetrics(step)
        metrics.begin("update")
        ordinals = collector.in_flight.begin_prompts(config.prompts_per_step)
        answers = [make_sequence(setup.prompts, ordinal, config.answer_field) for ordinal in ordinals]
        num_tokens = sum(answer.num_sampled_tokens for answer in answers)
        microbatches = plan_microbatches(
            sequence_infos_from_lengths(len(answer.tokens) for answer in answers),
            num_ranks=world_size(),
            max_tokens=setup.sizes.max_tokens_per_microbatch,
        )[rank()]
        for i, members in enumerate(microbatches):
            micro = pack([answers[sequence.rollout_index] for sequence in members]).to(run.device)
            logprobs, _ = score_batch(policy.module, micro)
            loss = -logprobs.sum() / num_tokens  # prompt tokens have logprob 0
            policy.backward(loss, is_last=i == len(microbatches) - 1)
            metrics.add_total("policy/loss", loss)
            metrics.add_total("count/tokens", micro.loss_mask.sum())
        lr = config.learning_rate(run.progress, config.peak_lr)
        metrics.add("optim/lr", lr)
        metrics.add("optim/grad_norm", policy.step(optimizer, lr=lr, max_grad_norm=config.max_grad_norm))
        run.progress.update += 1
        collector.in_flight.end_step(ordinals)
        run.finish_step(step, metrics)

    return run.close()


if __name__ == "__main__":
    run_script(main, Config, description=__doc__ or "")
