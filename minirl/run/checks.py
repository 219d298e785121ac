"""Reject contradictory or meaningless flags before anything is loaded.

Flags that have no effect are accepted. If a fork needs different rules, change or remove the call in its
`main`.
"""

import dataclasses
from numbers import Real
from typing import Any

from minirl.errors import refuse
from minirl.run.config import RunConfig, rollout_flags
from minirl.run.flags import flag_name

# Fields that must be greater than 0.
POSITIVE = (
    "num_steps prompts_per_step group_size num_epochs num_minibatches max_tokens_per_microbatch lr value_lr "
    "max_new_tokens temperature cache_tokens workers call_timeout eval_rows hang_timeout"
).split()
MAX_NUMBER = 2**63 - 1  # the largest int that fits in a tensor; any larger float must be a typo


def check_grpo(config: Any) -> None:
    """Reject flags of train_grpo.py that contradict each other. Raises InputError, naming the flag."""
    check_shared_flags(config)
    group_baselines = ("mean", "leave_one_out")
    if config.group_size < 2:
        refuse(
            config.dynamic_sampling or (config.trains_on_rewards and config.baseline in group_baselines),
            f"--group-size {config.group_size}: --baseline {config.baseline} or --dynamic-sampling needs at least 2",
        )
    if config.baseline not in group_baselines:
        refuse(
            config.trains_on_rewards and config.advantage_norm in ("group_std", "batch_std"),
            f"--baseline {config.baseline}: needs --advantage-norm none or whiten; the std of equal rewards is 0",
        )
    if config.kl_reward_coef:
        refuse(config.kl_coef, "--kl-coef with --kl-reward-coef: give only one of the two KL penalties")
        refuse(
            config.advantage_norm == "group_std",
            "--kl-reward-coef: --advantage-norm group_std would normalise the penalty away; use another norm, or "
            "--kl-coef",
        )
    if config.teacher or (config.kl_reward_coef and config.has_token_kl_penalty):
        refuse(
            config.ratio_level != "token",
            f"--ratio-level {config.ratio_level}: cannot be combined with a term for each token (--teacher, or "
            "--kl-reward-coef with --baseline none); use --ratio-level token",
        )
    if not config.trains_on_rewards:
        for name in ("dynamic_sampling", "kl_reward_coef"):
            refuse(
                getattr(config, name),
                f"{flag_name(name)}: --teacher alone does not train on rewards; drop the flag, or add --teacher-coef",
            )


def check_shared_flags(config: RunConfig) -> None:
    """Reject invalid values of the shared flags. Raises InputError, naming the flag."""
    for field in dataclasses.fields(config):
        _check_value(field.name, getattr(config, field.name))
    given_rollout_flags = rollout_flags(config)
    refuse(
        len(given_rollout_flags) > 1,
        f"{' and '.join(flag_name(kind) for kind, _ in given_rollout_flags)}: each of these flags "
        "defines the rollouts; keep only "
        "one (the code of an --environment or --rollout can call the other functions directly)",
    )
    refuse(
        config.model and not config.data and config.task == "auto",
        "--model needs either --task gsm8k, or --data together with --reward or --reward-model",
    )
    if config.max_staleness and config.correction == "none":
        refuse(
            config.needs_policy_logprobs,
            "--correction none: --max-staleness takes old logprobs from the (possibly older) policy that generated the "
            "tokens, but the KL term of --kl-reward-coef or --teacher needs those of the current policy; choose "
            "another correction",
        )
    num_rollouts = config.prompts_per_step * config.group_size
    refuse(
        config.minibatches_per_epoch > num_rollouts,
        f"--num-minibatches {config.minibatches_per_epoch}: a step has only {num_rollouts} rollouts",
    )
    refuse(
        config.overlong_buffer > 1,
        f"--overlong-buffer {config.overlong_buffer}: must be a fraction of --max-new-tokens, from 0 to 1",
    )


def _check_value(name: str, value: Any) -> None:
    """Reject empty strings, negative or non-finite numbers, and 0 in a POSITIVE field. Raises InputError.

    Numbers in a tuple may be negative.
    """
    flag = flag_name(name)
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, str):
            refuse(not item.strip(), f"{flag}: is empty; give a value or drop the flag")
        elif isinstance(item, int | float):
            refuse(not abs(item) <= MAX_NUMBER, f"{flag} {item}: must be finite and below 2**63")
            refuse(item < 0 and item is value, f"{flag} {item}: must not be negative")
            refuse(item == 0 and name in POSITIVE, f"{flag} {item}: must be greater than 0")
        else:
            refuse(isinstance(item, Real), f"{flag} {item!r}: must be a Python int or float")
