"""Parts of the training loop that do not depend on the objective.

A script creates a `Run` from its `Setup`, loops over `steps`, ends each step with `finish_step` and returns the exit
code from `close`. A `Run` never calls back into the script; a fork that needs different behavior changes its own
training loop.
"""

import contextlib
import gc
import itertools
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.episodes.collector import Collector
from minirl.episodes.step_groups import Groups
from minirl.ranks import time_account
from minirl.ranks.process_group import gather_objects, print0, rank, stop_requested, world_size
from minirl.ranks.time_account import spent_on
from minirl.report.logger import Logger
from minirl.report.metrics import (
    StepMetrics,
    add_generation_metrics,
    add_reward_metrics,
    add_rollout_metrics,
    add_skipped_token_metrics,
    with_derived_metrics,
)
from minirl.report.progress_bar import show_progress
from minirl.report.records import mean_rewards, rollout_records
from minirl.run.checkpoint import Checkpoints, Models
from minirl.run.progress import Progress
from minirl.run.setup import Setup
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import Batch, Microbatch, SequenceInfo, exchange_rollouts, gather_to_rollouts
from minirl.training.frozen_models import FrozenModel
from minirl.training.losses import minibatch_index, sequence_sums
from minirl.training.scoring import score_batch
from minirl.training.sharded_model import ShardedModel


class Run:
    """A training run, from the first step to the last. Every rank constructs a `Run` (collective).

    Scripts use `device`, `max_new_tokens` and `progress`. A script increments `progress.update` after each optimizer
    step.
    """

    def __init__(
        self,
        setup: Setup,
        models: Models,
        collector: Collector | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
    ):
        """Resume from the newest checkpoint if there is one, open the logs, and evaluate before the first step.

        models: (model, optimizer) pairs, keyed by name, the policy first; checkpoints contain all of these models.
        collector: source of the training rollouts, whose engine also runs evaluations; None if the script generates
        nothing.

        extra: initial values of the script's own state, which must be the same on every rank; each save stores the
        current values from `progress.extra`. Values are JSON values and tensors, nested in dicts and lists.

        Raises InputError if this run cannot resume from the checkpoint.
        """
        self._setup = setup
        self._config = config = setup.config
        self._collector = collector
        self._evaluator = collector.evaluator(setup.held_out) if collector else None
        self._stop_signal = 0
        self.device = setup.device
        self.max_new_tokens = setup.prompts.max_new_tokens
        self._folder = setup.folder.path
        self._checkpoints = Checkpoints(self._folder, models, keep=config.keep_checkpoints)
        self.progress = Progress(extra=dict(extra or {}))
        if setup.folder.checkpoint is not None:
            saved_progress = self._checkpoints.restore(setup.folder.checkpoint)
            # Keys missing from the saved `extra` keep the script's values.
            saved_progress["extra"] = self.progress.extra | saved_progress["extra"]
            self.progress = Progress(**saved_progress)
            if collector:
                collector.in_flight.restore(self.progress.num_served, self.progress.in_flight)
            if self.progress.step >= config.num_steps:
                print0("already finished; raise --num-steps to continue the run")
        self._logger = Logger(
            self._folder,
            setup.args(),
            wandb_mode=config.wandb,
            after_step=self.progress.step,
        )
        script = Path(sys.argv[0])
        if rank() == 0 and script.suffix == ".py" and script.is_file():
            with contextlib.suppress(
                shutil.SameFileError
            ):  # the running script is already the copy in the run folder
                shutil.copyfile(script, self._folder / script.name)
        setup.print_start()
        self.progress.before = self.progress.before or self.evaluate()
        eval_rewards_text = ", ".join(f"{name} {score:.3f}" for name, score in self.progress.before.items())
        print0("held-out before training:", eval_rewards_text or "no held-out rows; see --eval-data")

    def steps(self) -> Iterator[int]:
        """Yield the remaining step numbers. If a stop is requested, end the iteration after the current step.

        Objects that exist before the first step live as long as the run, so they are excluded from garbage collection.
        """
        gc.collect()
        gc.freeze()
        time_account.this_process.begin()
        for step in range(self.progress.step + 1, self._config.num_steps + 1):
            self.progress.first_update = self.progress.update
            yield step
            if self._stop_signal:
                return

    def distribute(
        self,
        groups: Groups,
        metrics: StepMetrics,
        is_skipped: Tensor | None = None,
        *,
        streams: Mapping[str, Tensor] | None = None,
        batch_type: type[Batch] = Batch,
    ) -> tuple[Batch, list[list[Microbatch]]]:
        """Send each rollout to the rank that trains on it (collective).

        Returns this rank's batch, on the host, and the batch's microbatches, as one list per minibatch.

        is_skipped: bool [P, G], mask of rollouts to skip because their gradient is zero; if None, no rollouts are
        skipped. One sequence from the skipped rollouts still runs through the model, so that `check_skipped_gradient`
        can check that its gradient is zero, and so that the gap between sampled and training logprobs can be measured
        at every step.
        streams, batch_type: see `exchange_rollouts`.
        """
        sequences = groups.sequences
        skipped_sequences: list[SequenceInfo] = []
        if is_skipped is not None:
            is_skipped_rollout = is_skipped.flatten().tolist()
            skipped_sequences = [
                sequence for sequence in sequences if is_skipped_rollout[sequence.rollout_index]
            ]
            if skipped_sequences:
                skipped_sequences.remove(random.Random(self.progress.step).choice(skipped_sequences))
            add_skipped_token_metrics(metrics, sequences, skipped_sequences)
        trained_sequences = sorted({*sequences}.difference(skipped_sequences))
        num_minibatches = self._config.minibatches_per_epoch
        minibatch = minibatch_index(len(groups.rollout_infos), num_minibatches).tolist()
        microbatch_plan = [
            plan_microbatches(
                [sequence for sequence in trained_sequences if minibatch[sequence.rollout_index] == number],
                num_ranks=world_size(),
                max_tokens=self._setup.sizes.max_tokens_per_microbatch,
            )
            for number in range(num_minibatches)
        ]
        batch = exchange_rollouts(groups.rollouts, microbatch_plan, streams, batch_type)
        return batch, [per_rank[rank()] for per_rank in microbatch_plan]

    def score(
        self,
        batch: Batch,
        minibatches: Sequence[Sequence[Microbatch]],
        policy: ShardedModel,
        frozen: Sequence[FrozenModel],
    ) -> Batch:
        """Add old logprobs and the frozen models' per-token outputs to a batch on the host.

        Collective if weights are sharded. With one update per step, old logprobs are omitted if they would equal the
        training logprobs.
        """
        if self._setup.old_logprobs == "sampled":
            batch = batch.replace(old_logprobs=batch.sample_logprobs)
        elif self._setup.old_logprobs == "scored":
            frozen = [self._setup.frozen_model(policy, score_batch, ["old_logprobs"]), *frozen]
        if not frozen:
            return batch
        batch = batch.to(self.device)
        microbatches = list(itertools.chain(*minibatches))
        for model in frozen:
            batch = model.add_outputs(batch, show_progress("score", microbatches))
        return batch.to(torch.device("cpu"))

    @spent_on("eval")
    def evaluate(self) -> dict[str, float]:
        """Evaluate the held-out prompts; return their `mean_rewards` (collective)."""
        if self._evaluator is None:
            return {}
        local_records = self._setup.evaluate(self._evaluator, weight_version=self.progress.update)
        self._evaluator.engine.take_stats()  # keep evaluation out of the next step's metrics
        return mean_rewards(itertools.chain(*gather_objects(local_records)), self._setup.task)

    @spent_on("report")
    def log_rollouts(self, step: int, groups: Groups, batch: Batch) -> None:
        """Write the step's rollouts with their mean advantages (0 if skipped) to the run's folder (collective).

        Call this method before the update, so that rollouts are logged even if the update raises an error.
        """
        num_loss_tokens = groups.num_loss_tokens.flatten()
        advantage_sums = sequence_sums(batch.advantages, batch.lengths)
        mean_advantages = gather_to_rollouts(batch, advantage_sums, len(num_loss_tokens)) / num_loss_tokens
        is_local_rollout = [info.sequences[0].owner_rank == rank() for info in groups.rollout_infos]
        records = rollout_records(
            groups.rewarded_rollouts,
            self._setup.reward_functions,
            self._setup.tokenizer,
            weights=groups.reward_weights,
            advantage=mean_advantages[is_local_rollout].tolist(),
        )
        self._logger.log_rollouts(
            step, records, to_wandb=step == 1 or self._is_due(step, self._config.eval_every)
        )

    def finish_step(
        self,
        step: int,
        metrics: StepMetrics,
        groups: Groups | None = None,
    ) -> None:
        """Reduce and log the step's metrics; evaluate and save a checkpoint if due at this step (collective).

        groups: the step's groups of rollouts; None for a step without rollouts.
        """
        metrics.begin("report")
        progress, collector = self.progress, self._collector
        if collector:
            progress.num_served = collector.in_flight.num_served
            progress.in_flight = collector.in_flight.ordinals
        if collector and groups is not None:
            add_generation_metrics(metrics, collector.engine.take_stats())
            add_rollout_metrics(metrics, groups.rollouts, grouped_rewards=groups.weighted_rewards)
            add_reward_metrics(metrics, self._setup.reward_functions, groups.rewards)
            metrics.add_total("count/sampled_tokens", collector.counts.pop("sampled_tokens", 0))
            if self._setup.tokenizer.tools:
                for name in ("tool_results", "tool_errors"):
                    metrics.add_total(f"count/{name}", collector.counts.pop(name, 0))
            metrics.add("count/epoch", progress.num_served / self._setup.prompts.num_prompts)
        progress.evaluated = {}
        if self._is_due(step, self._config.eval_every):
            progress.evaluated = self.evaluate()
        metrics.end()
        reduced_metrics = with_derived_metrics(metrics.reduce()) | progress.evaluated
        if step == 1 and "eval/reward" in progress.before:
            reduced_metrics["eval/before"] = progress.before["eval/reward"]
        self._logger.log(step, reduced_metrics, num_steps=self._config.num_steps)
        self._stop_signal = 0 if step == self._config.num_steps else stop_requested()
        progress.step = step
        if self._stop_signal or self._is_due(step, self._config.save_every):
            self._checkpoints.save(vars(progress))

    def _is_due(self, step: int, every: int) -> bool:
        """Return whether a step is the last step or a multiple of `every` (0: only the last step)."""
        return step == self._config.num_steps or (every > 0 and step % every == 0)

    def close(self) -> int:
        """Print the scores and paths, and return the exit code (collective)."""
        self._logger.finish()
        if self._collector:
            self._collector.close()
        for name, score in self.progress.evaluated.items():
            if name in self.progress.before:
                print0(f"held-out {name}: {self.progress.before[name]:.3f} before, {score:.3f} after")
        print0(
            f"metrics    {self._folder}/metrics.jsonl (python -m minirl.extras.plot {self._folder})\n"
            f"rollouts   {self._folder}/rollouts/ (python -m minirl.extras.show {self._folder})\n"
            f"checkpoint {self._folder}/checkpoints/{self.progress.step:06d} "
            "(load with `from_pretrained`, or with PEFT's `from_pretrained` for adapters)"
        )
        return 128 + self._stop_signal if self._stop_signal else 0
