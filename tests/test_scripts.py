"""The scripts as users run them: torchrun on two ranks, forks, real input, and what a run leaves."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minirl.data import Tokenizer

ROOT = Path(__file__).parent.parent
FAST_LEARNING = ("--num-steps", "40", "--prompts-per-step", "32", "--num-minibatches", "4", "--lr-schedule", "constant")
KEYWORD_REWARD = (
    "def score(completions, word, **kwargs):\n    return [float(w in c) for c, w in zip(completions, word)]\n"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of runs for the module, so that the embedded model is made once."""
    return tmp_path_factory.mktemp("runs")


def run_script(script: Path, *flags: str, runs: Path, ranks: int = 2) -> str:
    """Run a script under torchrun (or plain Python for one rank) and return its output; fails with its errors."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*(torchrun if ranks > 1 else [sys.executable]), str(script), *flags]
    environment = {**os.environ, "MINIRL_RUNS": str(runs), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_greedy_text(folder: Path, prompt: str, num_tokens: int) -> None:
    """The folder loads in transformers and continues `prompt` there as it does in minirl."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from minirl.batch import RolloutId
    from minirl.engine import Engine, Request
    from minirl.weights import load_replica

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")["input_ids"]
    expected = reference.generate(ids, do_sample=False, max_new_tokens=num_tokens)[0].tolist()
    replica, cpu = load_replica(folder, dtype=torch.float32), torch.device("cpu")
    engine = Engine(replica, max_rows=1, cache_tokens=1024, dtype=torch.float32, device=cpu)
    stops = Tokenizer(folder).stop_ids
    request = Request(tuple(ids[0].tolist()), RolloutId(0, 0), 0, num_tokens, 0.0, stops)
    (rollout,) = engine.generate([request])
    assert rollout.tokens.tolist() == expected


def test_default_run_learns_and_leaves_what_the_readme_says(runs):
    """A short run on two ranks: rewards and held-out score rise, every file is there, transformers loads the result."""
    output = run_script(ROOT / "train_grpo.py", "--run-name", "a", "--save-every", "30", *FAST_LEARNING, runs=runs)
    metrics = read_metrics(runs / "a")
    rewards = [line["reward/mean"] for line in metrics]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 0.3
    (scores,) = re.findall(r"held-out eval/reward: ([\d.]+) before, ([\d.]+) after", output)
    assert float(scores[0]) < 0.5
    assert float(scores[1]) > float(scores[0]) + 0.03
    assert len(re.findall(r"^step ", output, re.MULTILINE)) == 40
    assert all(line["policy/logp_gap_max"] <= 1e-5 for line in metrics)
    assert sorted(p.name for p in (runs / "a" / "checkpoints").iterdir()) == ["000030", "000040"]
    rollouts = [json.loads(line) for line in (runs / "a" / "rollouts" / "000030.jsonl").read_text().splitlines()]
    assert [r["id"] for r in rollouts] == sorted(r["id"] for r in rollouts)
    assert len(rollouts) == json.loads((runs / "a" / "args.json").read_text())["prompts_per_step"] * 8
    assert_same_greedy_text(runs / "a" / "checkpoints" / "000040", "73152=", 10)


def test_two_runs_of_one_seed_are_bitwise_equal(runs):
    """Every number but the times, and every rollout, is the same again; another seed differs.

    With one update per step the ratio is exactly 1.
    """
    flags = (
        "--num-minibatches",
        "1",
        "--num-steps",
        "3",
        "--prompts-per-step",
        "5",
        "--group-size",
        "3",
        "--eval-every",
        "2",
    )
    for name, seed in (("b1", "1"), ("b2", "1"), ("b3", "2")):
        run_script(ROOT / "train_grpo.py", "--run-name", name, "--seed", seed, *flags, runs=runs)

    def numbers(name: str) -> list[dict]:
        lines = read_metrics(runs / name)
        return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]

    def rollouts(name: str) -> str:
        return (runs / name / "rollouts" / "000003.jsonl").read_text()

    assert numbers("b1") == numbers("b2") != numbers("b3")
    assert all(line["policy/ratio_max"] == 1 for line in numbers("b1"))
    assert rollouts("b1") == rollouts("b2") != rollouts("b3")


def test_world_size_need_not_divide_anything(runs):
    """One prompt of three completions on two ranks, epochs, minibatches, KL, tiny microbatches, every norm."""
    flags = ("--num-steps", "2", "--prompts-per-step", "1", "--group-size", "3", "--eval-rows", "3")
    flags += ("--num-epochs", "2", "--num-minibatches", "3", "--kl-coef", "0.1", "--kl-estimator", "k2")
    flags += ("--max-tokens-per-microbatch", "40", "--loss-norm", "constant", "--advantage-norm", "mean")
    run_script(ROOT / "train_grpo.py", "--run-name", "c", "--lr-schedule", "linear", *flags, runs=runs)
    last = read_metrics(runs / "c")[-1]
    assert last["count/rollouts"] == 3
    assert last["policy/kl_ref"] >= 0
    assert last["policy/logp_gap_max"] <= 1e-5


def test_fork_and_hack(runs, tmp_path):
    """A copy elsewhere, with another reward and another loss in a few lines, runs on two ranks."""
    source = (ROOT / "train_grpo.py").read_text()
    hacks = {
        "judge(task.reward, rows, rollouts, texts)": "[float(r.completion.count(3)) for r in rollouts]",
        "loss = clipped_policy_loss(new, old, micro.advantages, **clip)": "loss = -micro.advantages * new",
    }
    for original, hacked in hacks.items():
        assert source.count(original) == 1
        source = source.replace(original, hacked)
    fork = tmp_path / "my_grpo.py"
    fork.write_text(source)
    run_script(fork, "--run-name", "fork", "--num-steps", "12", "--eval-every", "0", runs=runs)
    rewards = [line["reward/mean"] for line in read_metrics(runs / "fork")]
    assert rewards[-1] > rewards[0] + 0.2


def story_flags(data_folder: Path, tmp_path: Path) -> tuple[str, ...]:
    reward = tmp_path / "keyword.py"
    reward.write_text(KEYWORD_REWARD)
    data = data_folder / "stories" / "prompts.jsonl"
    return ("--model", str(data_folder / "stories260K"), "--data", str(data), "--reward", f"{reward}:score")


@pytest.mark.parametrize(("name", "message"), [("fork", "exists already"), ("../fork", "plain name")])
def test_no_run_writes_into_another_or_outside(runs, name, message):
    """A taken name and a path are refused, and what is there stays as it was."""
    (runs / "fork").mkdir(exist_ok=True)
    (runs / "fork" / "metrics.jsonl").touch()
    before = sorted((runs / "fork").rglob("*"))
    environment = {**os.environ, "MINIRL_RUNS": str(runs)}
    command = [sys.executable, str(ROOT / "train_grpo.py"), "--run-name", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert sorted((runs / "fork").rglob("*")) == before
    assert not (runs.parent / "fork").exists()


@pytest.mark.parametrize("task", ["stories", "gsm8k"])
def test_a_pretrained_model_runs_on_files(runs, data_folder, tmp_path, task):
    """Two steps of the real checkpoint on the story prompts and on GSM8K; its export speaks as transformers has it."""
    flags = story_flags(data_folder, tmp_path)
    if task == "gsm8k":
        gsm8k = data_folder / "gsm8k"
        flags = (
            *flags[:2],
            "--task",
            task,
            "--data",
            str(gsm8k / "train.jsonl"),
            "--eval-data",
            str(gsm8k / "test.jsonl"),
        )
    sizes = ("--num-steps", "2", "--prompts-per-step", "6", "--group-size", "4", "--eval-rows", "8")
    flags += (*sizes, "--max-new-tokens", "48", "--lr", "1e-3")
    run_script(ROOT / "train_grpo.py", "--run-name", task, *flags, runs=runs)
    assert read_metrics(runs / task)[-1]["policy/logp_gap_max"] <= 1e-5
    assert_same_greedy_text(runs / task / "checkpoints" / "000002", "Once upon a time, there was a dog named", 60)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--group-size", "1"), "--group-size 1"),
        (("--temperature", "0"), "--temperature 0"),
        (("--model", "/no/such/folder", "--data", "x.jsonl", "--task", "gsm8k"), "x.jsonl"),
        (("--task", "jsonl"), "--data"),
        (("--model", "x"), "--data"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else None,
)
def test_bad_flags_are_refused_at_once_by_name(flags, message, tmp_path):
    """No model is made or loaded; the message names the flag or the file."""
    environment = {**os.environ, "MINIRL_RUNS": str(tmp_path)}
    command = [sys.executable, str(ROOT / "train_grpo.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
