"""The scripts as users run them: torchrun on two ranks, forks, real input, and a run's files."""

import json
import random
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import train_grpo
from minirl.run.embedded_model import RECIPE, VOCABULARY, save_tokenizer
from support.cuda_rules import pad_as_on_cuda
from support.marks import slow
from support.models import make_folder
from support.rank_pool import RankPool
from support.scripts import (
    FAST_LEARNING,
    ROOT,
    SCRIPTS,
    all_held_out,
    branching_fork,
    extended_fork,
    read_metrics,
    read_rollouts,
    reward_of,
    run_beside_a_clock,
    run_in_pool,
    scored_before_the_update,
    trained,
    untimed,
    write_rows,
)
from support.texts import HERMES

ALGORITHMS = train_grpo.ALGORITHMS


@pytest.mark.slow
def test_default_run_learns_and_leaves_what_the_readme_says(two_ranks, runs):
    """A short run on two ranks: rewards and held-out score rise, and every file is there. Under torchrun: row 1."""
    flags = f"--run-name a --save-every 20 {FAST_LEARNING} --num-steps 30"
    output = run_in_pool(two_ranks, "train_grpo.py", flags, runs=runs, under=all_held_out)
    metrics = read_metrics(runs / "a")
    rewards = [line["reward/mean"] for line in metrics]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 0.3
    (scores,) = re.findall(r"held-out eval/reward: ([\d.]+) before, ([\d.]+) after", output)
    assert float(scores[0]) < 0.5
    assert float(scores[1]) > float(scores[0]) + 0.1
    assert len(re.findall(r"^step ", output, re.MULTILINE)) == 30
    assert all(line["policy/logp_gap_max"] <= 1e-5 for line in metrics)
    assert sorted(p.name for p in (runs / "a" / "checkpoints").iterdir()) == ["000020", "000030"]
    rollouts = read_rollouts(runs / "a", 20)
    assert [r["id"] for r in rollouts] == sorted(r["id"] for r in rollouts)
    assert len(rollouts) == json.loads((runs / "a" / "args.json").read_text())["prompts_per_step"] * 8


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_another_seed_gives_other_numbers_and_one_update_per_step_a_ratio_of_1(two_ranks, runs, script):
    """Pitfalls 38 and 61: the ratio is exactly 1. That one seed gives the same numbers is in test_resume."""
    flags = "--num-minibatches 1 --num-steps 2 --prompts-per-step 5 --group-size 3"
    found = []
    for seed in (1, 2):
        folder = trained(two_ranks, runs / f"{script}-{seed}", script, f"--seed {seed} {flags}")
        lines = list(map(untimed, read_metrics(folder)))
        # A step in which all groups of three have equal rewards has no ratio.
        assert {line["policy/ratio_max"] for line in lines if "policy/ratio_max" in line} == {1}
        found.append((lines, read_rollouts(folder, 2)))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_old_logprobs_are_those_before_the_first_update(one_rank, runs, script):
    """Pitfall 48: taken from sampling or from a forward pass, four updates of a step see the same old policy."""
    flags = "--num-steps 1 --prompts-per-step 8 --group-size 4"
    flags += " --num-epochs 2 --num-minibatches 2 --temperature 0.7"
    lines = {}
    for kind, under in (("sampled", nullcontext), ("scored", scored_before_the_update)):
        name = f"{script}-{kind}"
        output = run_in_pool(one_rank, script, f"--run-name {name} {flags}", runs=runs, under=under)
        lines[kind] = [untimed(line) for line in read_metrics(runs / name)]
    if "bitwise: False" in output:
        pytest.skip("this machine's products depend on the number of rows")
    assert lines["sampled"] == lines["scored"]
    assert all(line["policy/ratio_max"] > 1 for line in lines["scored"])


@pytest.mark.parametrize("script", [SCRIPTS[0], slow(SCRIPTS[1])])
def test_ranks_without_work_train_where_rows_are_not_padded(two_ranks, runs, script):
    """As on CUDA: minibatches of one rollout leave one of two ranks without tokens, in scoring and training.

    Pitfall 45.
    """
    flags = "--num-steps 1 --prompts-per-step 1 --group-size 3"
    flags += " --num-minibatches 3 --correction token_truncate --entropy-coef 0.01"
    folder = trained(two_ranks, runs / f"unpadded-{script}", script, flags, under=pad_as_on_cuda)
    (metrics,) = read_metrics(folder)
    assert metrics["count/rollouts"] == 3
    assert metrics["optim/grad_norm"] > 0


def test_world_size_need_not_divide_anything(two_ranks, runs):
    """One prompt of three completions on two ranks, epochs, minibatches, KL, tiny microbatches, every norm.

    Pitfall 4: all logprobs are at the sampling temperature. Pitfall 46: the schedule counts optimizer steps. Fault 43.
    """
    flags = "--num-steps 2 --prompts-per-step 1 --group-size 3"
    flags += " --num-epochs 2 --num-minibatches 3 --kl-coef 0.1"
    flags += " --max-tokens-per-microbatch 40 --loss-norm constant --advantage-norm none"
    flags += " --lr-schedule linear --lr 1e-6 --temperature 0.7"
    first, last = read_metrics(trained(two_ranks, runs / "c", "train_grpo.py", flags))
    warm_up, decay = (0.2, 0.4, 0.6, 0.8, 1, 1), (6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7)
    assert first["optim/lr"] == pytest.approx(1e-6 * sum(warm_up) / 6)
    assert last["optim/lr"] == pytest.approx(1e-6 * sum(decay) / 6)
    assert first["policy/kl_ref_k3"] < 1e-4  # the reference is the policy that was sampled
    assert last["count/rollouts"] == 3
    assert last["policy/kl_ref_k3"] >= 0
    assert last["policy/logp_gap_max"] <= 1e-5


@pytest.mark.slow
def test_every_ppo_option_runs_where_nothing_divides(two_ranks, runs):
    """Five rollouts on two ranks: value warm-up, adaptive KL, bootstrap, epochs, minibatches, tiny microbatches."""
    flags = "--num-steps 3 --prompts-per-step 5 --value-warmup-steps 1"
    flags += " --num-epochs 2 --num-minibatches 3 --kl-reward-coef 0.1 --kl-target 1"
    flags += " --max-tokens-per-microbatch 40 --bootstrap-truncated --gamma 0.99 --entropy-coef 0.01"
    flags += " --correction token_mask --kl-horizon 50 --temperature 0.7"
    first, second, third = read_metrics(trained(two_ranks, runs / "d", "train_ppo.py", flags))
    assert "optim/grad_norm" not in first  # in the warm-up the policy stands still
    assert first["value/grad_norm"] > 0
    assert second["optim/grad_norm"] > 0
    # Under the target: the coefficient sinks.
    assert first["reward/kl_coef"] == 0.1 > third["reward/kl_coef"]
    assert third["policy/logp_gap_max"] <= 1e-5


def assert_all_time_has_a_cause(line: dict) -> None:
    causes = {name: value for name, value in line.items() if name.startswith("time/") and name != "time/step"}
    assert sum(causes.values()) == pytest.approx(line["time/step"], rel=0.01)
    for name, seconds in causes.items():
        largest = line[name.replace("time/", "time_max/")]
        assert 0 <= seconds <= largest * 1.001 <= line["time_max/step"] * 1.01
    assert 0 <= line["perf/idle_frac"] <= 1


@pytest.mark.parametrize(
    ("pool", "script", "more"),
    [
        slow("two_ranks", "train_ppo.py", ""),
        slow("one_rank", "train_grpo.py", "--max-staleness 2"),
        slow("one_rank", "train_grpo.py", ""),
        slow("one_rank", "train_ppo.py", ""),
        slow("two_ranks", "train_grpo.py", ""),
        slow("two_ranks", "train_grpo.py", "--max-staleness 2"),
    ],
)
def test_the_account_of_time_adds_up_to_the_wall_clock(request, runs, pool, script, more):
    """Every second of a rank is under one cause, between two clock readings of the test; also saves and evaluations."""
    flags = "--num-steps 3 --prompts-per-step 8 --eval-every 2"
    name = f"account-{script}-{len(more)}-{pool}"
    flags += f" --save-every 1 --run-name {name}"
    moments = run_beside_a_clock(request.getfixturevalue(pool), script, f"{flags} {more}", runs=runs)
    lines = read_metrics(runs / name)
    assert [len(of_rank) for of_rank in moments] == [len(lines) + 1] * len(moments)
    for i, line in enumerate(lines):
        assert_all_time_has_a_cause(line)
        at_least = [of_rank[i + 1][0] - of_rank[i][1] for of_rank in moments]
        at_most = [of_rank[i + 1][1] - of_rank[i][0] for of_rank in moments]
        assert sum(at_least) - 1e-3 <= line["time/step"] * len(moments) <= sum(at_most) + 1e-3
        always = {"wait_rewards", "wait_ranks", "score", "update", "report", "host"}
        # A step with a bound of staleness may find all its rollouts complete.
        decodes = set() if more else {"prefill", "decode"}
        assert {f"time/{cause}" for cause in always | decodes} <= line.keys()
        # Evaluation: before training it is in no step. A save keeps the next step waiting.
        assert [f"time/{cause}" in line for cause in ("eval", "save")] == [i >= 1] * 2


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
def test_slow_user_code_and_a_resume_are_seen_in_the_account_of_time(
    one_rank, runs, tmp_path, flag, function
):
    """A resumed run begins its account after loading."""
    (tmp_path / "mine.py").write_text(SLOW)
    flags = f"{flag} {tmp_path}/mine.py:{function} --run-name slow-{function}"
    flags += " --prompts-per-step 4 --save-every 1"
    for num_steps in ("1", "2"):
        run_in_pool(one_rank, "train_grpo.py", f"{flags} --num-steps {num_steps}", runs=runs)
    lines = read_metrics(runs / f"slow-{function}")
    assert len(lines) == 2
    for line in lines:
        assert_all_time_has_a_cause(line)
        assert line[f"time/wait_{function}"] >= 0.1
        assert line["perf/idle_frac"] >= 0.1 / line["time/step"]


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        ("one_rank", "dapo"),
        *(slow("one_rank", name) for name in ALGORITHMS if name not in ("default", "dapo")),
        # Between them they take every path.
        *(slow("two_ranks", name) for name in ("dapo", "rloo", "reinforce++", "remax")),
    ],
)
def test_every_preset_runs_and_sets_what_it_says(request, runs, name, pool):
    """Two steps; the run's flags are the preset's, except the one that was given."""
    flags = f"--algorithm {name} --num-steps 2 --prompts-per-step 4 --clip-low 0.1"
    folder = trained(request.getfixturevalue(pool), runs / f"{name}-{pool}", "train_grpo.py", flags)
    args = json.loads((folder / "args.json").read_text())
    expected = ALGORITHMS[name] | {"clip_low": 0.1}
    assert {flag: args[flag] for flag in expected} == expected
    for line in read_metrics(folder):
        assert line["optim/grad_norm"] > 0
        assert line["count/rollouts"] == 4 * args["group_size"]
        assert None not in line.values()
        assert ("policy/kl_ref_k3" in line) == bool(args["kl_coef"] or args["kl_reward_coef"])


@pytest.mark.slow
def test_dynamic_sampling_fills_the_step_with_groups_that_differ(two_ranks, runs):
    """No group of equal rewards is left, and more prompts were served than are trained on; without it some are."""
    flags = "--num-steps 2 --prompts-per-step 6 --group-size 4"
    full, last = (
        read_metrics(trained(two_ranks, runs / f"refills{flag}", "train_grpo.py", flags, flag))
        for flag in ("--dynamic-sampling", "")
    )
    assert full[-1]["reward/frac_equal_groups"] == 0 < last[-1]["reward/frac_equal_groups"]
    assert full[-1]["count/epoch"] > last[-1]["count/epoch"]
    assert full[-1]["count/rollouts"] == last[-1]["count/rollouts"] == 24


@pytest.mark.slow
def test_several_rewards_count_by_their_weights_and_filtered_rollouts_stay_in_the_baseline(
    two_ranks, runs, tmp_path
):
    """Logged by name; pitfall 27: completions that were cut off have no loss but are in their group's mean."""
    functions = "def few(completion_ids):\n    return [-float(len(ids)) for ids in completion_ids]\n"
    functions += (
        "def right(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    (tmp_path / "two.py").write_text(functions)
    flags = f"--reward {tmp_path}/two.py:right {tmp_path}/two.py:few --reward-weights 1 0.1"
    flags += " --num-steps 1 --prompts-per-step 4 --max-new-tokens 6 --drop-truncated"
    (line,) = read_metrics(trained(two_ranks, runs / "sum", "train_grpo.py", flags, "--advantage-norm none"))
    assert line["reward/mean"] == pytest.approx(line["reward/right"] + 0.1 * line["reward/few"])
    assert line["reward/exact"] == line["reward/right"]  # the task's own reward is still logged
    rollouts = read_rollouts(runs / "sum", 1)
    assert {r["finish_reason"] for r in rollouts} == {"stop", "length"}
    for prompt in {r["id"][0] for r in rollouts}:
        group = [r for r in rollouts if r["id"][0] == prompt]
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-6)
        assert group[0]["reward"] == pytest.approx(
            group[0]["rewards"]["right"] + 0.1 * group[0]["rewards"]["few"]
        )


THREES = "float(c.count('3'))"
CHAT_FORK = '''
import functools


def one(digit: str) -> str:
    """One.

    Args:
        digit: Any.
    """


async def rollout(episode):
    """Two turns, between which is the result of a tool."""
    assert episode.tools[0]["function"]["name"] == "one"
    turn = await episode.generate(max_tokens=3)
    assert turn.message["content"] == turn.text.strip()
    await episode.generate(after={"role": "tool", "content": "1"}, max_tokens=5)
    roles = [message["role"] for message in episode.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]


Setup = functools.partial(Setup, tools=[one])
dry_run = functools.partial(dry_run, tools=[one])
'''
CHAT_TEMPLATE = HERMES + (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}={{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def test_a_fork_trains_on_turns_with_messages_and_tools_and_its_dry_run_counts_them(
    one_rank, runs, embedded_model, tmp_path
):
    model = tmp_path / "model"
    shutil.copytree(embedded_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": f"{i}21"} for i in range(4)])
    fork = extended_fork(tmp_path, "train_grpo.py", CHAT_FORK, name="chat")
    flags = f"--model {model} --data {data} {reward_of(tmp_path, THREES)}"
    flags += " --chat --max-new-tokens 16 --num-steps 2 --prompts-per-step 4 --group-size 4"
    told = run_in_pool(one_rank, str(fork), f"{flags} --dry-run", runs=runs)
    untold = run_in_pool(one_rank, "train_grpo.py", f"{flags} --dry-run", runs=runs)
    longest = [int(re.search(r"the longest (\d+) tokens", printed)[1]) for printed in (untold, told)]
    assert longest == [6, 6 + len("one ")]
    for line in read_metrics(trained(one_rank, runs / "chat", str(fork), flags)):
        assert line["policy/logp_gap_max"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_grpo.py", "--loss-norm constant --kl-coef 0.1"),
        ("train_grpo.py", "--loss-norm sequence_mean --kl-reward-coef 0.1 --advantage-norm batch_std"),
        ("train_ppo.py", "--loss-norm sequence_mean --gae-lambda 1 --group-size 2"),
    ],
)
def test_steps_are_the_same_whether_rollouts_have_one_branch_or_two(two_ranks, runs, tmp_path, script, flags):
    """Counts, rewards, lengths, losses, KL and gradients: a rollout weighs the same, and every token counts once."""
    name = "-".join(flags[2:].split())
    flags += f" --num-steps 2 --num-minibatches 2 --prompts-per-step 6 {reward_of(tmp_path, THREES)}"
    folders = [
        trained(two_ranks, runs / f"{number}-{name}", str(path), flags)
        for number, path in enumerate((script, branching_fork(tmp_path, script)))
    ]
    for whole, parts in zip(*map(read_metrics, folders), strict=True):
        assert untimed(parts) == pytest.approx(untimed(whole), rel=1e-3, abs=1e-6)
        assert whole["optim/grad_norm"] > 0.01
    whole, parts = (read_rollouts(folder, 2) for folder in folders)
    assert 2 in [len(line.pop("branches", [])) for line in parts]
    for line in (*whole, *parts):
        line["advantage"] = pytest.approx(line["advantage"], rel=1e-3, abs=1e-6)
    assert parts == whole


def train_reward_model(pool: RankPool, folder: Path) -> Path:
    """A tiny reward model that prefers completions with more threes, with its own vocabulary; its checkpoint."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    model = make_folder(folder / "small", RECIPE["config"] | sizes)
    save_tokenizer(model)
    tokens = list(VOCABULARY)
    backend = json.loads((model / "tokenizer.json").read_text())
    backend["model"]["vocab"] = {t: i for i, t in enumerate([*tokens[:2], *reversed(tokens[2:])])}
    (model / "tokenizer.json").write_text(json.dumps(backend))
    rng, pairs = random.Random(0), []
    for _ in range(1000):
        prompt, text = ("".join(rng.choices("0123456789", k=k)) for k in (5, rng.randint(2, 9)))
        better = text.replace(rng.choice(text), "3", 1)
        pairs.append({"prompt": f"{prompt}=", "chosen": better, "rejected": text})
    data = write_rows(folder / "pairs.jsonl", pairs)
    flags = f"--model {model} --data {data} --eval-data {data} --num-steps 100 --lr 5e-3"
    run = trained(pool, folder / "rm", str(ROOT / "docs" / "examples" / "reward_model.py"), flags)
    return run / "checkpoints" / "000100"


@pytest.mark.slow
def test_ppo_raises_a_reward_models_score_and_the_kl_term_holds_it_back(two_ranks, runs, tmp_path):
    """Reward model with another tokenizer, also the initial value model; with the term less moves."""
    flags = f"--reward-model {train_reward_model(two_ranks, tmp_path)} --num-steps 8 --prompts-per-step 64"
    flags += ""
    flags += " --lr-schedule constant --warmup-updates 1"
    gains, divergences = [], []
    for kl_coef in ("1e-9", "1"):  # without a term there would be no reference to measure
        name = f"rm-{kl_coef}"
        named = f"--run-name {name} --kl-reward-coef {kl_coef}"
        printed = run_in_pool(two_ranks, "train_ppo.py", named, flags, runs=runs, under=all_held_out)
        (scores,) = re.findall(r"held-out eval/reward_model: (-?[\d.]+) before, (-?[\d.]+) after", printed)
        gains.append(float(scores[1]) - float(scores[0]))
        divergences.append(read_metrics(runs / name)[-1]["policy/kl_ref_k3"])
    assert gains[0] > 1.5
    assert gains[0] > gains[1] + 0.6
    assert divergences[0] > 2 * divergences[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--group-size 1", "--group-size 1"),
        ("--model /no/such/folder --data {}/none.jsonl --task gsm8k", "none.jsonl"),
        ("--model /no/such/folder --data {}/one.jsonl --task gsm8k", "--model /no/such/folder"),
        ("--task jsonl", "--data"),
    ],
)
def test_bad_flags_are_refused_at_once_by_name(one_rank, tmp_path, flags, message):
    """No model is made or loaded, and no folder; the message names the flag or the file. Fault 43."""
    write_rows(tmp_path / "one.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    with pytest.raises(AssertionError, match=rf"InputError: .*{re.escape(message)}"):
        run_in_pool(one_rank, "train_grpo.py", flags.format(tmp_path), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
