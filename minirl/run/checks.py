"""Refusals of flags that would train something else than they say, before anything is loaded.

Flags without effect are accepted. A fork with other rules changes or leaves out the call in its `main`.
"""

import dataclasses
from numbers import Real
from typing import Any

from minirl.errors import refuse
from minirl.run.config import RunConfig, rollout_flags
from minirl.run.flags import flag_of

# The fields that must be greater than 0.
POSITIVE = (
    "num_steps prompts_per_step group_size num_epochs num_minibatches max_tokens_per_microbatch lr value_lr "
    "max_new_tokens temperature cache_tokens workers call_timeout eval_rows hang_timeout"
).split()
MAX_NUMBER = 2**63 - 1  # tensors hold no greater int, and a greater float is a typo


def check_grpo(config: Any) -> None:
    """Refuse flags of train_grpo.py that contradict each other. Raises InputError naming the flag."""
    check_shared(config)
    is_grouped = config.is_rewarded and config.baseline in ("mean", "leave_one_out")
    refuse(
        (is_grouped or config.dynamic_sampling) and config.group_size < 2,
        f"--group-size {config.group_size}: --baseline {config.baseline} or --dynamic-sampling needs at least 2",
    )
    refuse(
        config.is_rewarded and not is_grouped and config.advantage_norm in ("group_std", "batch_std"),
        f"--baseline {config.baseline}: needs --advantage-norm none or whiten; equal rewards have no std",
    )
    refuse(
        config.kl_coef and config.kl_reward_coef,
        "--kl-coef with --kl-reward-coef: put the KL term into one of the two",
    )
    refuse(
        config.kl_reward_coef and config.advantage_norm == "group_std",
        "--kl-reward-coef: --advantage-norm group_std would divide it away; take another norm, or --kl-coef",
    )
    has_token_terms = config.teacher or (config.kl_reward_coef and config.baseline == "none")
    refuse(
        has_token_terms and config.ratio_level != "token",
        f"--ratio-level {config.ratio_level}: has one ratio for all tokens; --teacher, and --kl-reward-coef with "
        "--baseline none, have a term for each",
    )
    for name in ("dynamic_sampling", "kl_reward_coef"):
        refuse(
            getattr(config, name) and not config.is_rewarded,
            f"{flag_of(name)}: --teacher alone does not train on rewards; leave it out, or add --teacher-coef",
        )


def check_shared(config: RunConfig) -> None:
    """Refuse values of the shared flags that cannot mean anything. Raises InputError naming the flag."""
    _check_values(config)
    writers = " and ".join(flag_of(kind) for kind, _ in rollout_flags(config))
    refuse(
        " and " in writers,
        f"{writers}: each of them writes the rollouts; leave out all but one (an --environment or a --rollout may call "
        "the others itself)",
    )
    refuse(
        config.model and not config.data and (config.trains or config.task == "auto"),
        "--model needs --data FILE.jsonl, with --reward, --reward-model or --task gsm8k",
    )
    refuse(
        config.max_staleness and config.importance_correction == "none" and config.needs_policy_logprobs,
        "--correction none: with --max-staleness the old logprobs are those of the weights that sampled, and the KL of "
        "--kl-reward-coef or --teacher needs the policy's before the update; choose another correction",
    )
    num_rollouts = config.prompts_per_step * config.group_size
    refuse(
        config.minibatches_per_epoch > num_rollouts,
        f"--num-minibatches {config.minibatches_per_epoch}: a step has only {num_rollouts} rollouts",
    )
    refuse(
        config.overlong_buffer > 1, f"--overlong-buffer {config.overlong_buffer}: a share of --max-new-tokens"
    )


def _check_values(config: RunConfig) -> None:
    """Refuse empty texts, and numbers that are negative, not finite or wrongly 0. Raises InputError.

    The numbers of a field with several may be negative.
    """
    for field in dataclasses.fields(config):
        given = getattr(config, field.name)
        flag = flag_of(field.name)
        for value in given if isinstance(given, tuple) else (given,):
            is_empty = isinstance(value, str) and not value.strip()
            refuse(is_empty, f"{flag}: is empty; leave it out")
            is_number = isinstance(value, Real)
            refuse(
                is_number and not isinstance(value, int | float), f"{flag} {value!r}: give a number of Python"
            )
            refuse(
                is_number and not abs(value) <= MAX_NUMBER, f"{flag} {value}: must be finite and below 2**63"
            )
        if isinstance(given, int | float):
            refuse(given < 0, f"{flag} {given}: must not be negative")
            refuse(field.name in POSITIVE and given == 0, f"{flag} {given}: must be greater than 0")
