"""Scripts as users run them: presets, options, uneven splits and slow user code, on one or two ranks."""

import json
from contextlib import nullcontext

import pytest

import train_grpo
from support.marks import slow
from support.scripts import (
    FAST_LEARNING,
    SCRIPTS,
    all_held_out,
    read_metrics,
    run_in_pool,
    scored_before_the_update,
    trained,
    untimed,
)

ALGORITHMS = train_grpo.ALGORITHMS


@pytest.mark.slow
def test_default_run_learns(two_ranks, runs):
    """Rewards and the held-out score rise in a short run on two ranks. The test of row 1 uses torchrun."""
    flags = f"--run-name a --save-every 20 {FAST_LEARNING} --num-steps 30"
    output = run_in_pool(two_ranks, "train_grpo.py", flags, runs=runs, under=all_held_out)
    metrics = read_metrics(runs / "a")
    rewards = [line["reward/exact"] for line in metrics]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 0.3
    before, after = metrics[0]["eval/before"], metrics[-1]["eval/reward"]
    assert 0.4 < before < 0.5
    assert after > before + 0.1
    assert f"held-out eval/reward: {before:.3f} before, {after:.3f} after" in output
    assert all(line["policy/logp_gap_max"] <= 1e-5 for line in metrics)
    assert sorted(p.name for p in (runs / "a" / "checkpoints").iterdir()) == ["000020", "000030"]


FOUR_UPDATES = "--num-steps 1 --num-epochs 2 --num-minibatches 2"
STALE = "--num-steps 4 --num-minibatches 1 --max-staleness 2 --lr 3e-3 --kl-reward-coef 0.1"


@pytest.mark.parametrize(
    ("script", "more"),
    [
        *(slow(script, FOUR_UPDATES) for script in SCRIPTS),
        ("train_grpo.py", f"{STALE} --advantage-norm none"),
        slow("train_ppo.py", STALE),
    ],
)
def test_old_logprobs_are_those_before_the_first_update(one_rank, runs, script, more):
    """Pitfall 48: all four updates of a step see the same old policy, whether its logprobs are sampled or scored.

    The KL term of stale rollouts uses the policy of the current step, not the weights that sampled them.
    """
    flags = f"--prompts-per-step 8 --group-size 4 --temperature 0.7 {more}"
    lines, again = (
        read_metrics(trained(one_rank, runs / f"{script}-{kind}-{len(more)}", script, flags, under=under))
        for kind, under in (("own", nullcontext), ("scored", scored_before_the_update))
    )
    if lines[0]["policy/logp_gap_max"]:
        pytest.skip("matmuls on this machine depend on the number of rows")
    assert list(map(untimed, lines)) == list(map(untimed, again))
    assert (lines[0]["policy/ratio_max"] > 1) == (more == FOUR_UPDATES)


def test_world_size_need_not_divide_anything(two_ranks, runs):
    """One prompt with three completions on two ranks, epochs, KL, tiny microbatches.

    Minibatches of one rollout leave a rank without tokens. Pitfall 4: all logprobs are at the sampling temperature.
    Pitfall 45. Pitfall 46: the schedule counts optimizer steps. Fault 43.
    """
    flags = "--num-steps 2 --prompts-per-step 1 --group-size 3"
    flags += (
        " --num-epochs 2 --num-minibatches 3 --kl-coef 0.1 --correction token_truncate --entropy-coef 0.01"
    )
    flags += " --max-tokens-per-microbatch 40 --loss-norm constant --advantage-norm none"
    flags += " --lr-schedule linear --lr 1e-6 --temperature 0.7"
    folder = trained(two_ranks, runs / "c", "train_grpo.py", flags)
    first, last = read_metrics(folder)
    warm_up, decay = (0.2, 0.4, 0.6, 0.8, 1, 1), (6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7)
    assert first["optim/lr"] == pytest.approx(1e-6 * sum(warm_up) / 6)
    assert last["optim/lr"] == pytest.approx(1e-6 * sum(decay) / 6)
    assert first["policy/kl_ref_k3"] < 1e-4  # the reference is the policy that was sampled
    assert last["count/rollouts"] == 3
    assert last["policy/logp_gap_max"] <= 1e-5
    assert last["optim/grad_norm"] > 0


@pytest.mark.slow
def test_every_ppo_option_runs_where_nothing_divides(two_ranks, runs):
    """Value warm-up, KL, bootstrap, epochs, tiny microbatches, and minibatches of one or two out of five rollouts."""
    flags = "--num-steps 3 --prompts-per-step 5 --value-warmup-steps 1"
    flags += " --num-epochs 2 --num-minibatches 3 --kl-reward-coef 0.1"
    flags += " --max-tokens-per-microbatch 40 --bootstrap-truncated --gamma 0.99 --entropy-coef 0.01"
    flags += " --correction token_mask --temperature 0.7"
    folder = trained(two_ranks, runs / "d", "train_ppo.py", flags)
    first, second, third = read_metrics(folder)
    assert "optim/grad_norm" not in first  # the policy is not updated during the warm-up
    assert first["value/grad_norm"] > 0
    assert second["optim/grad_norm"] > 0
    assert third["policy/logp_gap_max"] <= 1e-5


SLOW = """
import time

def rewards(completions):
    time.sleep(0.1)
    return [float(len(c)) for c in completions]

async def replies(episode):
    await episode.generate(max_tokens=1)
    time.sleep(0.05)
    await episode.generate(max_tokens=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "function"), [("--reward", "rewards"), ("--rollout", "replies")])
def test_slow_user_code_shows_in_the_time_breakdown(one_rank, runs, tmp_path, flag, function):
    """This also holds after a resume, whose loading time counts in no step."""
    (tmp_path / "mine.py").write_text(SLOW)
    flags = f"{flag} {tmp_path}/mine.py:{function} --run-name slow-{function}"
    flags += " --prompts-per-step 4 --save-every 1"
    for num_steps in ("1", "2"):
        run_in_pool(one_rank, "train_grpo.py", f"{flags} --num-steps {num_steps}", runs=runs)
    lines = read_metrics(runs / f"slow-{function}")
    assert len(lines) == 2
    for line in lines:
        assert line[f"time/wait_{function}"] >= 0.1


@pytest.mark.parametrize("name", ["dapo", *(slow(name) for name in ALGORITHMS if name != "dapo")])
def test_every_preset_runs_and_sets_its_flags(two_ranks, runs, name):
    """Each preset runs two steps. Its flags apply, except for the one given on the command line."""
    flags = f"--algorithm {name} --num-steps 2 --prompts-per-step 4 --clip-low 0.1"
    folder = trained(two_ranks, runs / name, "train_grpo.py", flags)
    args = json.loads((folder / "args.json").read_text())
    assert args | ALGORITHMS[name] | {"clip_low": 0.1} == args
    for line in read_metrics(folder):
        assert line["optim/grad_norm"] > 0
        assert line["count/rollouts"] == 4 * args["group_size"]
        assert None not in line.values()
