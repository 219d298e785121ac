"""Refusals of flags that would train something else than they say, before anything is loaded.

Flags without effect are accepted. A fork with other rules changes or leaves out the call in its `main`.
"""

import dataclasses
from numbers import Real
from typing import Any

from minirl.errors import refuse
from minirl.run.config import RunConfig, rollout_flags
from minirl.run.flags import flag_name

# The fields that must be greater than 0.
POSITIVE = (
    "num_steps prompts_per_step group_size num_epochs num_minibatches max_tokens_per_microbatch lr value_lr "
    "max_new_tokens temperature cache_tokens workers call_timeout eval_rows hang_timeout"
).split()
MAX_NUMBER = 2**63 - 1  # tensors hold no greater int, and a greater float is a typo


def check_grpo(config: Any) -> None:
    """Refuse flags of train_grpo.py that contradict each other. Raises InputError naming the flag."""
    check_shared(config)
    group_baselines = ("mean", "leave_one_out")
    if config.group_size < 2:
        refuse(
            config.dynamic_sampling or (config.is_rewarded and config.baseline in group_baselines),
            f"--group-size {config.group_size}: --baseline {config.baseline} or --dynamic-sampling needs at least 2",
        )
    if config.baseline not in group_baselines:
        refuse(
            config.is_rewarded and config.advantage_norm in ("group_std", "batch_std"),
            f"--baseline {config.baseline}: needs --advantage-norm none or whiten; equal rewards have no std",
        )
    if config.kl_reward_coef:
        refuse(config.kl_coef, "--kl-coef with --kl-reward-coef: put the KL term into one of the two")
        refuse(
            config.advantage_norm == "group_std",
            "--kl-reward-coef: --advantage-norm group_std would divide it away; take another norm, or --kl-coef",
        )
    if config.teacher or (config.kl_reward_coef and config.has_token_penalty):
        refuse(
            config.ratio_level != "token",
            f"--ratio-level {config.ratio_level}: has one ratio for all tokens; --teacher, and --kl-reward-coef with "
            "--baseline none, have a term for each",
        )
    if not config.is_rewarded:
        for name in ("dynamic_sampling", "kl_reward_coef"):
            refuse(
                getattr(config, name),
                f"{flag_name(name)}: --teacher alone does not train on rewards; leave it out, or add --teacher-coef",
            )


def check_shared(config: RunConfig) -> None:
    """Refuse values of the shared flags that cannot mean anything. Raises InputError naming the flag."""
    for field in dataclasses.fields(config):
        _check_value(field.name, getattr(config, field.name))
    writers = rollout_flags(config)
    refuse(
        len(writers) > 1,
        f"{' and '.join(flag_name(kind) for kind, _ in writers)}: each of them writes the rollouts; leave out all "
        "but one (an --environment or a --rollout may call the others itself)",
    )
    refuse(
        config.model and not config.data and config.task == "auto",
        "--model needs --data, with --reward or --reward-model, or --task gsm8k",
    )
    if config.max_staleness and config.correction == "none":
        refuse(
            config.needs_policy_logprobs,
            "--correction none: with --max-staleness the old logprobs are those of the weights that sampled, and the "
            "KL of --kl-reward-coef or --teacher needs the policy's before the update; choose another correction",
        )
    num_rollouts = config.prompts_per_step * config.group_size
    refuse(
        config.minibatches_per_epoch > num_rollouts,
        f"--num-minibatches {config.minibatches_per_epoch}: a step has only {num_rollouts} rollouts",
    )
    refuse(
        config.overlong_buffer > 1, f"--overlong-buffer {config.overlong_buffer}: a share of --max-new-tokens"
    )


def _check_value(name: str, value: Any) -> None:
    """Refuse an empty text, and a number that is negative, not finite or wrongly 0. Raises InputError.

    The numbers of a field with several may be negative.
    """
    flag = flag_name(name)
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, str):
            refuse(not one.strip(), f"{flag}: is empty; leave it out")
        elif isinstance(one, int | float):
            refuse(not abs(one) <= MAX_NUMBER, f"{flag} {one}: must be finite and below 2**63")
            refuse(one < 0 and one is value, f"{flag} {one}: must not be negative")
            refuse(one == 0 and name in POSITIVE, f"{flag} {one}: must be greater than 0")
        else:
            refuse(isinstance(one, Real), f"{flag} {one!r}: give a number of Python")
