"""The command line of a config, whoever wrote it: groups, comments as help, presets, refusals."""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import sys
import typing
from dataclasses import dataclass

import pytest

import train_grpo
import train_ppo
from minirl.errors import InputError
from minirl.run.config import RunConfig, check_shared
from minirl.run.flags import OTHER_NAMES, check_needed, check_numbers, flag_of, parse
from support.scripts import load_script, read_config

PRESETS = {"default": {}, "fast": {"lr": 0.1, "bonus": 2.0}}


@dataclass(frozen=True)
class ForkConfig(train_grpo.Config):
    """Fork"""

    bonus: float = 1.0  # what this fork adds
    lr: float | None = 0.5  # a shared flag with another default
    penalty: float = 0.0
    """a comment
    on two lines"""
    num_epochs: int = 3
    rest: float = 0.0  # the last of them

    @property
    def twice(self):
        """No help."""
        return 2 * self.rest


def parsed(*arguments, presets=None):
    return parse(ForkConfig, description="", presets=presets, arguments=arguments)


def test_a_config_without_arguments_has_its_own_defaults():
    """Those of the class itself win over those of the classes that it inherits from."""
    assert parsed() == ForkConfig()
    assert parsed().lr == 0.5
    assert parse(train_ppo.Config, description="", arguments=[]) == train_ppo.Config()


def test_flags_of_every_group_are_read_into_one_flat_config():
    """Of the fork, of the script and of the library; several values; on and off; the preset's unless given."""
    flags = "--bonus 3 --baseline none --reward a.py:f b.py:g --chat --no-park-frozen --run mine".split()
    presets = {"default": {"lr": 0.1, "bonus": 2.0, "kl_coef": 0.2}}
    expected = {
        "bonus": 3.0,
        "lr": 0.1,
        "kl_coef": 0.2,
        "baseline": "none",
        "chat": True,
        "park_frozen": False,
    }
    expected |= {"reward": ("a.py:f", "b.py:g"), "run_name": "mine"}
    assert parsed(*flags, presets=presets) == ForkConfig(**expected)


def test_help_has_a_box_per_group_and_the_comments(capsys):
    """The docstring of each class is a title; a field is in the box of the class that declares it first.

    The comment of its line is its help, also where a string under the field says it, or that class.
    """
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = capsys.readouterr().out
    titles = re.findall(r"^\W*([A-Z][\w ]+) options\W*$", shown, re.MULTILINE)
    assert ", ".join(titles) == (
        "Fork, Objective, Model and data, Generate, Reward, Update, Policy loss, Run and report, Machine"
    )
    assert shown.index("--lr X") > shown.index("Update options")
    assert "{None}" not in shown, "a type that nobody reads"
    shown = " ".join(shown.replace("│", " ").split())
    for line in (
        "--bonus X what this fork adds (default: 1.0)",
        "--lr X a shared flag with another default (default: 0.5)",
        "--penalty X a comment on two lines (default: 0.0)",
        "--num-epochs N passes over a step's rollouts (default: 3)",
        "--rest X the last of them (default: 0.0)",
    ):
        assert f" {line} " in shown
    assert "No help." not in shown


@pytest.mark.slow
def test_a_config_may_have_the_name_and_title_of_the_one_that_it_extends(capsys):
    """Their flags share a box."""
    twin = dataclasses.make_dataclass("Config", [("twin", int, 1)], bases=(train_grpo.Config,), frozen=True)
    twin.__doc__ = train_grpo.Config.__doc__
    assert parse(twin, description="", arguments=["--twin", "2", "--kl-coef", "1"]).twin == 2
    with pytest.raises(SystemExit):
        parse(twin, description="", arguments=["--help"])
    shown = capsys.readouterr().out
    assert shown.count("Objective options") == 1
    assert shown.index("--twin N") < shown.index("--kl-coef X")


def test_a_flag_by_its_name_in_another_library_is_refused_with_its_name_here():
    """However it is spelt, unless a fork has it; each leads to an existing flag."""
    own = {flag_of(name) for name in train_grpo.Config.__dataclass_fields__}
    for name, hint in OTHER_NAMES.items():
        assert set(re.findall(r"--[a-z-]+", hint)) <= own
        assert f"--{name}" not in own
        for arguments in ([f"--{name}", "1"], [f"--{name.replace('-', '_')}=1"]):
            with pytest.raises(InputError, match=re.escape(f"--{name}: no such flag; it is {hint}")):
                parsed(*arguments)
    beta = dataclasses.make_dataclass("Beta", [("beta", float, 1.0)], bases=(ForkConfig,), frozen=True)
    assert parse(beta, description="", arguments=["--beta", "2"]).beta == 2.0


def test_the_reader_of_help_may_go(monkeypatch):
    """A reader like `head`: no traceback."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stdout = os.fdopen(write_end, "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit) as left:
        parsed("--help")
    assert left.value.code == 0
    with contextlib.suppress(BrokenPipeError):
        stdout.close()


def test_a_preset_is_chosen_by_name_and_by_default_the_first():
    """Whatever else is on the command line; an unknown name is refused later, with the names there are."""
    assert parsed("--penalty", "1", presets=PRESETS) == ForkConfig(penalty=1.0)
    fast = ForkConfig(algorithm="fast", **PRESETS["fast"])
    assert parsed("--penalty", "0", "--algorithm", "fast", presets=PRESETS) == fast
    assert parsed("--algorithm=fast", presets=PRESETS) == fast
    with pytest.raises(InputError, match="--algorithm nope: one of default, grpo"):
        train_grpo.check(train_grpo.Config(algorithm="nope"))


@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_every_number_flag_must_be_finite(module):
    """By the types of the fields: plain, optional, several; ints of any length too, which the command line takes."""
    kinds = {name: str(kind) for name, kind in typing.get_type_hints(module.Config).items()}
    numbers = [name for name, kind in kinds.items() if re.search(r"\b(int|float)\b", kind)]
    assert {"lr", "num_steps", "max_new_tokens", "hang_timeout", "reward_weights"} <= set(numbers)
    endless = (float("inf"), float("-inf"), float("nan"), 1e30, 10**400)
    for name, number in itertools.product(numbers, endless):
        value = (number,) if "tuple" in kinds[name] else number
        with pytest.raises(InputError, match=rf"{flag_of(name)}\b"):
            module.check(module.Config(**{name: value}))


REFUSED = {
    "train_grpo": [
        # shared flags
        ("--model x", "--model needs --data"),
        ("--gpus 8x80", "--gpus 8x80: has no effect without --dry-run"),
        ("--dry-run --gpus 8", "--gpus 8: give the number of ranks"),
        ("--dry-run --gpus 8x80 --device cpu", "--gpus 8x80: with --device cpu"),
        ("--dry-run --gpus 0x80", "--gpus 0x80: give the number of ranks"),
        ("--dry-run --gpus 16x80 --shard-over node", "--gpus 16x80: does not say how many are in a node"),
        *(
            (f"--dry-run --gpus 8x80 --decode-group {size}", f"--decode-group {size}: {fault}")
            for size, fault in (
                (3, "8 ranks do not make groups of 3"),
                (16, "8 ranks do not make groups of 16"),
                *((small, "must ") for small in (-2, 0, 1)),
            )
        ),
        (
            "--dry-run --gpus 8x80 --shard-decode on --shard-gradients off",
            "--shard-decode on: gradients are sharded too; leave out --shard-gradients off",
        ),
        ("--reward-weights 0", "--reward-weights: all are 0"),
        ("--adam-betas 0.9 1", "--adam-betas 0.9 1.0: each must be at least 0 and below 1"),
        ("--reward-weights 1 2", "--reward-weights: there are 1 rewards"),
        ("--reward-weights -1e7", "--reward-weights -10000000.0: must be at most"),
        ("--reward-workers 0", "--reward-workers 0: must be greater than 0"),
        *(
            (f"--chat-template-kwargs {text}", f"--chat-template-kwargs {text[:80]}: ")
            for text in ("enable_thinking", "[1]", "{}", '{"a":1,"a":2}', "[" * 100_000)
        ),
        # adapters
        ("--lora-rank 4 --lora-targets lm_head", "--lora-targets lm_head: one of q_proj"),
        ("--lora-rank 4 --lora-targets", "--lora-targets: name at least one"),
        ("--lora-alpha 8", "--lora-alpha 8.0: has no effect without --lora-rank"),
        ("--lora-rank 5000", "--lora-rank 5000: must be at most"),
        # the script's own flags
        ("--temperature 0", "--temperature 0.0"),
        ("--group-size 1 --advantage-norm none", "--group-size 1: --baseline mean needs at least 2"),
        ("--baseline greedy", "--baseline greedy: needs --advantage-norm none"),
        ("--baseline none --advantage-norm batch_std", "--baseline none: needs --advantage-norm none"),
        ("--algorithm remax --dynamic-sampling", "--group-size 1: --dynamic-sampling"),
        ("--kl-reward-coef 0.1", "--kl-reward-coef: --advantage-norm group_std would divide it away"),
        ("--algorithm reinforce++ --ratio-level sequence_mean", "--ratio-level sequence_mean has one"),
        ("--max-grad-norm -1", "--max-grad-norm -1.0: must not be negative"),
        ("--max-refills 3", "--max-refills 3: has no effect without --dynamic-sampling"),
        ("--kl-estimator k2", "--kl-estimator k2: has no effect without --kl-coef"),
        ("--correction-low 0.5", "--correction-low 0.5: has no effect without --correction"),
        ("--max-staleness -1", "--max-staleness -1: must not be negative"),
        (
            "--correction token_mask --correction-low 3",
            "--correction-low: must be less than --correction-high",
        ),
        ("--separate-rewards", "--separate-rewards: there is only one reward"),
        ("--kl-coef 0.1 --kl-reward-coef 0.1", "--kl-coef with --kl-reward-coef"),
        ("--dual-clip 1", "--dual-clip 1.0: must be greater than 1"),
        ("--algorithm cispo --dual-clip 3", "--dual-clip with --policy-loss cispo"),
        ("--correction token_mask --old-logprobs sampled", "--correction with --old-logprobs sampled"),
        ("--separate-rewards --baseline leave_one_out", "--separate-rewards"),
        ("--overlong-buffer 4", "--overlong-buffer 4.0: a share"),
        ("--num-minibatches 129", "--num-minibatches 129"),
        ("--teacher-coef 0.5", "--teacher-coef 0.5: has no effect without --teacher"),
        ("--teacher a --teacher-coef 0", "--teacher-coef 0: must be greater than 0"),
        ("--teacher a --baseline none", "--baseline none: has no effect without --teacher-coef"),
        ("--algorithm dapo --teacher a", "--dynamic-sampling: --teacher alone"),
        ("--teacher a --ratio-level sequence_mean", "--teacher-kl sampled: --ratio-level sequence_mean"),
        ("--teacher a --teacher-coef 0.5 --group-size 1", "--group-size 1: --baseline mean needs"),
        ("--tools a.py:f --rollout a.py:g", "--rollout and --tools: each of them writes the rollouts"),
        ("--tools a.py:f --environment a.py:E", "--tools and --environment: each of them"),
    ],
    "train_ppo": [
        ("--kl-target 6", "--kl-target"),
        ("--correction-high 3", "--correction-high 3.0: has no effect without --correction"),
        ("--gamma 1.5", "--gamma 1.5"),
        ("--gae-lambda -0.1", "--gae-lambda -0.1"),
        ("--value-lr 0", "--value-lr 0.0"),
        ("--value-warmup-steps 300", "--value-warmup-steps 300"),
        ("--bootstrap-truncated --drop-truncated", "--bootstrap-truncated with --drop-truncated"),
    ],
}


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [(script, *refusal) for script, refusals in REFUSED.items() for refusal in refusals],
    ids=lambda value: value[:40],
)
def test_what_flags_cannot_mean_is_refused_by_name(script, flags, message):
    """Pitfalls 22, 28 and 39 among them; the same flags without the offending one pass. Faults 43 and 59."""
    module = load_script(f"{script}.py")
    module.check(module.Config())
    assert module.Config(chat_template_kwargs='{"a": false}').template_arguments == {"a": False}
    with pytest.raises(InputError, match=re.escape(message)):
        module.check(read_config(module, [flags]))


def test_a_refusal_names_the_flag_that_a_fork_has_added():
    """The fork's defaults pass."""
    check_numbers(ForkConfig(), positive=("bonus",))
    check_needed(ForkConfig(), needs={"bonus": "penalty"})
    for bonus, positive, message in (
        (-1.0, (), "--bonus -1.0: must not be negative"),
        (float("nan"), (), "--bonus nan"),
        (0.0, ("bonus",), "--bonus 0.0: must be greater"),
    ):
        with pytest.raises(InputError, match=message):
            check_numbers(ForkConfig(bonus=bonus), positive=positive)
    with pytest.raises(InputError, match=r"--bonus 2\.0: has no effect without --penalty"):
        check_needed(ForkConfig(bonus=2.0), needs={"bonus": "penalty"})


ROLLOUT = "--rollout, --tools or --environment"
FILE = "a --reward FILE.py:FUNCTION"
JSONL = "--data of --task jsonl"


@pytest.mark.parametrize(
    ("flags", "needed", "cure"),
    [
        ("--reward-timeout 9", FILE, "--reward mine.py:f"),
        ("--reward-workers 2 --reward episode:a", FILE, "--reward module:f"),
        ("--on-reward-error zero --reward episode", FILE, "--reward episode mine.py:f"),
        ("--tool-format hermes", ROLLOUT, "--tools mine.py:f"),
        ("--max-turns 2", ROLLOUT, "--rollout mine.py:f"),
        ("--reply-timeout 1", ROLLOUT, "--tools mine.py:f"),
        ("--max-episode-seconds 3", ROLLOUT, "--rollout mine.py:f"),
        ("--prompt-field text", JSONL, "--data a.jsonl"),
        ("--prompt-field text --data a.jsonl --task gsm8k", JSONL, "--task jsonl"),
        ("--shard-over node", "a second rank", ""),
        ("--shard-decode on", "a second rank", ""),
        ("--decode-group 2", "a second rank", ""),
        ("--decode-group 2 --shard-decode off", "--shard-decode", "--shard-decode auto"),
        ("--kl-reward-level token", "--kl-reward-coef", "--kl-reward-coef 0.1"),
        ("--advantage-eps 0.1 --advantage-norm none", "--advantage-norm", "--advantage-norm batch_std"),
    ],
)
def test_a_flag_that_has_no_effect_is_refused(monkeypatch, flags, needed, cure):
    """With the flags that it needs it is accepted: on two ranks, for --shard-over and the like. Fault 43."""
    flag, _ = flags.split(maxsplit=1)
    with pytest.raises(InputError, match=rf"^{flag} \S+: has no effect without {re.escape(needed)}$"):
        train_grpo.check(read_config(train_grpo, [flags]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    train_grpo.check(read_config(train_grpo, [flags, cure]))


def test_what_a_preset_sets_is_refused_for_nobody_who_turns_its_condition_off():
    config = train_grpo.Config(**{**train_grpo.ALGORITHMS["reinforce++"], "kl_reward_coef": 0.0})
    train_grpo.check(dataclasses.replace(config, algorithm="reinforce++"))


def test_a_script_whose_rollout_goes_on_or_reads_an_answer_may_limit_its_turns():
    async def goes_on(episode):
        turn = await episode.generate()
        await episode.generate(after=turn.text)

    async def reads(episode):
        turn = await episode.generate()
        assert turn.message

    config = RunConfig(max_turns=2, tool_format="hermes")
    for rollout in (goes_on, reads, functools.partial(goes_on), None):
        check_shared(config, rollout)
    for script in (train_grpo, train_ppo):
        with pytest.raises(InputError, match="--tool-format hermes: has no effect"):
            check_shared(config, script.rollout)


@pytest.mark.parametrize(
    "name", [name for name, kind in typing.get_type_hints(train_ppo.Config).items() if "str" in str(kind)]
)
def test_an_empty_text_is_refused_and_never_taken_for_a_flag_that_was_left_out(name):
    """Fault 43."""
    for value in ("", " "):
        is_tuple = isinstance(getattr(train_ppo.Config(), name), tuple)
        with pytest.raises(InputError, match=f"{flag_of(name)}: is empty"):
            train_ppo.check(train_ppo.Config(**{name: ("a", value) if is_tuple else value}))


@pytest.mark.parametrize(
    "flags",
    [
        f"--prompts-per-step {10**12}",
        f"--group-size {10**9}",
        "--threads 4000",
        "--reward-workers 9999 --reward mine.py:f",
        "--rollout-workers 9999 --rollout mine.py:f",
        f"--num-epochs {10**9}",
        f"--max-running-requests {10**12}",
    ],
)
def test_sizes_that_no_machine_has_are_refused_before_work_and_by_a_dry_run(flags):
    """Fault 43."""
    flag, value, *_ = flags.split()
    for more in ("", "--dry-run"):
        with pytest.raises(InputError, match=f"{flag} {value}.*at most"):
            train_grpo.main(read_config(train_grpo, [flags, more]))
