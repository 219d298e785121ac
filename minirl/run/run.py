"""One run of a script: all that is the same whatever the objective.

`Run` reads the files, joins the process group, opens the run's folder and loads what rewards need. The script
loads its models, calls `begin`, loops over `steps`, ends each with `finish_step`, and returns `close()`. Nothing
here calls back into the script: a fork that wants something else writes it into its own loop.
"""

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from minirl.collect.collector import Collector
from minirl.collect.rollout_workers import RolloutWorkers, load_rollout
from minirl.collect.step_groups import Groups
from minirl.data.answers import check_readable
from minirl.data.chat_turns import following_ids
from minirl.data.prompts import PromptStream
from minirl.data.task import RewardFunction, Task
from minirl.data.tokenizer import Tokenizer
from minirl.data.tools import Tool, tool_name
from minirl.episodes.episode import RolloutFunction
from minirl.episodes.limits import EpisodeLimits
from minirl.errors import InputError, refuse
from minirl.generation.engine import Engine
from minirl.model.batch_invariance import product_dtype
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.model.transformer import Transformer
from minirl.model.weights import check_weights, copy_model, load_replica, resolve_folder
from minirl.objective.advantages import weighted_scores
from minirl.objective.losses import sequence_sums
from minirl.ranks import process_group, time_account
from minirl.ranks.process_group import (
    broadcast_object,
    gather_objects,
    local_rank,
    local_world_size,
    print0,
    rank,
    stop_requested,
    world_size,
)
from minirl.ranks.time_account import spent_on
from minirl.report.logger import Logger
from minirl.report.metrics import (
    StepMetrics,
    add_rewards,
    add_rollouts,
    add_staleness,
    derived,
    without_nan,
)
from minirl.report.progress import progress_bar
from minirl.rewards.functions import EpisodeReward, OverlongPenalty, functions_and_weights
from minirl.rewards.reward_model import load_reward_model
from minirl.rewards.rewarded import RewardedRollouts, turn_rewards
from minirl.rollouts import Rollout, all_branches
from minirl.run.checkpoint import Checkpoints, Remembered
from minirl.run.config import RunConfig, check_limits, rollout_flags
from minirl.run.embedded_model import embedded_model_folder
from minirl.run.inputs import check_inputs, input_digests, keep_script
from minirl.run.load_task import EPISODE, load_task
from minirl.run.memory import (
    can_keep_cache,
    can_score_beside_cache,
    choose_sizes,
    free_bytes,
    free_host_bytes,
    gb,
    given_sizes,
    host_too_small,
    max_request_tokens,
    peak_bytes,
    too_large,
    workload,
)
from minirl.run.run_folder import open_run_folder, read_args, run_before_restart, runs_root
from minirl.training.assignment import UpdatePlan, plan_minibatches, plan_updates
from minirl.training.batch import Batch, RolloutTable, gather_to_table
from minirl.training.frozen_models import FrozenModel, Outputs, frozen_logprobs, logprobs_as
from minirl.training.learning_rate import learning_rate
from minirl.training.sharded_model import ShardedModel

ADAM_BETAS = (0.9, 0.95)
IN_FLIGHT = "in flight"  # name of the collector's part among what a checkpoint remembers
REFERENCE = "reference"  # folder in the run's folder, with the weights of the reference model
T = TypeVar("T")
Models = Mapping[str, tuple[ShardedModel, torch.optim.Optimizer]]


@dataclass
class Progress:
    """How far the run is, and what the script remembers: what a checkpoint saves beside the models.

    step: steps done. update: optimizer steps done, which is the version of the weights. num_served: prompts
    taken from the stream. before: held-out scores before training. evaluated: held-out scores of this step, if it
    was evaluated. extra, records: what the script itself has to remember, see `Run.begin`.
    """

    step: int = 0
    update: int = 0
    num_served: int = 0
    before: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    records: dict[str, list[Any]] = field(default_factory=dict)

    def to_state(self) -> dict[str, Any]:
        """JSON values for a checkpoint's manifest: all but `extra` and `records`, which have files of their own."""
        return {name: getattr(self, name) for name in _STATE_FIELDS}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "Progress":
        """The progress that was saved; {} for a new run."""
        progress = Progress(**{name: state[name] for name in _STATE_FIELDS if name in state})
        # A checkpoint of format 1 has the values of `extra` among the others.
        others = {
            name: value for name, value in state.items() if name not in (*_STATE_FIELDS, "extra", "records")
        }
        progress.extra = others | state.get("extra", {})
        progress.records = state.get("records", {})
        return progress

    def remember(
        self, extra: Mapping[str, Any], records: Mapping[str, list[Any]], *, is_forced: bool
    ) -> None:
        """Give what the script remembers its first values, where none were saved.

        In a resumed run that is refused, as is dropping what was saved, unless is_forced. Raises InputError.
        """
        for kind, saved, first in (("extra", self.extra, extra), ("records", self.records, records)):
            changes = [
                f"no {kind}[{json.dumps(name)}]: this script has" for name in first if name not in saved
            ]
            changes += [
                f"{kind}[{json.dumps(name)}]: this script has none" for name in saved if name not in first
            ]
            if self.step and changes:
                listed = f"the checkpoint has {', '.join(changes)}"
                refuse(
                    not is_forced, f"{listed}; --resume force begins with first values and drops the others"
                )
                print0(f"resuming with what this script remembers: {listed}")
        self.extra = {name: self.extra.get(name, value) for name, value in extra.items()}
        self.records = {name: self.records.get(name, value) for name, value in records.items()}


_STATE_FIELDS = ("step", "update", "num_served", "before", "evaluated")


class Run:
    """One run. All ranks make it (collective).

    For the script: `device`, `dtype`, `model_folder` and `model_config` to load models from, `prompts` and
    `reward_weights` fp64 [K] to make rollouts and scores from, `max_new_tokens`, and `progress`, which the script
    advances.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        name: str,
        rewards: Mapping[str, RewardFunction] | None = None,
        tools: Sequence[Tool] = (),
    ):
        """`name` begins the folder's name where --run-name gives none; `rewards` replace the task's.

        tools: those that chat prompts tell the model of: JSON schemas, or functions with type hints and docstrings.
        Raises InputError, on every rank, naming the flag, file, line or field that cannot be used.
        """
        refuse(config.dry_run, "--dry-run: this script lacks `if config.dry_run: return dry_run(config)`")
        self.config = config
        task = task_with_rewards(config, rewards)
        self._rollout_workers = rollout_workers(config)
        self.device = process_group.start(
            device=config.device, threads=config.threads, hang_timeout=config.hang_timeout
        )
        self._num_shards = num_shards(config)
        self.dtype = compute_dtype(config.dtype, self.device.type)
        self._flags = dataclasses.asdict(config)
        run_name = config.run_name or broadcast_object(run_before_restart())
        self._folder = open_run_folder(
            run_name or broadcast_object(time.strftime(f"{name}-%Y%m%d-%H%M%S")),
            self._flags,
            resume=config.resume,
            is_name_generated=run_name is None,
        )
        self._inputs = input_digests(config) if rank() == 0 else {}
        self._notes = check_inputs(self._folder.path, self._inputs, config)
        self.model_folder = self._folder.checkpoint or self._original_model()
        self.model_config = read_config(self.model_folder, scalar_head=False)
        check_weights(self.model_config, self.model_folder)
        self.tokenizer = load_tokenizer(config, self.model_folder, tools, self._rollout_workers)
        self.max_new_tokens = config.max_new_tokens or task.max_new_tokens
        self.prompts, self.held_out = prompt_streams(
            config, task, self.tokenizer, self.model_config, self.max_new_tokens
        )
        self.max_tokens = self.prompts.max_tokens
        self._fit_memory()
        self._eval_files = tuple(task.eval_sets)
        self._task_name = task.name
        self._reward_functions, self.reward_weights = self._load_rewards(task)
        self.is_exact = config.threads == 1 and self.model_config.is_batch_invariant(self.dtype, self.device)
        self.old_logprobs = source_of_old_logprobs(config, is_exact=self.is_exact)
        self.progress = Progress()
        self._stop_signal = 0
        self._has_finished_step = False
        self._reference_folder: Path | None = None

    def saved_folder(self, name: str) -> Path | None:
        """In a run that is resumed, the Hugging Face folder of a further model, as it was saved; else None."""
        checkpoint = self._folder.checkpoint
        return None if checkpoint is None else checkpoint / name

    def load_trainable(
        self, model_config: ModelConfig, folder: Path
    ) -> tuple[ShardedModel, torch.optim.Optimizer]:
        """A folder's model, sharded over the ranks, and its optimizer (collective)."""
        model = ShardedModel(
            model_config,
            folder,
            dtype=self.dtype,
            device=self.device,
            recompute_layers=self.sizes.recompute_layers,
            shard_gradients=self.sizes.shard_gradients,
            num_shards=self._num_shards,
            offload_optimizer=self.config.offload_optimizer,
        )
        return model, model.make_optimizer(betas=ADAM_BETAS, weight_decay=self.config.weight_decay)

    def load_reference(self) -> FrozenModel:
        """The model that the run began with, for `ref_logprobs` (collective). `begin` keeps a copy for resumes."""
        kept = self._folder.path / REFERENCE
        is_kept = self._folder.checkpoint is not None and kept.is_dir()
        self._reference_folder = kept if is_kept else self._original_model()
        model = load_replica(self._reference_folder, dtype=self.dtype)
        outputs = logprobs_as("ref_logprobs", self.config.temperature)
        return self.frozen(model, outputs, ["ref_logprobs"], park=self.config.park_frozen)

    def frozen(
        self, model: Transformer, outputs: Outputs, names: Sequence[str], *, park: bool = False
    ) -> FrozenModel:
        """A model that scores the rollouts of each step, see `FrozenModel`. Not collective."""
        max_tokens = self.sizes.max_tokens_per_microbatch
        return FrozenModel(model, outputs, names=names, device=self.device, max_tokens=max_tokens, park=park)

    def make_engine(self, policy: ShardedModel) -> Engine:
        """The generation engine, which decodes from the policy's own weights. Not collective."""
        return Engine(
            policy.decoder,
            max_running_requests=self.sizes.max_running_requests,
            cache_tokens=self.sizes.cache_tokens,
            dtype=self.dtype,
            device=self.device,
            keeps_cache=self._keeps_cache,
        )

    def make_collector(
        self,
        engine: Engine,
        rollout: RolloutFunction,
        *,
        num_greedy: int = 0,
        max_refills: int | None = None,
        frozen: Sequence[FrozenModel] = (),
    ) -> Collector:
        """What makes each step's rollouts with their rewards. Not collective.

        The arguments are `Collector`'s; --rollout, --tools or --environment takes the place of `rollout`.
        """
        return Collector(
            engine,
            self.prompts,
            self._reward_functions,
            rollout=self._rollout_workers or rollout,
            limits=EpisodeLimits(
                self.config.max_turns, self.config.max_sampled_tokens, self.config.max_episode_seconds
            ),
            group_size=self.config.group_size,
            num_greedy=num_greedy,
            temperature=self.config.temperature,
            max_refills=max_refills,
            decode_budget=self.config.decode_budget,
            max_staleness=self.config.max_staleness,
            frozen=frozen,
            scores_beside_cache=self._scores_beside_cache,
        )

    def begin(
        self,
        models: Models,
        collector: Collector,
        *,
        folders: Mapping[str, Path] | None = None,
        extra: Mapping[str, Any] | None = None,
        records: Mapping[str, list[Any]] | None = None,
        resolved: Mapping[str, Any] | None = None,
    ) -> Progress:
        """Resume from the newest checkpoint, or begin: open the logs and evaluate. Returns `progress`.

        Collective. models: by name, the policy first; each is saved with its optimizer. collector: of the training
        prompts; what it has in flight is saved, and evaluations go its way. folders: where config and tokenizer of a
        further model come from. resolved: further values for args.json that flags left open.

        extra, records: what the script has to remember between steps, with its first values; later ones are taken
        from `progress` at each save. Values are JSON's and tensors, nested in dicts and lists. `extra` is the same on
        every rank. `records` are lists of this rank's own, which are dealt out anew if the number of ranks changes.

        Raises InputError naming a value that cannot be saved, or what the checkpoint lacks.
        """
        self._collector = collector
        self._evaluator = collector.evaluator(self.held_out)
        extra, records = dict(extra or {}), dict(records or {})
        refuse(
            IN_FLIGHT in extra or IN_FLIGHT in records, f"{IN_FLIGHT}: is the collector's name, take another"
        )
        if self.config.decode_budget:
            extra[IN_FLIGHT], records[IN_FLIGHT] = self._collector.state(), self._collector.records()
        Remembered.copied(extra, records)  # before anything is made
        sources = {"policy": self.model_folder, **(folders or {})}
        self._folder = self._folder.create()
        keep = self.config.keep_checkpoints
        self._checkpoints = Checkpoints(self._folder, models, sources=sources, keep=keep)
        state = self._checkpoints.restore(self.config.num_steps)
        self.progress = Progress.from_state(state)
        self.progress.remember(extra, records, is_forced=self.config.resume == "force")
        self._collector.num_served = self.progress.num_served
        if self.config.decode_budget:
            self._collector.restore(self.progress.extra[IN_FLIGHT], self.progress.records[IN_FLIGHT])
        self._logger = Logger(
            self._folder.path,
            self._flags
            | self._resolved()
            | dict(resolved or {})
            | {"flags": self._flags, "inputs": self._inputs},
            wandb_mode=self.config.wandb,
            after_step=self.progress.step,
            keep_rollouts=self.config.keep_rollouts,
        )
        if rank() == 0:
            keep_script(self._folder.path, step=self.progress.step)
            self._keep_reference()
        self._print_start()
        self.progress.before = self.progress.before or self.evaluate()
        scores = ", ".join(f"{name} {score:.3f}" for name, score in self.progress.before.items())
        print0("held-out before training:", scores or "no held-out rows; see --eval-data")
        return self.progress

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to do, until the last one or the one in which a signal asked for a stop.

        What is loaded by then stays for the run, so no garbage collection looks through it again.
        """
        gc.collect()
        gc.freeze()
        time_account.this_process.begin()
        for step in range(self.progress.step + 1, self.config.num_steps + 1):
            yield step
            if self._stop_signal:
                return

    def show_progress(self, name: str, parts: Sequence[T]) -> Iterator[T]:
        """The microbatches one by one; if that takes long, a bar in the terminal counts them. Not collective."""
        with progress_bar(name, total=len(parts), unit="microbatches") as bar:
            for part in parts:
                yield part
                bar.update()

    def turn_rewards(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """The stream of that name of these rollouts, for `exchange`; none if no reward is an episode's.

        Not collective.
        """
        weights: dict[str, float] = {}
        for function, weight in zip(
            self._reward_functions.values(), self.reward_weights.tolist(), strict=True
        ):
            if isinstance(function, EpisodeReward):
                weights[function.reward_name] = weights.get(function.reward_name, 0.0) + weight
        return {"turn_rewards": turn_rewards(rollouts, weights)} if weights else {}

    def minibatches(self, table: RolloutTable) -> list[list[int]]:
        """The table indices of the branches of each optimizer step of an epoch. Not collective."""
        return plan_minibatches(table.episode.tolist(), self.config.minibatches_per_epoch)

    def plan_updates(self, table: RolloutTable, is_trained: Tensor | None = None) -> UpdatePlan:
        """Which rank trains on which branches in which microbatch; the same on every rank. Not collective.

        is_trained bool [N]: the branches in microbatches; None: all. Where it names none the first branch is in one, so
        that the gap of sampled logprobs is measured in every step. Minibatches are the same without it.
        """
        if is_trained is not None and not is_trained.any():
            is_trained = torch.arange(len(is_trained)) == 0
        return plan_updates(
            table.num_tokens.tolist(),
            table.prefixes,
            num_minibatches=self.config.minibatches_per_epoch,
            num_ranks=world_size(),
            max_tokens=self.sizes.max_tokens_per_microbatch,
            episode=table.episode.tolist(),
            is_trained=None if is_trained is None else is_trained.tolist(),
        )

    def with_old_logprobs(
        self, batch: Batch, policy: ShardedModel, microbatches: Sequence[list[int]]
    ) -> Batch:
        """The batch with its old logprobs, unless one update per step makes them the new ones, detached."""
        if self.old_logprobs == "sampled":
            return batch.replace(old_logprobs=batch.sample_logprobs)
        if self.old_logprobs == "scored":
            shown = self.show_progress("score", microbatches)
            scored = frozen_logprobs(policy.decoder, batch, shown, self.config.temperature)
            return batch.replace(old_logprobs=scored)
        return batch

    def learning_rate(self, peak: float, *, first_update: int = 0) -> float:
        """Learning rate of the present optimizer step; the schedule begins at `first_update`."""
        return learning_rate(
            self.progress.update - first_update,
            self.config.num_updates - first_update,
            peak=peak,
            warmup_updates=self.config.warmup_updates,
            schedule=self.config.lr_schedule,
        )

    @spent_on("eval")
    def evaluate(self) -> dict[str, float]:
        """Mean scores of greedy completions of the held-out rows, without the overlong penalty (collective)."""
        requests = self.held_out.requests(0, self.held_out.num_prompts, group_size=0, num_greedy=1)
        rewarded = self._evaluator.run(requests, weight_version=self.progress.update)
        self._evaluator.engine.take_stats()  # dropped: the next step's metrics are about that step alone
        is_score = torch.tensor([name != "overlong" for name in self._reward_functions])
        scores = weighted_scores(rewarded.rewards, self.reward_weights * is_score)
        metrics = StepMetrics()
        metrics.add_values("eval/reward", without_nan(scores))
        add_rewards(metrics, "eval", self._reward_functions, rewarded.rewards)
        if len(self._eval_files) > 1:
            files = [row.place.rpartition(":")[0] for row in rewarded.rows]
            for path in self._eval_files:
                of_file = scores[[i for i, file in enumerate(files) if file == path]]
                metrics.add_values(f"eval/{Path(path).stem}/reward", without_nan(of_file))
        return metrics.reduce()

    def log_rollouts(self, step: int, rewarded: RewardedRollouts, table: RolloutTable, batch: Batch) -> None:
        """Write the step's rollouts with their mean advantages to the run's folder (collective).

        To be called before the update, which may be refused.
        """
        sums = gather_to_table(batch, sequence_sums(batch.advantages, batch.lengths), len(table.num_tokens))
        mean_advantages = table.sum_branches(sums) / table.sum_branches(table.num_loss_tokens)
        own_episodes = table.episode[table.indices_of(rewarded.rollouts)]
        own_branches = table.indices_of(all_branches(rewarded.rollouts))
        branch_scores = weighted_scores(table.branch_rewards, self.reward_weights)
        self._logger.log_rollouts(
            step,
            rewarded,
            self._reward_functions,
            reward=weighted_scores(rewarded.rewards, self.reward_weights),
            advantage=mean_advantages[own_episodes],
            of_branches={
                "reward": branch_scores[own_branches],
                "advantage": (sums / table.num_loss_tokens)[own_branches],
            },
        )

    def finish_step(self, step: int, metrics: StepMetrics, groups: Groups, scores: Tensor) -> None:
        """Add up and log the metrics of the step with these groups, evaluate and save where due (collective).

        scores fp64 [P, G]: the weighted sums of rewards of all groups, equal on every rank; NaN without one.
        """
        is_last = step == self.config.num_steps
        rewarded = groups.rewarded
        add_rollouts(
            metrics,
            rewarded.rollouts,
            grouped_rewards=scores,
            branch_rewards=weighted_scores(groups.branch_rewards, self.reward_weights),
        )
        updates_per_step = self.config.updates_per_step
        sampled_version = self.progress.update - updates_per_step  # that of this step
        add_staleness(metrics, rewarded.rollouts, sampled_version, updates_per_step=updates_per_step)
        add_rewards(metrics, "reward", self._reward_functions, rewarded.rewards)
        metrics.add_values("reward/errors", rewarded.failed)
        if self.config.decode_budget is not None:
            metrics.add_total("count/restarted", self._collector.take_count("restarted"))
        if self.config.on_rollout_error == "end":
            metrics.add_total("count/rollout_errors", self._collector.take_count("rollout_errors"))
        if self.tokenizer.tools:
            metrics.add_total("count/tool_results", self._collector.take_count("tool_results"))
            metrics.add_total("count/tool_errors", self._collector.take_count("tool_errors"))
        self.progress.num_served = self._collector.num_served
        metrics.add("count/epoch", self.prompts.epoch(self.progress.num_served))
        evaluates = is_last or _is_due(step, self.config.eval_every)
        self.progress.evaluated = self.evaluate() if evaluates else {}
        metrics.end()
        numbers = derived(metrics.reduce()) | self.progress.evaluated
        self._logger.log(step, numbers, num_steps=self.config.num_steps)
        self._stop_signal = 0 if is_last else stop_requested()
        self.progress.step = step
        if is_last or self._stop_signal or _is_due(step, self.config.save_every):
            score = self.progress.evaluated.get("eval/reward")
            if self.config.decode_budget:
                self.progress.extra[IN_FLIGHT] = self._collector.state()
                self.progress.records[IN_FLIGHT] = self._collector.records()
            self._checkpoints.save(
                self.progress.to_state(),
                extra=self.progress.extra,
                records=self.progress.records,
                score=score,
            )
        elif not self._has_finished_step:
            # What cannot be saved is refused now, not when many steps would be lost.
            Remembered.copied(self.progress.extra, self.progress.records)
        self._has_finished_step = True

    def close(self) -> int:
        """Wait for the last save, print what was reached and where it is; returns the exit code (collective)."""
        saved = self._checkpoints.finish()
        self._logger.finish()
        for name, score in self.progress.evaluated.items():
            before = self.progress.before.get(name)
            if before is not None:
                print0(f"held-out {name}: {before:.3f} before, {score:.3f} after")
        folder = self._folder.path
        print0(f"metrics    {folder}/metrics.jsonl (python -m minirl.plot {folder})")
        print0(f"rollouts   {folder}/rollouts/ (python -m minirl.show {folder})")
        print0(f"checkpoint {saved} (AutoModelForCausalLM.from_pretrained loads it)")
        return 128 + self._stop_signal if self._stop_signal else 0

    def _original_model(self) -> Path:
        """The folder of --model, or of the embedded model (collective)."""
        if self.config.model is None:
            return embedded_model_folder(runs_root(), self.config.warm_start_task)
        return resolve_folder(self.config.model)

    def _keep_reference(self) -> None:
        """Copy the reference's weights into the run's folder, unless they come from there. On rank 0.

        Raises InputError if the disk is full.
        """
        kept = self._folder.path / REFERENCE
        if self._reference_folder in (None, kept):
            return
        try:
            copy_model(self._reference_folder, kept)
        except OSError as error:
            raise InputError(f"{kept}: the reference model cannot be copied there: {error}") from None

    def _fit_memory(self) -> None:
        """Choose the sizes that flags leave open, and what stays in memory beside the cache (collective).

        Raises InputError if nothing fits.
        """
        recorded = broadcast_object(read_args(self._folder.path) if rank() == 0 else None)
        given = given_sizes(self.config, recorded=recorded)
        work = workload(
            self.config,
            policy_folder=self.model_folder,
            value_folder=self.saved_folder("value"),
            streams=(self.prompts, self.held_out),
            dtype=self.dtype,
            device_type=self.device.type,
            num_ranks=world_size(),
            num_shards=self._num_shards,
        )
        free = min(gather_objects(free_bytes(self.device)))
        self.sizes = sizes = choose_sizes(work, free, given)
        on_host = host_too_small(work, num_ranks=local_world_size(), free=free_host_bytes())
        # Of the first host on which it is too little.
        on_hosts = next(filter(None, gather_objects(on_host)), None)
        reason = too_large(work, sizes, free) or on_hosts
        refuse(
            reason and "auto" in given.values(),
            f"{reason}. With all sizes given it starts anyway: {sizes.flags()}",
        )
        self._keeps_cache = can_keep_cache(work, sizes, free)
        self._scores_beside_cache = can_score_beside_cache(work, sizes, free)
        peak = peak_bytes(work, sizes, keeps_cache=self._keeps_cache)
        kept = ", the cache kept between steps" if self._keeps_cache else ""
        self._memory_note = f"{sizes.flags()}: at most {gb(peak)} of {gb(free)} on each rank{kept}"

    def _load_rewards(self, task: Task) -> tuple[dict[str, RewardFunction], Tensor]:
        """The task's rewards, the reward model and the overlong penalty, and the weight of each."""
        config = self.config
        rewards = dict(task.rewards)
        if config.reward_model:
            rewards["reward_model"] = load_reward_model(
                resolve_folder(config.reward_model, flag="--reward-model"),
                dtype=self.dtype,
                device=self.device,
                chat=config.chat,
                template_arguments=config.template_arguments,
                max_tokens=max(self.sizes.max_tokens_per_microbatch, self.max_tokens),
                park=config.park_frozen,
            )
        if config.overlong_buffer:
            buffer = config.overlong_buffer * self.max_new_tokens
            rewards["overlong"] = OverlongPenalty(limit=self.max_new_tokens, buffer=buffer)
        return functions_and_weights(rewards, config.reward_weights, logged=task.extra_scores)

    def _resolved(self) -> dict[str, Any]:
        """For args.json, what flags left open."""
        return {
            "lr": self.config.peak_lr,
            "correction": self.config.importance_correction,
            "num_minibatches": self.config.minibatches_per_epoch,
            "max_new_tokens": self.max_new_tokens,
            "task": self._task_name,
            "old_logprobs": self.old_logprobs,
            **dataclasses.asdict(self.sizes),
            "dtype": str(self.dtype),
            "device": self.device.type,
            "model": str(self.model_folder),
            "world_size": world_size(),
            "command": sys.argv,
            "launcher": process_group.launcher(),
        }

    def _print_start(self) -> None:
        ranks = f"{world_size()} x {self.device.type} {self.dtype}"
        print0(f"model {self.model_folder}, {ranks}, sampled == training logprobs bitwise: {self.is_exact}")
        counts = f"{self.prompts.num_prompts} prompts, {self.held_out.num_prompts} held out"
        print0(f"task {self._task_name}: {counts}")
        print0(f"sizes {self._memory_note}")
        for note in (
            self._notes + self.prompts.notes(per_step=self.config.prompts_per_step) + self.held_out.notes()
        ):
            print0(f"note: {note}")


def task_with_rewards(config: RunConfig, rewards: Mapping[str, RewardFunction] | None) -> Task:
    """The task that the flags ask for, with its own rewards or these. Raises InputError."""
    task = load_task(
        config.task,
        data=config.data,
        eval_data=config.eval_data,
        prompt_field=config.prompt_field,
        reward=config.reward,
        reward_timeout=config.reward_timeout,
        on_reward_error=config.on_reward_error,
        reward_workers=config.reward_workers,
        reward_model=config.reward_model,
        has_environment=bool(config.environment),
    )
    return task if rewards is None else dataclasses.replace(task, rewards=rewards)


def rollout_workers(config: RunConfig) -> RolloutWorkers | None:
    """The function of --rollout, --tools or --environment in its processes; None without one.

    Raises InputError. Not collective.
    """
    flags = rollout_flags(config)
    if not flags:
        return None
    ((kind, spec),) = flags
    workers = load_rollout(
        spec,
        kind=kind,
        timeout_s=config.reply_timeout,
        on_error=config.on_rollout_error,
        num_workers=config.rollout_workers,
    )
    given = {EPISODE} if workers.gives_reward else set()
    for reward in config.reward:
        refuse(
            kind != "rollout" and reward.partition(":")[0] == EPISODE and reward not in given,
            f"--reward {reward}: --{kind} {spec} gives no such reward; an --environment gives --reward {EPISODE} if it "
            "has `get_reward(self)`. Or write a function of completions or `environments`: --reward FILE.py:FUNCTION",
        )
    return workers


def load_tokenizer(
    config: RunConfig, folder: Path, tools: Sequence[Tool], workers: RolloutWorkers | None
) -> Tokenizer:
    """The tokenizer, whose prompts tell of the script's tools or of those of --tools or --environment.

    Raises InputError if the calls of the latter cannot be read, or their results not written, and for arguments that
    change no prompt.
    """
    called = [] if workers is None else workers.tools
    refuse(
        bool(tools and called),
        "--tools or --environment: this script tells of tools of its own, which nobody calls; use --rollout",
    )
    tokenizer = Tokenizer(
        folder,
        chat=config.chat,
        template_arguments=config.template_arguments,
        tools=tools or called,
        tool_format=config.tool_format,
    )
    tokenizer.check_arguments("--chat-template-kwargs")
    if called:
        check_readable(tokenizer)
        result = {"role": "tool", "name": tool_name(called[0]), "content": "a"}
        following_ids(tokenizer, [result], "the result of a tool", end_id=None)
    return tokenizer


def prompt_streams(
    config: RunConfig, task: Task, tokenizer: Tokenizer, model_config: ModelConfig, max_new_tokens: int
) -> tuple[PromptStream, PromptStream]:
    """The training prompts and the held-out ones (collective, as `PromptStream`).

    Raises InputError naming rows and flags.
    """
    check_limits(config, max_new_tokens)
    max_tokens = max_request_tokens(config, model_config, max_new_tokens)
    refuse(
        config.chat_template_kwargs and not any(tokenizer.is_chat(row.prompt) for row in task.train_rows),
        f"--chat-template-kwargs {config.chat_template_kwargs}: has no effect on text prompts; see --chat",
    )
    held_out = [row for rows in task.eval_sets.values() for row in rows[: config.eval_rows]]
    train, held_out_stream = (
        PromptStream(
            rows,
            tokenizer,
            purpose=purpose,
            seed=config.seed,
            max_tokens=max_tokens,
            max_new_tokens=max_new_tokens,
            vocab_size=model_config.vocab_size,
            long_prompts=config.long_prompts,
        )
        for purpose, rows in (("train", task.train_rows), ("eval", held_out))
    )
    return train, held_out_stream


def compute_dtype(name: str, device_type: str) -> torch.dtype:
    """The dtype of --dtype; rank 0 prints a note if this CPU has no instructions for it."""
    if name == "auto":
        return torch.bfloat16 if device_type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    if device_type == "cpu" and product_dtype(dtype) != dtype:
        print0(
            f"note: --dtype {name}: this CPU has no bf16 instructions, so products are computed in float32 and "
            "rounded; --dtype float32 is faster"
        )
    return dtype


def num_shards(config: RunConfig) -> int:
    """How many ranks hold a model's shards together (collective).

    Raises InputError, on every rank, if they are a node's and nodes have unequal numbers of ranks.
    """
    if config.shard_over == "world":
        return world_size()
    places = gather_objects((local_rank(), local_world_size()))
    size = places[0][1]
    expected = [(r % size, size) for r in range(world_size())]
    listed = ", ".join(f"{place} of {of_node}" for place, of_node in places)
    refuse(
        places != expected or world_size() % size,
        f"--shard-over node: nodes need equally many ranks, numbered one node after another as by torchrun; in their "
        f"nodes they are {listed}. Start as many on each (--nproc-per-node), or take --shard-over world",
    )
    return size


def source_of_old_logprobs(config: RunConfig, *, is_exact: bool) -> str:
    """Where old logprobs come from: "sampled", "scored", or "auto" if none are needed.

    is_exact: whether sampled logprobs equal training logprobs. With one update per step the old policy is the new one,
    and the ratio 1. But with a decode budget some tokens were sampled by older weights: then the ratio is to the
    weights that sampled them, unless importance weights correct it.
    """
    if config.old_logprobs != "auto":
        return config.old_logprobs
    is_corrected = config.importance_correction != "none"
    is_partial = config.decode_budget is not None
    if config.updates_per_step == 1 and (is_corrected or not is_partial):
        return "auto"
    return "sampled" if (is_exact or is_partial) and not is_corrected else "scored"


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
