"""The flags that every script has, in the groups of `--help`.

The comment after a field, or the string under it, is its help. A script's `Config` inherits `RunConfig` and
adds the flags of its objective; it declares a field again to change the default. Code reads fields flat: `config.lr`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from minirl.episodes.episode import RolloutFunction, one_turn
from minirl.episodes.programs import check_form
from minirl.errors import InputError, refuse
from minirl.files.json_files import parse_json
from minirl.model.config import LINEAR_LAYERS, Adapters
from minirl.model.folders import resolve_folder
from minirl.ranks.process_group import world_size
from minirl.rewards.functions import EPISODE
from minirl.run.flags import check_needed, check_numbers, check_texts, flag_of
from minirl.truncation import Truncation

# torchrun reads --run as an abbreviation of its --run-path and refuses it: use --run-name there.
RunName = Annotated[str | None, tyro.conf.arg(aliases=["--run"])]
EvalSamples = Annotated[int, tyro.conf.arg(aliases=["--samples"])]
# "auto": chosen by the free memory, see docs/memory.md.
Size = Annotated[int | Literal["auto"], tyro.conf.arg(metavar="{auto,N}")]
Correction = Literal["auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class ModelAndDataFlags:
    """Model and data"""

    model: str | None = None  # Hugging Face folder or hub id; none: a tiny embedded model
    task: Literal["auto", "sorting", "calculator", "gsm8k", "jsonl"] = "auto"
    """auto: jsonl with --data, else sorting"""
    data: str | None = None  # JSONL file of training prompts
    eval_data: tuple[str, ...] = ()  # JSONL files of held-out prompts, each with its own metric
    prompt_field: str = "prompt"  # field of a jsonl row that holds the prompt: text or chat messages
    long_prompts: Literal["skip", "error", "left"] = "skip"
    """prompts that leave too little room for --max-new-tokens: skip, error, or truncate on the left"""
    chat: bool = False  # wrap text prompts in the chat template, the policy's and the reward model's
    chat_template_kwargs: str | None = None
    """JSON object of further arguments for the chat templates, such as {"enable_thinking": false}"""
    tool_format: Literal["hermes"] | None = None
    """how the model writes tool calls: like Qwen2.5 and Qwen3; none: as its tokenizer's response template says"""


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
    top_k: int = 0  # sample among the N likeliest tokens, at most 256; 0: among all
    top_p: float = 1.0  # of the --top-k, sample among the likeliest with this share of their probability
    min_p: float = 0.0  # of the --top-k, sample among those at least this times as likely as the likeliest
    rollout: str | None = None
    """file.py:function, an `async def` that writes a rollout; none: the script's"""
    tools: str | None = None
    """file.py:function,... with type hints and docstrings that a chat model may call, like TRL's `tools`"""
    environment: str | None = None
    """file.py:Class with reset, get_reward and methods that a chat model may call, like TRL's `environment_factory`"""
    reply_timeout: float = (
        60.0  # seconds from a turn of one of these to its next request, before the run stops
    )
    max_turns: int = 0  # most turns of a completion; 0: as many as the rollout asks for, up to 1,000
    max_sampled_tokens: int = 0
    """most sampled tokens of a completion, over all its turns; 0: no limit except --max-new-tokens"""
    max_episode_seconds: float = 0.0
    """most seconds that --rollout works and waits for a completion, checked between turns; 0: no limit"""
    max_running_requests: Size = "auto"  # completions that a rank decodes at a time; auto: what fits
    cache_tokens: Size = "auto"  # tokens that a rank's key/value cache holds, per layer; auto: what fits


@dataclass(frozen=True)
class RewardFlags:
    """Reward"""

    reward: tuple[str, ...] = ()
    """file.py:function ... instead of the task's: f(prompts, completions, **columns); episode[:NAME]: the rollout's"""
    reward_timeout: float = 60.0  # seconds that a call of a --reward may take before its process is killed
    on_reward_error: Literal["stop", "zero"] = "stop"
    """zero: a failed call counts as 0, for up to 5 % of a step's completions on a rank"""
    reward_workers: int = 1  # processes of each --reward on each rank: each judges one prompt at a time
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
    weight_decay: float = 0.0  # AdamW's, of matrices: norms and biases do not decay
    adam_betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    adam_eps: float = 1e-8  # AdamW's
    lora_rank: int = 0  # of LoRA adapters, which alone are trained; 0: none, all weights are trained
    lora_alpha: float = 16.0  # over --lora-rank it is the factor of the adapters' products
    lora_targets: tuple[str, ...] = LINEAR_LAYERS  # the layers with adapters


@dataclass(frozen=True)
class PolicyLossFlags:
    """Policy loss"""

    clip_low: float = 0.2  # ratios below 1 - clip_low lose their gradient if the advantage is negative
    clip_high: float = 0.2  # ratios above 1 + clip_high lose their gradient if the advantage is positive
    dual_clip: float = 0.0  # ratios above it lose their gradient if the advantage is negative; 0: none do
    loss_norm: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"  # DAPO; GRPO; Dr.GRPO
    drop_truncated: bool = False
    """no loss for completions that a limit cut off; baselines still count them"""
    entropy_coef: float = 0.0  # weight of the entropy bonus
    old_logprobs: Literal["auto", "sampled", "scored"] = "auto"
    """denominator of the ratio: the engine's logprobs, a scoring pass, or chosen automatically"""
    correction: Correction = "auto"
    """importance weights between old and sampled logprobs: per token or completion, clamped or masked; auto: with
    --max-staleness token_truncate, else none"""
    correction_low: float = 0.0  # lower bound of importance weights
    correction_high: float = 2.0  # upper bound of importance weights


@dataclass(frozen=True)
class EvaluationFlags:
    """Run and report"""

    run_name: RunName = None
    """name of the run's folder in ./runs or $MINIRL_RUNS, repeated to resume the run; none: a new one"""
    eval_rows: int = 256  # most held-out rows used from each file
    eval_samples: EvalSamples = 0
    """completions of each held-out row, sampled at --temperature; 0: one, greedy"""


@dataclass(frozen=True)
class RunAndReportFlags:
    """Run and report"""

    eval_every: int = 50  # steps between evaluations on the held-out rows; 0: only before and after
    save_every: int = 50  # steps between checkpoints, from which a run resumes; 0: only at the end
    keep_checkpoints: int = 2
    """newest checkpoints to keep, besides the best by held-out score; 0: all"""
    keep_rollouts: int = 0  # newest steps whose rollouts are kept; 0: all
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases


@dataclass(frozen=True)
class MachineFlags:
    """Machine"""

    seed: int = 0  # for the order of prompts and the sampling noise
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if the machine has it
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """for compute; masters are fp32; auto: bfloat16 on cuda, float32 on the CPU"""
    threads: int = 1
    """CPU threads per rank; with more than 1, sampled and training logprobs may differ by a rounding"""
    park_frozen: bool = True  # keep reference and reward models in host memory while idle
    hang_timeout: float = 1800  # seconds for which a rank waits for another before the run ends


@dataclass(frozen=True)
class UpdateMemoryFlags:
    """Machine"""

    offload_optimizer: bool = False
    """keep fp32 masters, AdamW's moments and summed gradients in host memory, where AdamW runs on --threads"""
    recompute_layers: Literal["auto", "on", "off"] = "auto"
    """recompute activations in backward: less memory, a third more time; auto: if microbatches would be small"""
    shard_gradients: Literal["auto", "on", "off"] = "auto"
    """sum gradients over the ranks in each microbatch, so a rank holds only its share; auto: if all do not fit"""
    shard_over: Literal["world", "node"] = "world"
    """ranks that share a model's shards: all, or those of each node, for slow networks between nodes"""
    shard_decode: Literal["auto", "on", "off"] = "auto"
    """decode from the shards that training holds, several ranks together; auto: if whole weights do not fit"""
    decode_group: int | None = None
    """ranks that decode one model together; none: those of a node, if they can split the key/value heads, or a part"""
    dry_run: bool = False  # load no weights and do not train: print the plan and whether it fits
    gpus: str | None = None
    """with --dry-run, another machine: RANKSxGB, such as 8x80 for 8 GPUs of 80 GB; none: this one"""


# Those of an evaluation.
EVALUATION_FLAGS = (ModelAndDataFlags, GenerationFlags, RewardFlags, EvaluationFlags, MachineFlags)
POSITIVE = (
    "num_steps",
    "prompts_per_step",
    "group_size",
    "max_new_tokens",
    "temperature",
    "max_running_requests",
    "cache_tokens",
    "lr",
    "lora_alpha",
    "adam_eps",
    "hang_timeout",
    "num_epochs",
    "num_minibatches",
    "max_tokens_per_microbatch",
    "threads",
    "reward_timeout",
    "reward_workers",
    "reply_timeout",
)
# A larger size is a typo, which would use up the host's memory or processes before anything fails.
MOST = {
    "threads": 1024,
    "reward_workers": 1024,
    "num_epochs": 1024,
    "max_staleness": 1024,
    "max_running_requests": 2**20,
    "lora_rank": 2**12,
    "eval_samples": 2**16,
}
MOST_ROLLOUTS = 2**20  # in a step


@dataclass(frozen=True)
class RunConfig(
    UpdateMemoryFlags,
    MachineFlags,
    RunAndReportFlags,
    EvaluationFlags,
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
    def warm_start_task(self) -> str:
        """The embedded task that warm-starts the embedded model."""
        return "calculator" if self.task == "calculator" else "sorting"

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The object of --chat-template-kwargs. Raises InputError if it is not a JSON object."""
        text = self.chat_template_kwargs
        if text is None:
            return {}
        flag = f"--chat-template-kwargs {text[:80]}"
        try:
            arguments = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{flag}: not JSON: {error}") from None
        is_object = isinstance(arguments, dict) and arguments
        refuse(not is_object, f'{flag}: expected an object, as {{"enable_thinking": false}}')
        return dict(arguments)

    @property
    def trains(self) -> bool:
        """False if the script only evaluates."""
        return True

    @property
    def has_reference(self) -> bool:
        """True if the run loads a reference model: a script with a KL term says when."""
        return False

    @property
    def is_rewarded(self) -> bool:
        """True if the run trains for rewards: a script with another signal says when it does not."""
        return True

    @property
    def has_kl_loss(self) -> bool:
        """True if the loss has the KL to a teacher over the vocabulary, for which its states are kept."""
        return False

    @property
    def num_value_models(self) -> int:
        """How many value models the run trains beside the policy, all of the first one's shape."""
        return 0

    @property
    def reward_models(self) -> dict[str, str]:
        """The models of --reward-model by their rewards' names: reward_model, reward_model_2 and so on."""
        named = {f"reward_model_{number}": model for number, model in enumerate(self.reward_model, 1)}
        return {name.removesuffix("_1"): model for name, model in named.items()}

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
    def num_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_steps * self.updates_per_step

    @property
    def peak_lr(self) -> float:
        """`lr`, or its default for this model."""
        default = 2e-4 if self.is_embedded else 1e-6
        return self.lr or default * (10 if self.lora_rank else 1)

    @property
    def adapters(self) -> Adapters | None:
        """The adapters of the trained models, if --lora-rank asks for them."""
        return Adapters(self.lora_rank, self.lora_alpha, self.lora_targets) if self.lora_rank else None

    @property
    def truncation(self) -> Truncation:
        """Of the distributions that are sampled from."""
        return Truncation(self.top_k, self.top_p, self.min_p)

    @property
    def importance_correction(self) -> str:
        """`correction`, or its default: without one, the clip would bound the change over a token's whole age."""
        if self.correction != "auto":
            return self.correction
        is_stale = self.max_staleness > 0
        return "token_truncate" if is_stale and self.old_logprobs != "sampled" else "none"

    @property
    def num_rewards(self) -> int:
        """The number of rewards: functions and reward models, or else the task's own one; overlong penalty."""
        named = len(self.reward) + len(self.reward_model)
        return (named or 1) + bool(self.overlong_buffer)


def ranks_and_bytes(gpus: str) -> tuple[int, float]:
    """The number of ranks in --gpus and the bytes of each. Raises InputError."""
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5}(?:\.\d+)?)", gpus, re.ASCII)
    if not found:
        raise InputError(f"--gpus {gpus}: give the number of ranks and GB of each, as 8x80")
    return int(found[1]), float(found[2]) * 1e9


def named_folder(config: RunConfig, name: str) -> Path | None:
    """The folder of the model in this field, which only some scripts have; None without a model. Raises InputError."""
    model = getattr(config, name, None)
    return resolve_folder(model, flag=flag_of(name), with_weights=not config.dry_run) if model else None


def rollout_flags(config: RunConfig) -> list[tuple[str, str]]:
    """The flags that name code for rollouts, with their values: one, or none."""
    values = [(kind, getattr(config, kind)) for kind in ("rollout", "tools", "environment")]
    return [(kind, value) for kind, value in values if value]


def asks_for_one_turn(rollout: RolloutFunction) -> bool:
    """True if a script's function is still the scripts' own: one turn, whose answer it does not look at.

    It compares the code: a fork that changes `rollout` has nothing to declare, and nothing of it runs here.
    """
    code = getattr(rollout, "__code__", None)
    plain = one_turn.__code__
    return code is not None and (code.co_code, code.co_names) == (plain.co_code, plain.co_names)


def check_limits(config: RunConfig, max_new_tokens: int) -> None:
    """Refuse a limit of sampled tokens that no completion of `max_new_tokens` can reach. Raises InputError.

    A function of --rollout may give a completion several branches of that length.
    """
    value = config.max_sampled_tokens or 0
    refuse(
        value >= max_new_tokens and not config.rollout,
        f"--max-sampled-tokens {value}: has no effect, --max-new-tokens is not greater ({max_new_tokens})",
    )


def check_effects(config: RunConfig, rollout: RolloutFunction | None) -> None:
    """Refuse flags that have no effect with the others, and two that each write rollouts. Raises InputError.

    rollout: the script's own function; None: it may do anything.
    """
    given = rollout_flags(config)
    if rollout is not None:
        check_form(rollout, "the script's rollout")
    refuse(
        len(given) > 1,
        f"{' and '.join(flag_of(kind) for kind, _ in given)}: each of them writes the rollouts; leave out all but one "
        "(an --environment or a --rollout may call the others itself)",
    )
    names_file = any(spec.rpartition(":")[0] not in ("", EPISODE) for spec in config.reward)
    of_files = (names_file, "a --reward FILE.py:FUNCTION")
    has_turns = given or rollout is None or not asks_for_one_turn(rollout)
    of_turns = (has_turns, "--rollout, --tools or --environment")
    of_correction = (config.importance_correction != "none", "--correction")
    of_ranks = (world_size() > 1 or config.gpus, "a second rank")
    reads_jsonl = config.task == "jsonl" or (config.task == "auto" and config.data)
    check_needed(
        config,
        needs={
            "gpus": "dry_run",
            "lora_alpha": "lora_rank",
            "lora_targets": "lora_rank",
            "prompt_field": (reads_jsonl, "--data of --task jsonl"),
            "reward_timeout": of_files,
            "reward_workers": of_files,
            "on_reward_error": of_files,
            "reply_timeout": of_turns,
            "max_episode_seconds": of_turns,
            "max_turns": of_turns,
            "tool_format": of_turns,
            "correction_low": of_correction,
            "correction_high": of_correction,
            "shard_over": of_ranks,
            "shard_decode": (of_ranks[0] or config.shard_decode == "off", of_ranks[1]),
            "decode_group": of_ranks if config.shard_decode != "off" else (False, "--shard-decode"),
        },
    )


def check_sizes(config: RunConfig) -> None:
    """Refuse sizes that no machine has memory or time for. Raises InputError."""
    for name, most in MOST.items():
        value = getattr(config, name)
        refuse(value != "auto" and value > most, f"{flag_of(name)} {value}: must be at most {most}")
    num_rollouts = config.prompts_per_step * config.group_size
    refuse(
        num_rollouts > MOST_ROLLOUTS,
        f"--prompts-per-step {config.prompts_per_step} with --group-size {config.group_size}: {num_rollouts} rollouts "
        f"in a step, and at most {MOST_ROLLOUTS} are possible",
    )
    num_minibatches = config.minibatches_per_epoch
    refuse(num_minibatches > num_rollouts, f"--num-minibatches {num_minibatches}: fewer rollouts")


def check_group(config: RunConfig) -> None:
    """Refuse groups that decode from shards and cannot be made of the ranks. Raises InputError."""
    refuse(
        config.shard_decode == "on" and config.shard_gradients == "off",
        "--shard-decode on: gradients are sharded too; leave out --shard-gradients off",
    )
    group = config.decode_group
    if group is None:
        return
    num_ranks = world_size() if config.gpus is None else ranks_and_bytes(config.gpus)[0]
    refuse(
        group < 2,
        f"--decode-group {group}: must be at least 2; on its own a rank decodes with --shard-decode off",
    )
    refuse(num_ranks % group, f"--decode-group {group}: {num_ranks} ranks do not make groups of {group}")


def check_shared(config: RunConfig, rollout: RolloutFunction | None = None) -> None:
    """Refuse values of the shared flags that cannot mean anything. Raises InputError naming the flag.

    rollout: the script's own function, as some flags have no effect on one of a single turn.
    """
    check_numbers(config, positive=POSITIVE)
    check_texts(config)
    check_sizes(config)
    check_effects(config, rollout)
    _ = config.template_arguments
    if config.gpus is not None:
        ranks_and_bytes(config.gpus)
        refuse(config.device == "cpu", f"--gpus {config.gpus}: with --device cpu; leave out one of the two")
        refuse(
            config.shard_over == "node",
            f"--gpus {config.gpus}: does not say how many are in a node, which --shard-over node needs; leave out "
            "one of the two (a single node needs the memory that --shard-over world reports for its GPUs)",
        )
    check_group(config)
    refuse(
        len(config.reward_weights) not in (0, config.num_rewards),
        f"--reward-weights: there are {config.num_rewards} rewards",
    )
    refuse(
        config.reward_weights and not any(config.reward_weights),
        "--reward-weights: all are 0, so that nothing is trained for",
    )
    for weight in config.reward_weights:
        # Rewards go up to 1e12, and the squares of gradients must fit in fp32.
        refuse(abs(weight) > 1e6, f"--reward-weights {weight}: must be at most 1e6")
    refuse(
        config.model and not config.data and (config.trains or config.task == "auto"),
        "--model needs --data FILE.jsonl, with --reward, --reward-model or --task gsm8k",
    )
    refuse(
        config.overlong_buffer > 1, f"--overlong-buffer {config.overlong_buffer}: a share of --max-new-tokens"
    )
    for target in config.lora_targets:
        refuse(
            target not in LINEAR_LAYERS,
            f"--lora-targets {target}: one of {' '.join(LINEAR_LAYERS)}; head and embeddings have no adapters",
        )
    config.truncation.checked(flag_of)
    refuse(not config.lora_targets, f"--lora-targets: name at least one of {' '.join(LINEAR_LAYERS)}")
    betas = " ".join(map(str, config.adam_betas))
    refuse(
        not all(0 <= beta < 1 for beta in config.adam_betas),
        f"--adam-betas {betas}: each must be at least 0 and below 1",
    )
    is_dual_clip_low = 0 < config.dual_clip <= 1
    refuse(is_dual_clip_low, f"--dual-clip {config.dual_clip}: must be greater than 1, or 0 for none")
    refuse(
        not config.correction_low < config.correction_high,
        "--correction-low: must be less than --correction-high",
    )
    refuse(
        config.importance_correction != "none" and config.old_logprobs == "sampled",
        "--correction with --old-logprobs sampled: the ratio itself corrects for the sampling policy",
    )
