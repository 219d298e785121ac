"""The flags that every script has, in the order of `--help`.

The comment after a field, or the string under it, is its help. A script's `Config` inherits `RunConfig` and
adds the flags of its objective; it declares a field again to change the default. Code reads fields flat: `config.lr`.
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
from minirl.run.flags import flag_of
from minirl.run.progress import Progress

# "auto": chosen by the free memory, see docs/memory.md.
Size = Annotated[int | Literal["auto"], tyro.conf.arg(metavar="{auto,N}")]
# The flags that name code for rollouts, and the form of the name after the file.
ROLLOUT_CODE = {"rollout": "function", "tools": "function,function", "environment": "Class"}
Correction = Literal["auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class ModelAndDataFlags:
    """Model and data"""

    model: str | None = None  # Hugging Face folder or hub id; none: a tiny embedded model
    task: Literal["auto", "sorting", "calculator", "gsm8k", "jsonl"] = "auto"
    """auto: jsonl with --data, else sorting"""
    data: str | None = None  # JSONL file of training prompts
    eval_data: tuple[str, ...] = ()  # JSONL files of held-out prompts, each with its own metric
    chat: bool = False  # wrap text prompts in the chat template, the policy's and the reward model's
    chat_template_kwargs: str | None = None
    """JSON object of further arguments for the chat templates, such as {"enable_thinking": false}"""


@dataclass(frozen=True)
class StepFlags:
    """Generate"""

    num_steps: int = 300  # steps, each with fresh rollouts
    prompts_per_step: int = 16  # prompts per step, over all ranks
    group_size: int = 8  # completions per prompt
    max_staleness: int = 0
    """most steps between a completion's first token and its update; 0: each step's completions end in it"""


@dataclass(frozen=True)
class GenerationFlags:
    """Generate"""

    max_new_tokens: int | None = None
    """most tokens in a completion, with appended ones; none: the task's (sorting 10, calculator 32, gsm8k 512,
    jsonl 256)"""
    temperature: float = 1.0  # sampling temperature; logprobs are taken at the same
    rollout: str | None = None
    """file.py:function, an `async def` that writes a rollout; none: the script's"""
    tools: str | None = None
    """file.py:function,... with type hints and docstrings that a chat model may call, like TRL's `tools`"""
    environment: str | None = None
    """file.py:Class with reset, get_reward and methods that a chat model may call, like TRL's `environment_factory`"""
    workers: int = 1
    """processes of each --reward on each rank"""
    call_timeout: float = 60.0  # seconds of a call of a --reward, or from a turn of --rollout to its next
    max_turns: int = 0  # most turns of a completion; 0: as many as the rollout asks for, up to 1,000
    cache_tokens: Size = "auto"  # tokens that a rank's key/value cache holds, per layer; auto: what fits


@dataclass(frozen=True)
class RewardFlags:
    """Reward"""

    reward: tuple[str, ...] = ()
    """file.py:function ... instead of the task's: f(prompts, completions, **columns); episode[:NAME]: the rollout's"""
    reward_model: tuple[str, ...] = ()
    """Hugging Face folders or hub ids of sequence classifiers with one label: a reward each"""
    reward_weights: tuple[float, ...] = ()  # of each --reward, --reward-model, the overlong penalty; none: 1
    overlong_buffer: float = 0.0
    """last share of --max-new-tokens, over which a penalty for each branch grows to 1; 0: none"""


@dataclass(frozen=True)
class UpdateFlags:
    """Update"""

    lr: float | None = None  # peak learning rate; none: 1e-6, 2e-4 for the embedded model; adapters: x 10
    lr_schedule: Literal["constant", "linear"] = "linear"  # after the warm-up
    warmup_updates: int = 5  # optimizer steps of linear warm-up
    num_epochs: int = 1  # passes over a step's rollouts
    num_minibatches: int | None = None  # optimizer steps per pass; none: 1, and 2 for the embedded model
    max_tokens_per_microbatch: Size = "auto"  # tokens of one forward and backward on a rank; auto: what fits
    max_grad_norm: float = 1.0  # gradient clipping, for each model separately; 0: none
    lora_rank: int = 0  # of LoRA adapters, which alone are trained; 0: none, all weights are trained


@dataclass(frozen=True)
class PolicyLossFlags:
    """Policy loss"""

    clip_low: float = 0.2  # ratios below 1 - clip_low lose their gradient if the advantage is negative
    clip_high: float = 0.2  # ratios above 1 + clip_high lose their gradient if the advantage is positive
    loss_norm: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"  # DAPO; GRPO; Dr.GRPO
    drop_truncated: bool = False
    """no loss for completions that a limit cut off; baselines still count them"""
    entropy_coef: float = 0.0  # weight of the entropy bonus
    correction: Correction = "auto"
    """importance weights between old and sampled logprobs, per token or completion, truncated or masked at 2; auto:
    token_truncate, whose weights are exactly 1 where the two logprobs are bitwise equal"""


@dataclass(frozen=True)
class RunNameFlags:
    """Run and report"""

    # torchrun reads --run as an abbreviation of its --run-path and refuses it: use --run-name there.
    run_name: Annotated[str | None, tyro.conf.arg(aliases=["--run"])] = None
    """name of the run's folder in ./runs or $MINIRL_RUNS, repeated to resume the run; none: a new one"""


@dataclass(frozen=True)
class RunAndReportFlags:
    """Run and report"""

    eval_every: int = 50  # steps between evaluations on the held-out rows; 0: only before and after
    save_every: int = 50  # steps between checkpoints, from which a run resumes; 0: only at the end
    keep_checkpoints: int = 2
    """newest checkpoints to keep, besides the best by held-out score; 0: all"""
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases


@dataclass(frozen=True)
class MachineFlags:
    """Machine"""

    seed: int = 0  # for the order of prompts and the sampling noise
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """for compute; masters are fp32; auto: bfloat16 on cuda, float32 on the CPU"""
    hang_timeout: float = 1800  # seconds for which a rank waits for another before the run ends


@dataclass(frozen=True)
class UpdateMemoryFlags:
    """Machine"""

    offload_optimizer: bool = False
    """keep fp32 masters, AdamW's moments and summed gradients in host memory, where AdamW uses more cores"""
    recompute_layers: Literal["auto", "on", "off"] = "auto"
    """recompute activations in backward: less memory, a third more time; auto: if microbatches would be small"""
    shard_weights: Literal["auto", "on", "off"] = "auto"
    """decode from the shards that training holds, all ranks together; auto: if whole weights do not fit"""
    dry_run: bool = False  # load no weights and do not train: print the plan and whether it fits
    gpus: str | None = None
    """with --dry-run, another machine: RANKSxGB, such as 8x80 for 8 GPUs of 80 GB; none: this one"""


@dataclass(frozen=True)
class RunConfig(
    UpdateMemoryFlags,
    MachineFlags,
    RunAndReportFlags,
    RunNameFlags,
    PolicyLossFlags,
    UpdateFlags,
    RewardFlags,
    GenerationFlags,
    StepFlags,
    ModelAndDataFlags,
):
    """All shared flags. (Python collects fields from the last class first.)"""

    @property
    def is_embedded(self) -> bool:
        """True if the run trains the tiny embedded model."""
        return self.model is None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The object of --chat-template-kwargs. Raises InputError if it is not a JSON object."""
        text = self.chat_template_kwargs
        if text is None:
            return {}
        arguments = None
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(text)
        if not isinstance(arguments, dict) or not arguments:
            raise InputError(
                f'--chat-template-kwargs {text[:80]}: expected a JSON object, as {{"enable_thinking": false}}'
            )
        return arguments

    @property
    def eval_rows(self) -> int:
        """The most held-out rows that are used from each file."""
        return 256

    @property
    def eval_samples(self) -> int:
        """Completions of each held-out row, sampled at the temperature; 0: one, greedy."""
        return 0

    @property
    def trains(self) -> bool:
        """False if the script only evaluates."""
        return True

    @property
    def has_reference(self) -> bool:
        """True if the run loads a reference model: a script with a KL term says when."""
        return False

    @property
    def needs_policy_logprobs(self) -> bool:
        """Whether advantages need the policy's logprobs from before the update; a script overrides this."""
        return self.has_reference

    @property
    def is_rewarded(self) -> bool:
        """True if the run trains for rewards: a script with another signal says when it does not."""
        return True

    @property
    def num_value_models(self) -> int:
        """How many value models the run trains beside the policy, all of the first one's shape."""
        return 0

    @property
    def reward_models(self) -> dict[str, str]:
        """The models of --reward-model by their rewards' names: reward_model, reward_model_2 and so on."""
        numbered = enumerate(self.reward_model, 1)
        return {f"reward_model_{number}".removesuffix("_1"): model for number, model in numbered}

    @property
    def minibatches_per_epoch(self) -> int:
        """`num_minibatches`, or its default for this model."""
        default = 2 if self.is_embedded else 1
        return self.num_minibatches or default

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per step."""
        return self.num_epochs * self.minibatches_per_epoch

    @property
    def peak_lr(self) -> float:
        """`lr`, or its default for this model."""
        default = 2e-4 if self.is_embedded else 1e-6
        return self.lr or default * (10 if self.lora_rank else 1)

    def learning_rate(self, progress: Progress, peak: float, *, first_step: int = 0) -> float:
        """The learning rate of the next optimizer step.

        After step `first_step` it rises linearly to `peak` over the warm-up, then follows the schedule: "linear" would
        reach 0 one update after the last. If a resume changes the updates per step, the place in the schedule still
        follows from the steps, and the warm-up does not begin again.
        """
        per_step = self.updates_per_step
        num_updates = (self.num_steps - first_step) * per_step
        num_done = (progress.step - first_step) * per_step + progress.update - progress.first_update
        num_warm = max(num_done, progress.update - first_step * per_step)
        if num_warm < self.warmup_updates:
            return peak * (num_warm + 1) / self.warmup_updates
        if self.lr_schedule == "constant":
            return peak
        num_sinking = max(1, num_updates - self.warmup_updates)
        return peak * min(max(0, num_updates - num_done), num_sinking) / num_sinking

    def compute_dtype(self, device_type: str) -> torch.dtype:
        """The dtype of --dtype."""
        automatic = "bfloat16" if device_type == "cuda" else "float32"
        dtype: torch.dtype = getattr(torch, automatic if self.dtype == "auto" else self.dtype)
        return dtype

    @property
    def adapters(self) -> Adapters | None:
        """The adapters of the trained models, if --lora-rank asks for them."""
        return Adapters(self.lora_rank) if self.lora_rank else None

    @property
    def importance_correction(self) -> str:
        """`correction`, or its default, which does not depend on the machine, so that a resumed run keeps it.

        Without a gap between sampled and old logprobs the default's weights are 1 and change no bit of the loss. With
        --max-staleness and no weights, the clip would bound the change over a token's whole age.
        """
        return "token_truncate" if self.correction == "auto" else self.correction


def named_folder(config: RunConfig, name: str) -> Path | None:
    """The folder of the model in this field, which only some scripts have; None without a model. Raises InputError."""
    model = getattr(config, name, None)
    return resolve_folder(model, flag=flag_of(name), with_weights=not config.dry_run) if model else None


def rollout_flags(config: RunConfig) -> list[tuple[str, str]]:
    """The flags that name code for rollouts, with their values: one, or none."""
    return [(kind, value) for kind in ROLLOUT_CODE if (value := getattr(config, kind))]
