"""Flags that all scripts share, and values derived from the flags.

A script's `Config` inherits from `RunConfig`, adds flags for the script's objective, and redeclares fields to change
their defaults. All fields are at the top level, as in `config.lr`.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from minirl.errors import InputError
from minirl.model.config import Adapters
from minirl.model.folders import resolve_folder
from minirl.run.flags import flag_name
from minirl.run.progress import Progress

# "auto" selects a size that fits into free memory; see docs/memory.md.
Size = Annotated[int | Literal["auto"], tyro.conf.arg(metavar="{auto,N}")]
# Flags that accept rollout code; each maps to the expected format of the part after "file.py:".
ROLLOUT_CODE = {"rollout": "function", "tools": "function,function", "environment": "Class"}
Schedule = Literal["auto", "constant", "linear"]
Correction = Literal["auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class RunConfig:
    """Flags that every script has, in `--help` order.

    A field's help text is the comment after the field or the string below the field. The help text also says what a
    default of None or () means. [Title] opens a flag group in `--help`.
    """

    model: str | None = None
    """[Model and data] Hugging Face model folder or Hub id (default: a tiny bundled model)"""
    task: Literal["auto", "sorting", "calculator", "gsm8k", "jsonl"] = "auto"
    """source of prompts and rewards (auto: jsonl if --data is given, else sorting)"""
    data: str | None = None
    """training prompts: a .jsonl, .json or .parquet file, or NAME[:CONFIG[:SPLIT]], where NAME is a dataset folder or
    Hub id (default: the task's prompts)"""
    eval_data: tuple[str, ...] = ()
    """held-out prompts, in the formats of --data; each file or dataset gets its own metric (default: the task's
    held-out set, if any)"""
    chat: bool = False
    """apply the chat template to text prompts, for the policy and for --reward-model"""
    chat_template_kwargs: str | None = None
    """extra chat template arguments, as a JSON object such as {"enable_thinking": false}"""

    num_steps: int = 300
    """[Step] number of training steps, each with fresh rollouts"""
    prompts_per_step: int = 16  # number of prompts per step, across all ranks
    group_size: int = 8  # number of completions per prompt
    max_staleness: int = 0
    """maximum staleness, in steps, of a completion's first token at training time (0: completions never span steps)"""

    max_new_tokens: int | None = None
    """[Rollout] maximum completion length (tokens), including text that the rollout appends (default: 10 for
    sorting, 32 for calculator, 512 for gsm8k and jsonl)"""
    temperature: float = 1.0  # sampling temperature, also applied to training logprobs
    rollout: str | None = None
    """rollout function, an `async def`, as file.py:function (default: the script's own)"""
    tools: str | None = None
    """tools for a chat model, as file.py:function,function,...; each function needs type hints and a docstring, as for
    TRL's `tools`"""
    environment: str | None = None
    """environment for a chat model, as file.py:Class; the class has `reset`, `get_reward` and tool methods, as for
    TRL's `environment_factory`"""
    workers: int = 1  # number of worker processes per reward function and rank
    call_timeout: float = 60.0  # timeout (s) for one reward call or environment step
    max_turns: int = 0  # maximum number of turns per completion (0: only the hard limit of 1,000)
    cache_tokens: Size = "auto"  # KV cache capacity per rank, in tokens (auto: sized to fit)

    reward: tuple[str, ...] = ()
    """[Reward] reward functions, as file.py:function, called as f(prompts, completions, **columns); episode[:NAME]
    stands for a reward that the rollout returns (default: the task's rewards)"""
    reward_model: tuple[str, ...] = ()
    """reward models: Hugging Face folders or Hub ids of sequence classifiers with one label"""
    reward_weights: tuple[float, ...] = ()
    """weights of the --reward functions, the --reward-model scores and the overlong penalty, in that order (default: 1
    each)"""
    overlong_buffer: float = 0.0
    """DAPO's soft overlong penalty: ramps from 0 to 1 over this final fraction of --max-new-tokens, in each branch; 0
    disables the penalty"""

    lr: float | None = None
    """[Update] peak learning rate (default: 1e-6, or 2e-4 for the bundled model; 10 times as high with --lora-rank)"""
    lr_schedule: Schedule = "auto"
    """learning rate schedule after the warm-up (auto: constant, or linear decay to 0 for the bundled model)"""
    warmup_updates: int = 5  # number of optimizer steps of linear learning rate warm-up; 0 disables
    num_epochs: int = 1  # number of passes over each step's rollouts
    num_minibatches: int | None = None
    """number of optimizer steps per pass over the rollouts (default: 1, or 2 for the bundled model)"""
    max_tokens_per_microbatch: Size = "auto"
    """maximum number of tokens per forward and backward pass on a rank (auto: sized to fit)"""
    max_grad_norm: float = 1.0  # per-model gradient norm above which gradients are clipped; 0 disables
    lora_rank: int = 0  # LoRA rank; with LoRA, only the adapters are trained; 0 disables LoRA

    clip_low: float = 0.2
    """[Policy loss] lower clip range: ratios below 1 - clip_low get no gradient where the advantage is negative"""
    clip_high: float = 0.2
    """upper clip range: ratios above 1 + clip_high get no gradient where the advantage is positive"""
    loss_norm: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """loss normalisation: mean over all tokens (DAPO), mean of per-sequence token means (GRPO), or token sum
    divided by the number of sequences times --max-new-tokens (Dr.GRPO)"""
    drop_truncated: bool = False
    """exclude truncated completions from the loss, but not from baselines"""
    entropy_coef: float = 0.0  # coefficient of the entropy bonus; 0 disables
    correction: Correction = "auto"
    """importance sampling correction for the gap between sampled and old logprobs: per-token or per-sequence
    weights, truncated or masked above 2; without a gap, every weight is exactly 1 (auto: token_truncate)"""

    # torchrun mistakes --run for its own flag --run-path and fails, so use --run-name with torchrun.
    run_name: Annotated[str | None, tyro.conf.arg(aliases=["--run"])] = None
    """[Run and report] name of the run folder in ./runs or $MINIRL_RUNS; the name of an existing run resumes that run
    (default: script name, date and time)"""
    eval_every: int = 50  # steps between held-out evaluations (0: only before and after training)
    save_every: int = 50  # steps between checkpoints (0: only at the end)
    keep_checkpoints: int = 2
    """number of newest checkpoints to keep (0: all); the checkpoint with the best held-out score is also kept"""
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases logging mode

    seed: int = 0
    """[Machine] random seed for prompt order and sampling"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """compute dtype; master weights are fp32 (auto: bfloat16 on CUDA, float32 on the CPU)"""
    hang_timeout: float = 1800  # maximum time (s) that one rank waits for another before the run fails
    offload_optimizer: bool = False
    """keep fp32 master weights, AdamW moments and accumulated gradients in host memory, and run AdamW on the CPU"""
    recompute_layers: Literal["auto", "on", "off"] = "auto"
    """activation checkpointing: saves memory but takes a third more time (auto: on if microbatches would otherwise have
    to be smaller)"""
    shard_weights: Literal["auto", "on", "off"] = "auto"
    """decode from weights sharded across ranks, instead of a full copy on each rank (auto: on if a full copy does not
    fit)"""
    dry_run: bool = False
    """print the memory plan and whether the run fits, without loading weights or training"""
    gpus: str | None = None
    """machine that --dry-run plans for, as RANKSxGB, such as 8x80 for 8 GPUs with 80 GB each (default: this machine)"""

    # These four values are not flags, but minirl.extras.evaluate declares the first two as flags.
    eval_rows = 256  # maximum number of held-out rows per file, drawn as a fixed sample
    eval_samples = 0  # number of sampled completions per held-out row (0: one greedy completion)
    trains = True
    num_value_models = 0  # number of value models trained alongside the policy, all of the same shape

    @property
    def uses_bundled_model(self) -> bool:
        """Whether the run uses the tiny bundled model."""
        return self.model is None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Chat template arguments from --chat-template-kwargs. Raises InputError for any value but a JSON object."""
        if self.chat_template_kwargs is None:
            return {}
        text, arguments = self.chat_template_kwargs, None
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(text)
        if not isinstance(arguments, dict) or not arguments:
            raise InputError(
                f'--chat-template-kwargs {text[:80]}: must be a JSON object such as {{"enable_thinking": false}}'
            )
        return arguments

    @property
    def has_reference_model(self) -> bool:
        """Whether the run loads a reference model; a script with a KL term overrides this property."""
        return False

    @property
    def needs_policy_logprobs(self) -> bool:
        """Whether advantages need the policy's pre-update logprobs; scripts may override this property."""
        return self.has_reference_model

    @property
    def trains_on_rewards(self) -> bool:
        """Whether advantages depend on rewards; a script with another training signal overrides this property."""
        return True

    @property
    def reward_models(self) -> dict[str, str]:
        """Models from --reward-model, keyed by reward name: reward_model, reward_model_2 and so on."""
        return {f"reward_model_{i}".removesuffix("_1"): model for i, model in enumerate(self.reward_model, 1)}

    @property
    def minibatches_per_epoch(self) -> int:
        """Number of optimizer steps per pass over the rollouts: `num_minibatches`, or the model's default."""
        return self.num_minibatches or (2 if self.uses_bundled_model else 1)

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps per training step."""
        return self.num_epochs * self.minibatches_per_epoch

    @property
    def peak_lr(self) -> float:
        """Peak learning rate: `lr`, or the model's default."""
        default = 2e-4 if self.uses_bundled_model else 1e-6
        return self.lr or default * (10 if self.lora_rank else 1)

    @property
    def schedule(self) -> str:
        """Learning rate schedule: `lr_schedule`, or the model's default."""
        if self.lr_schedule != "auto":
            return self.lr_schedule
        return "linear" if self.uses_bundled_model else "constant"

    def learning_rate(self, progress: Progress, peak: float, *, first_step: int = 0) -> float:
        """Return the learning rate for the next optimizer step.

        After step `first_step`, the rate rises linearly to `peak` during the warm-up, then follows the schedule.
        The linear schedule would reach 0 one update after the last update. The schedule position is derived from the
        step. A resumed run that changes the number of updates per step therefore keeps its position and does not
        repeat a finished warm-up.
        """
        updates_per_step = self.updates_per_step
        num_done_updates = (
            (progress.step - first_step) * updates_per_step + progress.update - progress.first_update
        )
        num_warmup_updates = max(num_done_updates, progress.update - first_step * updates_per_step)
        if num_warmup_updates < self.warmup_updates:
            return peak * (num_warmup_updates + 1) / self.warmup_updates
        if self.schedule == "constant":
            return peak
        num_updates = (self.num_steps - first_step) * updates_per_step
        num_decay_updates = max(1, num_updates - self.warmup_updates)
        return peak * min(max(0, num_updates - num_done_updates), num_decay_updates) / num_decay_updates

    def compute_dtype(self, device_type: str) -> torch.dtype:
        """Return the compute dtype that --dtype selects on this device type."""
        is_bf16 = device_type == "cuda" if self.dtype == "auto" else self.dtype == "bfloat16"
        return torch.bfloat16 if is_bf16 else torch.float32

    @property
    def adapters(self) -> Adapters | None:
        """LoRA configuration of the trained models, or None if --lora-rank is 0."""
        return Adapters(self.lora_rank) if self.lora_rank else None

    @property
    def importance_correction(self) -> str:
        """Importance sampling correction: `correction`, or token_truncate for "auto".

        The default does not depend on the machine, so a run resumed elsewhere keeps the same correction. If sampled
        and old logprobs are equal, the importance weights are 1 and leave the loss bitwise unchanged. With
        --max-staleness but without importance weights, the clip would limit the policy's total change since a token
        was sampled.
        """
        return "token_truncate" if self.correction == "auto" else self.correction


def model_folder_from_config(config: RunConfig, name: str) -> Path | None:
    """Return the folder of the model that a field names, or None if the field is empty or the script lacks it.

    Raises InputError for a model that is not available.
    """
    model = getattr(config, name, None)
    if not model:
        return None
    return resolve_folder(model, flag=flag_name(name), with_weights=not config.dry_run)


def rollout_flags(config: RunConfig) -> list[tuple[str, str]]:
    """Return the name and value of each `ROLLOUT_CODE` flag in use; `check_shared_flags` allows only one such flag."""
    return [(kind, value) for kind in ROLLOUT_CODE if (value := getattr(config, kind))]
