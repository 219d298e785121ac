"""Set up a run: check all inputs, choose sizes, load models, and create the engine and the collector.

A script creates a `Setup`, from which it gets models and a collector, and then constructs a `Run` with all three.
"""

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
from minirl.model.weights import load_unsharded_model, truncate_vocabulary, weights_fingerprint
from minirl.ranks import launch, process_group
from minirl.ranks.process_group import broadcast_object, gather_objects, print0, require_same, world_size
from minirl.report.records import rollout_records
from minirl.rewards.functions import RewardLike, overlong_penalty, rewards_and_weights
from minirl.rewards.reward_model import load_reward_model
from minirl.rollouts import NO_TRUNCATION, Truncation
from minirl.run.config import RunConfig, model_folder_from_config
from minirl.run.embedded_model import embedded_model_folder
from minirl.run.flags import flag_name
from minirl.run.inputs import load_prompts, load_rewards, load_rollout_function, load_task
from minirl.run.planning import make_workload, plan, this_machine
from minirl.run.run_folder import lock_run_folder, runs_root
from minirl.training.frozen_models import FrozenModel, OutputFunction, without_adapters
from minirl.training.scoring import score_batch, score_teacher
from minirl.training.sharded_model import ShardedModel


class Setup:
    """A run's validated inputs, sizes, models and rewards. Every rank constructs a `Setup` (collective).

    Scripts use `device`, `dtype`, `model_folder`, `model_config`, `tokenizer`, `prompts` and `reward_weights`, fp64
    [K]. Evaluations use `eval_reward_weights`, in which the overlong penalty has weight 0.
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
        """Start the process group, lock the run folder, load the task, rewards and prompts, and choose sizes.

        name: prefix of the run's name if --run-name is not given. rewards: the script's own rewards, which replace the
        task's rewards and --reward.
        scalar_head: whether the run trains a reward model on the layers of --model, instead of a policy.
        tools: tools that chat prompts describe, as JSON schemas or as functions with type hints and docstrings.
        With --dry-run, the script calls `print_plan` instead, with the same rewards, tools and scalar_head.
        Raises InputError on every rank, naming the flag, file, line or field at fault.
        """
        refuse(
            config.dry_run, "--dry-run: the script must call print_plan before Setup, as train_grpo.py does"
        )
        self.config = config
        # Fingerprint of the reference model's weights, or None if there is no separate reference model.
        self._reference_weights: int | None = None
        self.device = process_group.start(
            shares_cores=config.offload_optimizer,
            hang_timeout=config.hang_timeout,
            may_use_cpu=config.uses_bundled_model,
        )
        self.dtype = config.compute_dtype(self.device.type)
        new_run_name = time.strftime(f"{name}-%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        with lock_run_folder(config.run_name or broadcast_object(new_run_name)) as self.folder:
            if self.folder.args:
                has_evaluation = "eval_samples" in self.folder.args
                refuse(
                    has_evaluation == config.trains,
                    f"{self.folder.path}: contains {'an evaluation' if has_evaluation else 'a training run'}; choose "
                    "another --run-name",
                )
            self._user_rollout = load_rollout_function(config)
            self.task = load_task(config, has_rewards=rewards is not None)
            trained, logged = load_rewards(config, self.task)
            # An adapter checkpoint contains no full models, so a resumed run loads the initial model folders.
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
            require_same(self.prompts.prompt_lengths, "the prompts and their order")
            self._choose_sizes()
            self._load_rewards(trained if rewards is None else rewards, logged)

    def _choose_sizes(self) -> None:
        """Choose the source of old logprobs, and sizes that fit in free memory (collective)."""
        work = make_workload(
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
        num_shards = world_size() if self.sizes.shard_weights else 1
        batch_invariant = is_batch_invariant(self.model_config, self.dtype, self.device, num_shards)
        # All ranks must agree on whether to recompute old logprobs.
        self._logprobs_match = all(gather_objects(batch_invariant))
        self.old_logprobs = old_logprobs_source(self.config, logprobs_match=self._logprobs_match)

    def _load_rewards(self, trained: Mapping[str, RewardLike], logged: Mapping[str, RewardLike]) -> None:
        """Load the reward models with the chosen batch size, and pair all rewards with their weights."""
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
            max_new_tokens = self.prompts.max_new_tokens
            rewards["overlong"] = overlong_penalty(
                limit=max_new_tokens, buffer=config.overlong_buffer * max_new_tokens
            )
        self.reward_functions, self.reward_weights = rewards_and_weights(
            rewards, config.reward_weights, logged=logged
        )
        self.eval_reward_weights = self.reward_weights.clone()
        if config.overlong_buffer:
            self.eval_reward_weights[len(rewards) - 1] = 0.0

    def checkpoint_folder(self, name: str) -> Path | None:
        """Return an additional model's folder in the checkpoint, or None in a new run or with adapters."""
        return self._model_checkpoint and self._model_checkpoint / name

    def load_model(
        self,
        model_config: ModelConfig,
        folder: Path,
        *,
        is_frozen: Callable[[str], bool] = lambda name: False,
        base: ShardedModel | None = None,
    ) -> ShardedModel:
        """Load the model in a folder, sharded across ranks according to the flags and sizes (collective).

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
        """Load the reference and the teacher, if the flags require them (collective).

        The reference is the run's initial model. With adapters, the reference is the policy with its adapters disabled,
        so both share weights.
        """
        models = []
        if self.config.has_reference_model:
            if self.config.adapters:
                models.append(self.frozen_model(policy, without_adapters(score_batch), ["ref_logprobs"]))
            else:
                reference_folder = self._initial_model_folder()
                self._reference_weights = weights_fingerprint(reference_folder)
                refuse(
                    self.folder.args.get("reference_weights") not in (None, self._reference_weights),
                    f"--model {reference_folder}: not the run's initial model, which its KL terms use as the "
                    "reference; pass the initial model, or choose another --run-name",
                )
                models.append(self.frozen_model(reference_folder, score_batch, ["ref_logprobs"]))
        if teacher := model_folder_from_config(self.config, "teacher"):
            models.append(self.frozen_model(teacher, score_teacher, ["teacher_logprobs"]))
        return models

    def frozen_model(
        self,
        source: ShardedModel | Path,
        outputs: OutputFunction,
        names: Sequence[str],
    ) -> FrozenModel:
        """Return a frozen model that scores each step's rollouts (collective if weights are sharded).

        source: a loaded model, or a model folder. A model loaded from a folder is sharded if the policy is sharded;
        otherwise, the model's vocabulary is truncated to the policy's vocabulary size. Raises InputError if a sharded
        model has a larger vocabulary than the policy.
        """
        model: ShardedModel | Transformer
        if isinstance(source, ShardedModel):
            model = source
        elif self.sizes.shard_weights:
            config = read_config(source, scalar_head=False)
            refuse(
                config.vocab_size > self.model_config.vocab_size,
                f"{source} has {config.vocab_size} tokens, but the policy has only {self.model_config.vocab_size}; "
                "use --shard-weights off, which truncates the vocabulary",
            )
            model = self.load_model(config, source, is_frozen=lambda name: True)
        else:
            model = load_unsharded_model(source, dtype=self.dtype)
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
        """Create the collector, which generates and rewards each step's rollouts. Not collective.

        policy: model to generate with; the engine uses the model's weights directly, without a copy. --rollout, --tools
        or --environment, if given, replaces `rollout`. For the other arguments, see `Collector`.
        """
        config, sizes = self.config, self.sizes
        model = policy.decoder if isinstance(policy, ShardedModel) else policy
        engine = Engine(
            model,
            max_running_requests=sizes.max_running_requests,
            cache_tokens=sizes.cache_tokens,
            dtype=self.dtype,
            device=self.device,
            # Ranks that decode jointly from sharded weights have different batch sizes in each pass.
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
        """Roll out this rank's held-out prompts and return the rollouts' records (collective if weights are sharded).

        evaluator: runner from `Collector.evaluator` for these prompts. truncation: top-k and top-p truncation of the
        sampling distributions.
        """
        requests = self.held_out.requests(
            range(self.held_out.num_prompts),
            group_size=self.config.eval_samples,
            num_greedy=int(not self.config.eval_samples),
            temperature=self.config.temperature,
            truncation=truncation,
        )
        rewarded_rollouts = evaluator.run(requests, weight_version=weight_version)
        return rollout_records(
            rewarded_rollouts, self.reward_functions, self.tokenizer, weights=self.eval_reward_weights
        )

    def args(self) -> dict[str, Any]:
        """Return the content of args.json: the flags, and the values chosen for flags left unset or at "auto"."""
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
            **vars(self.sizes),
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
        """On rank 0, print the run folder, the model, the task, the sizes and notes about the inputs."""
        print0(
            f"run {self.folder.path}; the same command with --run-name {self.folder.path.name} resumes it\n"
            f"model {self.model_folder}, {world_size()} x {self.device.type} {self.dtype}, "
            f"sampled == training logprobs bitwise: {self._logprobs_match}, "
            f"correction: {self.config.importance_correction}\n"
            f"task {self.task.name}: {self.prompts.num_prompts} prompts, {self.held_out.num_prompts} held out"
        )
        for line in self._budget.format_plan():
            print0(f"memory {line}")
        notes = self._changed_flags()
        if self.config.trains:
            notes += self.prompts.notes(per_step=self.config.prompts_per_step)
        for note in notes + self.held_out.notes():
            print0(f"note: {note}")

    def _changed_flags(self) -> list[str]:
        """Return a note for each flag whose value has changed since the run's last launch."""
        old_flags = self.folder.args.get("flags", {})
        # A JSON round trip makes values comparable: tuples become lists.
        flags = json.loads(json_text(vars(self.config)))
        return [
            f"{flag_name(name)} is {value}; the run last started with {old_flags[name]}"
            for name, value in flags.items()
            if old_flags.get(name, value) != value
        ]

    def _initial_model_folder(self) -> Path:
        """Return the folder of the model given by --model, or of the bundled model (collective)."""
        if self.config.model is None:
            warm_start_task = "calculator" if self.config.task == "calculator" else "sorting"
            return embedded_model_folder(runs_root(), warm_start_task)
        # In an evaluation, ranks may find different newest checkpoints, so every rank uses rank 0's choice.
        return resolve_folder(broadcast_object(self.config.model))


def old_logprobs_source(config: RunConfig, *, logprobs_match: bool) -> str:
    """Return the source of old logprobs: "sampled", "scored", or "auto" if a step needs no old logprobs.

    logprobs_match: whether sampled logprobs are bitwise identical to training logprobs.

    With one update per step, the old policy is the current policy, so the ratio is 1 and no old logprobs are needed. KL
    terms in the advantages are computed before the update and need logprobs; with such terms, "auto" therefore also
    requires that sampled logprobs match training logprobs. With --max-staleness, some of the tokens may have been
    sampled with older weights. With --correction none, ratios are relative to the version of the policy that sampled
    the tokens; otherwise, old logprobs are scored again, or not needed.
    """
    if config.max_staleness and config.correction == "none":
        return "sampled"
    logprobs_match &= not config.max_staleness
    if config.updates_per_step == 1 and (logprobs_match or not config.needs_policy_logprobs):
        return "auto"
    return "sampled" if logprobs_match else "scored"
