"""Command lines of the scripts and of forks: groups, presets and rejected values."""

import itertools
import re
import typing
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest

import train_grpo
import train_ppo
from minirl.errors import InputError
from minirl.run.checks import check_shared_flags
from minirl.run.flags import flag_name, parse
from minirl.run.progress import Progress
from support.scripts import read_config, write_rows

PRESETS = {"default": {}, "fast": {"lr": 0.1, "bonus": 2.0}}


@dataclass(frozen=True)
class ForkConfig(train_grpo.Config):
    """Fork"""

    bonus: float = 1.0  # [Mine] a flag that the fork adds
    lr: float | None = 0.5  # a shared flag with another default
    penalty: float = 0.0


def parsed(*arguments, presets=None):
    return parse(ForkConfig, description="", presets=presets, arguments=arguments)


def test_flags_of_every_group_and_the_presets_are_read_into_one_flat_config():
    """Flags of fork, script and library: several values, booleans, and preset values that the command line overrides.

    A class's own defaults win over inherited defaults. The first preset is the default.
    """
    assert parsed("--penalty", "1", presets=PRESETS) == ForkConfig(penalty=1.0, lr=0.5)
    flags = (
        "--bonus 3 --baseline none --reward a.py:f b.py:g --chat --drop-truncated --run mine --algorithm fast"
    )
    expected = {"bonus": 3.0, "lr": 0.1, "baseline": "none", "run_name": "mine", "algorithm": "fast"}
    expected |= {"chat": True, "drop_truncated": True, "reward": ("a.py:f", "b.py:g")}
    assert parsed(*flags.split(), presets=PRESETS) == ForkConfig(**expected)
    with pytest.raises(InputError, match="--algorithm nope: must be one of default, fast"):
        parsed("--algorithm=nope", presets=PRESETS)


def test_help_has_a_title_over_each_group_of_flags():
    """Groups of library, script and fork. A reader that closes the pipe, as `head` does, causes no error."""
    with (
        mock.patch("builtins.print", side_effect=BrokenPipeError) as printed,
        pytest.raises(SystemExit, match="0"),
    ):
        parsed("--help")
    titles = "Model and data,Step,Rollout,Reward,Update,Policy loss,Run and report,Machine,Objective,Mine"
    assert ",".join(re.findall("([A-Z][a-z ]+) options", str(printed.call_args))) == titles


@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_every_number_flag_must_be_finite(module):
    """Covers plain, optional and tuple fields, and ints of any length, which the command line accepts."""
    kinds = {name: str(kind) for name, kind in typing.get_type_hints(module.Config).items()}
    numbers = [name for name, kind in kinds.items() if re.search(r"\b(int|float)\b", kind)]
    assert {"lr", "num_steps", "max_new_tokens", "hang_timeout", "reward_weights"} <= set(numbers)
    endless = (float("-inf"), float("nan"), 1e30, 10**400)
    for name, number in itertools.product(numbers, endless):
        value = (number,) if "tuple" in kinds[name] else number
        with pytest.raises(InputError, match=rf"{flag_name(name)}\b"):
            check_shared_flags(module.Config(**{name: value}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bonus": -1.0}, "--bonus -1.0: must not be negative"),
        ({"data": ""}, "--data: is empty"),
        ({"reward": ("a", " ")}, "--reward: is empty"),
        ({"temperature": 0.0}, "--temperature 0.0: must be greater than 0"),
        ({"num_epochs": np.int64(-3)}, "--num-epochs .*: must be a Python int or float"),
    ],
)
def test_negative_numbers_invalid_zeros_and_empty_strings_are_rejected(fields, message):
    """A fork's fields are checked too. An empty string never counts as an omitted flag. Fault 43."""
    check_shared_flags(ForkConfig())
    with pytest.raises(InputError, match="--value-lr"):
        check_shared_flags(train_ppo.Config(value_lr=0.0))
    with pytest.raises(InputError, match=message):
        check_shared_flags(ForkConfig(**fields))


REFUSED = [
    # files
    ("--data none.jsonl --task gsm8k", "none.jsonl"),
    ("--model no/such --data one.jsonl --task gsm8k --dry-run", "--model no/such"),
    # shared flags
    ("--model x", "--model needs either --task gsm8k, or --data"),
    ("--dry-run --gpus 8", "--gpus 8: expected the number of GPUs"),
    ("--dry-run --chat-template-kwargs [1]", "--chat-template-kwargs [1]: "),
    ("--overlong-buffer 4", "--overlong-buffer 4.0: must be a fraction"),
    ("--num-minibatches 129", "--num-minibatches 129: a step has only 128 rollouts"),
    ("--tools a.py:f --rollout a.py:g", "--rollout and --tools: each of these flags defines the rollouts"),
    ("--tools a.py:f --environment a.py:E", "--tools and --environment: each of these flags"),
    ("--rollout json:loads,dumps", "json has no function loads,dumps"),
    # the script's
    ("--group-size 1 --advantage-norm none", "--group-size 1: --baseline mean or"),
    ("--algorithm remax --dynamic-sampling", "--group-size 1: --baseline greedy or --dynamic-sampling"),
    ("--baseline greedy", "--baseline greedy: needs --advantage-norm none"),
    ("--baseline none --advantage-norm batch_std", "--baseline none: needs --advantage-norm none"),
    ("--kl-reward-coef 0.1", "--kl-reward-coef: --advantage-norm group_std would normalise the penalty away"),
    ("--kl-coef 0.1 --kl-reward-coef 0.1", "--kl-coef with --kl-reward-coef"),
    (
        "--algorithm reinforce++ --ratio-level sequence_mean",
        "--ratio-level sequence_mean: cannot be combined",
    ),
    ("--teacher a --max-staleness 1 --correction none", "--correction none: --max-staleness takes old"),
    ("--algorithm dapo --teacher a", "--dynamic-sampling: --teacher alone"),
    ("--teacher a --ratio-level sequence_mean", "--ratio-level sequence_mean: cannot be combined"),
    ("--teacher a --teacher-coef 0.5 --group-size 1", "--group-size 1: --baseline mean or"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=lambda text: text[:40])
def test_flags_that_would_train_something_else_are_refused_by_name(flags, message, tmp_path, monkeypatch):
    """Such flags are rejected before anything is loaded or created. Faults 43 and 59. Pitfalls 22, 28 and 39."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "one.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    with pytest.raises(InputError, match=re.escape(message)):
        train_grpo.main(read_config(train_grpo, [flags]))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("schedule", "num_updates", "warmup", "rates"),
    [
        ("constant", 6, 4, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        ("linear", 6, 2, [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0]),
        ("linear", 2, 4, [0.5, 1.0]),
    ],
)
def test_the_learning_rate_warms_up_from_the_first_update_and_then_stays_or_decays(
    schedule, num_updates, warmup, rates
):
    """Neither the first nor the last update has a learning rate of 0."""
    for first in (0, 3):
        config = train_ppo.Config(
            num_steps=first + num_updates, num_minibatches=1, warmup_updates=warmup, lr_schedule=schedule
        )
        places = [Progress(step, step, step) for step in range(first, first + len(rates))]
        assert [config.learning_rate(place, 2.0, first_step=first) for place in places] == rates


def test_extending_a_run_does_not_move_the_learning_rate_of_a_real_model():
    """A real model's rate is constant by default. The bundled model's rate decays, to get below a noise floor."""
    place = Progress(step=150, update=150, first_update=150)

    def rates(**flags):
        configs = [train_grpo.Config(num_steps=n, num_minibatches=1, lr=2.0, **flags) for n in (200, 400)]
        return [config.learning_rate(place, config.peak_lr) for config in configs]

    assert rates(model="mine") == [2.0, 2.0]
    for flags in ({}, {"model": "mine", "lr_schedule": "linear"}):
        short, long = rates(**flags)
        assert short < long < 2.0


def test_a_resume_with_other_updates_per_step_keeps_the_position_in_the_schedule():
    """The position depends on steps only: no rate is negative, and a finished warm-up does not repeat. Pitfall 46."""
    config = train_ppo.Config(num_steps=43, num_minibatches=2, warmup_updates=0)
    for step, i in itertools.product(range(3, 43), range(2)):
        places = [Progress(step, step * before + i, step * before) for before in (1, 2, 4)]
        rates = {config.learning_rate(place, 2.0, first_step=3) for place in places}
        assert len(rates) == 1
        assert min(rates) > 0
    assert train_grpo.Config(num_minibatches=1).learning_rate(Progress(2, 8, 8), 2.0) == 2.0
