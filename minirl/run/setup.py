"""Set up a run: read and check the files that the flags name, choose sizes, load models, make engine and collector.

The script makes a `Setup`, lets it load models and make the engine and the collector, and hands it to `Run`.
"""

import dataclasses
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minirl.data.messages import Tool
from minirl.data.task import RewardFunction
from minirl.episodes.collector import Collector
from minirl.episodes.episode import RolloutFunction
from minirl.episodes.runner import EpisodeRunner
from minirl.errors import refuse
from minirl.files.json_files import json_text
from minirl.generation.engine import Engine
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.model.folders import resolve_folder
from minirl.model.transformer import Transformer, is_batch_invariant
from minirl.model.weights import load_replica, truncate_vocabulary, weights_fingerprint
from minirl.ranks import launch, process_group
from minirl.ranks.process_group import (
    broadcast_object,
    gather_objects,
    print0,
    require_same,
    world_size,
)
from minirl.report.records import rollout_records
from minirl.rewards.functions import RewardLike, overlong_penalty, rewards_and_weights
from minirl.rewards.reward_model import load_reward_model
from minirl.rollouts import NO_TRUNCATION, Truncation
from minirl.run.config import RunConfig, model_folder_of_field
from minirl.run.embedded_model import embedded_model_folder
from minirl.run.flags import flag_name
from minirl.run.inputs import load_prompts, load_rewards, load_rollout, load_task
from minirl.run.planning import plan, this_machine, workload
from minirl.run.run_folder import lock_run_folder, runs_root
from minirl.training.frozen_models import FrozenModel, OutputFunction, without_adapters
from minirl.training.scoring import score_batch, score_teacher
from minirl.training.sharded_model import ShardedModel


class Setup:
    """The parts of a run. All ranks make it (collective).

    For the script: `device`, `dtype`; `model_folder` and `model_config`, to load models from; `tokenizer`, `prompts`;
    `reward_weights` fp64 [K]. Evaluations use `eval_reward_weights`, which omit the overlong penalty.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        name: str,
        rewards: Mapping[str, RewardFunction] | None = None,
        tools: Sequence[Tool] = (),
        scalar_head: bool = False,
    ):
        """`name` begins the folder's name if --run-name is not given; `rewards` replace the task's.

        scalar_head: the run trains a reward model on the layers of --model, and no policy.
        tools: chat prompts describe them to the model: JSON schemas, or functions with type hints and docstrings.
        For --dry-run the script calls `print_plan` instead, with the same rewards, tools and scalar_head.
        Raises InputError, on every rank, naming the flag, file, line or field at fault.
        """
        refuse(
            config.dry_run, "--dry-run: the script must call print_plan before Setup, as train_grpo.py does"
        )
        self.config = config
        # A fingerprint, if there is a reference with weights of its own.
        self._reference_weights: int | None = None
        self.device = process_group.start(
            shares_cores=config.offload_optimizer,
            hang_timeout=config.hang_timeout,
            may_use_cpu=config.is_embedded,
        )
        self.dtype = config.compute_dtype(self.device.type)
        new_name = time.strftime(f"{name}-%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        with lock_run_folder(config.run_name or broadcast_object(new_name)) as self.folder:
            was_evaluation = "eval_samples" in self.folder.args
            refuse(
                self.folder.args and was_evaluation == config.trains,
                f"{self.folder.path}: holds {'an evaluation' if was_evaluation else 'a training run'}; choose another "
                "--run-name",
            )
            self._user_rollout = load_rollout(config)
            self.task = load_task(config, has_rewards=rewards is not None)
            trained, logged = load_rewards(config, self.task, rewards)
            # A checkpoint of adapters has no models: they belong to those that the run began with.
            self._model_checkpoint = None if config.adapters else self.folder.checkpoint
            self.model_folder = self._model_checkpoint or self._initial_model_folder()
            self.model_config, self.prompts, self.held_out = load_prompts(
                config,
                self.task,
                self.model_folder,
                tools=tools,
                user_rollout=self._user_rollout,
                scalar_head=scalar_head,
            )
            self.tokenizer = self.prompts.tokenizer
            require_same((self.prompts.num_prompts, self.prompts.longest_prompt), "the prompts")
            self._choose_sizes()
            self._load_rewards(trained, logged)

    def _choose_sizes(self) -> None:
        """Choose sizes that fit the memory that is free now, and the source of old logprobs (collective)."""
        work = workload(
            self.config,
            self.model_config,
            this_machine(self.device),
            prompts=self.prompts,
            held_out=self.held_out,
            saved=self._model_checkpoint,
        )
        self._budget = plan(self.config, work, recorded=self.folder.args)
        launch.this_process.memory_advice = self._budget.advice
        self.sizes = self._budget.sizes
        num_parts = world_size() if self.sizes.shard_weights else 1
        is_invariant = is_batch_invariant(self.model_config, self.dtype, self.device, num_parts)
        # All ranks must score or none.
        self._is_exact = all(gather_objects(is_invariant))
        self.old_logprobs = old_logprobs_source(self.config, is_exact=self._is_exact)

    def _load_rewards(self, trained: Mapping[str, RewardLike], logged: Mapping[str, RewardLike]) -> None:
        """Load the reward models next to the sizes chosen, and put all rewards in order with their weights."""
        config = self.config
        rewards = dict(trained)
        for reward, model in config.reward_models.items():
            rewards[reward] = load_reward_model(
                resolve_folder(model, flag="--reward-model"),
                dtype=self.dtype,
                device=self.device,
                chat=config.chat,
                template_arguments=config.template_arguments,
                max_tokens=max(self.sizes.max_tokens_per_microbatch, self.prompts.max_tokens),
            )
        if config.overlong_buffer:
            limit = self.prompts.max_new_tokens
            rewards["overlong"] = overlong_penalty(limit=limit, buffer=config.overlong_buffer * limit)
        self.reward_functions, self.reward_weights = rewards_and_weights(
            rewards, config.reward_weights, logged=logged
        )
        self.eval_reward_weights = self.reward_weights.clone()
        if config.overlong_buffer:
            self.eval_reward_weights[len(rewards) - 1] = 0.0

    def checkpoint_folder(self, name: str) -> Path | None:
        """In a resumed run of whole models, the folder of a further model in the checkpoint; else None."""
        return self._model_checkpoint and self._model_checkpoint / name

    def load_model(
        self,
        model_config: ModelConfig,
        folder: Path,
        *,
        is_frozen: Callable[[str], bool] = lambda name: False,
        base: ShardedModel | None = None,
    ) -> ShardedModel:
        """A folder's model, sharded over the ranks as the flags and sizes say (collective).

        is_frozen, base: see `ShardedModel`.
        """
        return ShardedModel(
            model_config,
            folder,
            dtype=self.dtype,
            device=self.device,
            recompute_layers=self.sizes.recompute_layers,
            shard_gradients=self.sizes.shard_gradients,
            shard_weights=self.sizes.shard_weights,
            offload_optimizer=self.config.offload_optimizer,
            is_frozen=is_frozen,
            base=base,
        )

    def load_frozen(self, policy: ShardedModel) -> list[FrozenModel]:
        """The reference and the teacher, those that the flags ask for (collective).

        The reference is the model that the run began with; with adapters the policy without them, on the same storage.
        """
        models = []
        if self.config.has_reference:
            if self.config.adapters:
                models.append(self.frozen_model(policy, without_adapters(score_batch), ["ref_logprobs"]))
            else:
                source = self._initial_model_folder()
                self._reference_weights = weights_fingerprint(source)
                refuse(
                    self.folder.args.get("reference_weights") not in (None, self._reference_weights),
                    f"--model {source}: the run began with another model, which its KL terms need; give that one, "
                    "or another --run-name",
                )
                models.append(self.frozen_model(source, score_batch, ["ref_logprobs"]))
        if teacher := model_folder_of_field(self.config, "teacher"):
            models.append(self.frozen_model(teacher, score_teacher, ["teacher_logprobs"]))
        return models

    def frozen_model(
        self,
        source: ShardedModel | Path,
        outputs: OutputFunction,
        names: Sequence[str],
    ) -> FrozenModel:
        """A model that scores the rollouts of each step (collective if weights are sharded).

        source: a loaded model, or a folder to load one from, without the tokens that the policy lacks. With sharded
        weights this one's are sharded too, and InputError is raised if it has more tokens than the policy.
        """
        model: ShardedModel | Transformer
        if isinstance(source, ShardedModel):
            model = source
        elif self.sizes.shard_weights:
            config = read_config(source, scalar_head=False)
            refuse(
                config.vocab_size > self.model_config.vocab_size,
                f"{source}: has {config.vocab_size} tokens, the policy {self.model_config.vocab_size}; "
                "only --shard-weights off cuts vocabularies",
            )
            model = self.load_model(config, source, is_frozen=lambda name: True)
        else:
            model = load_replica(source, dtype=self.dtype)
            truncate_vocabulary(model, self.model_config.vocab_size)
        return FrozenModel(model, outputs, names=names, device=self.device)

    def make_collector(
        self,
        policy: ShardedModel | Transformer,
        rollout: RolloutFunction,
        *,
        num_greedy: int = 0,
        max_refills: int | None = None,
    ) -> Collector:
        """The collector, which makes each step's rollouts with their rewards. Not collective.

        policy: its engine decodes from these weights themselves. The other arguments are `Collector`'s; --rollout,
        --tools or --environment replaces `rollout`.
        """
        config, sizes = self.config, self.sizes
        model = policy.decoder if isinstance(policy, ShardedModel) else policy
        engine = Engine(
            model,
            max_running_requests=sizes.max_running_requests,
            cache_tokens=sizes.cache_tokens,
            dtype=self.dtype,
            device=self.device,
            # Ranks that pass through the model together have other batch sizes in each pass.
            cuda_graphs=False if model.shard_group is not None else None,
            keeps_cache=self._budget.fits(keeps_cache=True),
        )
        return Collector(
            engine,
            self.prompts,
            self.reward_functions,
            rollout=self._user_rollout.function if self._user_rollout else rollout,
            max_turns=config.max_turns,
            group_size=config.group_size,
            num_greedy=num_greedy,
            temperature=config.temperature,
            reward_weights=self.reward_weights,
            max_refills=max_refills,
            max_staleness=config.max_staleness,
            call_timeout=config.call_timeout,
        )

    def evaluate(
        self, evaluator: EpisodeRunner, *, weight_version: int = 0, truncation: Truncation = NO_TRUNCATION
    ) -> list[dict[str, Any]]:
        """The records of this rank's rollouts of the held-out prompts (collective if ranks share layers).

        evaluator: of `Collector.evaluator`, for these prompts. truncation: of the distributions that tokens are sampled
        from.
        """
        requests = self.held_out.requests(
            range(self.held_out.num_prompts),
            group_size=self.config.eval_samples,
            num_greedy=int(not self.config.eval_samples),
            temperature=self.config.temperature,
            truncation=truncation,
        )
        rewarded = evaluator.run(requests, weight_version=weight_version)
        return rollout_records(
            rewarded, self.reward_functions, self.tokenizer, weights=self.eval_reward_weights
        )

    def args(self) -> dict[str, Any]:
        """The content of args.json: the flags, and the values they left open."""
        config = self.config
        return {
            **vars(config),
            "lr": config.peak_lr,
            "lr_schedule": config.schedule,
            "correction": config.importance_correction,
            "num_minibatches": config.minibatches_per_epoch,
            "max_new_tokens": self.prompts.max_new_tokens,
            "task": self.task.name,
            "old_logprobs": self.old_logprobs,
            **dataclasses.asdict(self.sizes),
            "dtype": str(self.dtype),
            "device": self.device.type,
            "model": str(self.model_folder),
            "reference_weights": self._reference_weights,
            "world_size": world_size(),
            "command": sys.argv,
            "wandb_id": self.folder.args.get("wandb_id", secrets.token_hex(4)),
            "flags": vars(config),
        }

    def print_start(self) -> None:
        """Print, on rank 0, the folder, the model, the task, the sizes, and notes on the inputs."""
        is_gap_free = self._is_exact and not self.config.max_staleness
        effect = " (all weights are 1)" if is_gap_free else ""
        print0(
            f"run {self.folder.path}; the same command with --run-name {self.folder.path.name} resumes it\n"
            f"model {self.model_folder}, {world_size()} x {self.device.type} {self.dtype}, "
            f"sampled == training logprobs bitwise: {self._is_exact}, "
            f"correction: {self.config.importance_correction}{effect}\n"
            f"task {self.task.name}: {self.prompts.num_prompts} prompts, {self.held_out.num_prompts} held out"
        )
        for line in self._budget.format_plan():
            print0(f"memory {line}")
        notes = self.held_out.notes()
        if self.config.trains:
            notes = self.prompts.notes(per_step=self.config.prompts_per_step) + notes
        if self.folder.args:
            notes = self._changed_flags() + notes
        for note in notes:
            print0(f"note: {note}")

    def _changed_flags(self) -> list[str]:
        """A note on the flags that differ from those of the run's last start, if any do."""
        old = self.folder.args.get("flags", {})
        # Through JSON, like the old ones: tuples become lists.
        new = json.loads(json_text(vars(self.config)))
        changed = [
            f"{flag_name(name)} {new[name]} (was {old[name]})"
            for name in new
            if name in old and old[name] != new[name]
        ]
        return [f"this run last started with other flags: {', '.join(changed)}"] if changed else []

    def _initial_model_folder(self) -> Path:
        """The folder of --model, or of the embedded model (collective)."""
        if self.config.model is None:
            warm_start_task = "calculator" if self.config.task == "calculator" else "sorting"
            return embedded_model_folder(runs_root(), warm_start_task)
        # The ranks of an evaluation may have found different newest checkpoints.
        return resolve_folder(broadcast_object(self.config.model))


def old_logprobs_source(config: RunConfig, *, is_exact: bool) -> str:
    """The source of old logprobs: "sampled", "scored", or "auto" if the step needs none.

    is_exact: sampled logprobs equal training logprobs. With one update per step the old policy is the new one, and the
    ratio 1. But with --max-staleness older weights sampled some tokens: their ratio is to the weights that sampled
    them, unless importance weights correct for those. KL terms in the advantages are computed before the update: for
    them "auto" needs sampled logprobs that are the policy's own.
    """
    if config.max_staleness and config.correction == "none":
        return "sampled"
    is_exact &= not config.max_staleness
    if config.updates_per_step == 1 and (is_exact or not config.needs_policy_logprobs):
        return "auto"
    return "sampled" if is_exact else "scored"
