"""The training examples of docs/examples, patches and scripts: two steps and a resume each."""

import random
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirl.data.sorting import load_sorting
from minirl.rewards.functions import EpisodeReward
from support.collecting import make_collector
from support.resuming import remembered, resume
from support.scripts import ROOT, patched_fork, read_metrics, read_rollouts, trained, write_rows

EXAMPLES = ROOT / "docs" / "examples"
COMMON = "--num-steps 2 --save-every 1 --keep-checkpoints 0 --eval-every 2 --num-minibatches 1 --lr 1e-3"
"""Every example's run: its rank pool has two ranks."""


def forked(folder, name):
    """The fork that a patch of docs/examples makes of its script."""
    return patched_fork(folder, EXAMPLES / f"{name}.patch", name=name)


def train_and_resume(pool, folder, script, *flags):
    """Train two steps; then the second again from the checkpoint of the first, to the same bits. The run's metrics."""
    trained(pool, folder, script, COMMON, *flags)
    resume(pool, script, folder, COMMON, *flags, has_workers=True)
    return read_metrics(folder)


@pytest.mark.slow
def test_supervised_fine_tuning(two_ranks, runs):
    """The first step's loss is transformers' mean cross entropy of the answers' tokens and the end's."""
    lines = train_and_resume(two_ranks, runs / "sft", str(EXAMPLES / "sft.py"))
    assert "eval/reward" in lines[1]
    (folder,) = runs.glob("toy-*")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = load_sorting().train_rows
    order = list(range(len(rows)))
    random.Random("0 0").shuffle(order)
    losses = []
    for row in (rows[i] for i in order[:64]):
        prompt, answer = tokenizer(row.prompt)["input_ids"], tokenizer(row.columns["answer"])["input_ids"]
        ids = torch.tensor([prompt + answer + [tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        losses += [-logprobs[i - 1, ids[0, i]] for i in range(len(prompt), ids.shape[1])]
    assert lines[0]["policy/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.fixture
def pairs(tmp_path):
    """Rows of the embedded task, the sorted string preferred to a shuffled one."""
    rng, rows = random.Random(0), []
    for row in load_sorting().train_rows[:64]:
        answer = row.columns["answer"]
        shuffled = "".join(rng.sample(answer, len(answer)))
        rows.append({"prompt": row.prompt, "chosen": answer, "rejected": shuffled})
    return write_rows(tmp_path / "pairs.jsonl", rows)


@pytest.mark.slow
def test_reward_model(two_ranks, runs, pairs):
    """Its frozen layers stay. PPO takes the checkpoint as its reward model and first value model: see test_scripts."""
    script = str(EXAMPLES / "reward_model.py")
    flags = f"--data {pairs} --eval-data {pairs} --frozen-layers 2"
    lines = train_and_resume(two_ranks, runs / "rm", script, flags)
    assert lines[1]["policy/loss"] < lines[0]["policy/loss"]
    assert "eval/accuracy" in lines[1]
    (original,) = runs.glob("toy-*")
    before = load_file(original / "model.safetensors")
    after = load_file(runs / "rm" / "checkpoints" / "000002" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[2] for name in moved if ".layers." in name} == {"2"}
    assert "model.embed_tokens.weight" not in moved
    assert after["score.weight"].any()


COST = f"--reward {EXAMPLES}/no_nines.py:right {EXAMPLES}/no_nines.py:cost --cost-threshold 0.1"


@pytest.mark.slow
def test_safe_ppo(two_ranks, runs, tmp_path):
    """The multiplier is in the checkpoint, and grows while the cost is above its threshold."""
    fork = forked(tmp_path, "safe_ppo")
    flags = f"{COST} --prompts-per-step 8 --kl-reward-coef 0.1"
    lines = train_and_resume(two_ranks, runs / "safe_ppo", fork, flags)
    assert lines[0]["reward/cost_multiplier"] == 1
    assert lines[1]["reward/cost_multiplier"] > 1
    assert all(line["reward/cost"] > 0.1 for line in lines)
    assert lines[1]["eval/reward"] == lines[1]["eval/right"]
    next_multiplier = runpy.run_path(fork)["next_multiplier"]
    config = SimpleNamespace(multiplier_lr=0.1, cost_threshold=0.2, max_multiplier=5.0)
    assert next_multiplier(config, 1.0, 0.5) == pytest.approx(1.030455, abs=1e-6)
    assert next_multiplier(config, 2.0, 0.5) == pytest.approx(2.123673, abs=1e-6)


@pytest.mark.slow
def test_a_reference_that_follows_the_policy(two_ranks, runs, tmp_path):
    """After two steps it is the average, in fp32, of the first weights and those after each step."""
    fork = forked(tmp_path, "ema_reference")
    flags = "--kl-coef 0.1 --ema-decay 0.75 --prompts-per-step 4 --group-size 4 --num-minibatches 2"
    lines = train_and_resume(two_ranks, runs / "ema_reference", fork, flags)
    assert all(line["policy/kl_ref_k3"] > 0 for line in lines)
    checkpoints = runs / "ema_reference" / "checkpoints"
    (first,) = runs.glob("toy-*")
    weights = [
        load_file(folder / "model.safetensors")
        for folder in (first, checkpoints / "000001", checkpoints / "000002")
    ]
    averages = remembered(checkpoints / "000002", "ema")
    assert averages.keys() == weights[0].keys()
    for name, average in averages.items():
        expected = 0.5625 * weights[0][name] + 0.1875 * weights[1][name] + 0.25 * weights[2][name]
        torch.testing.assert_close(average, expected)


@pytest.mark.slow
def test_a_teachers_whole_distribution(two_ranks, runs, tmp_path):
    """The first step's loss is the mean reverse KL over the vocabulary of transformers' logits, at sampled tokens."""
    fork = forked(tmp_path, "vocabulary_kl")
    trained(two_ranks, runs / "teacher", "train_grpo.py", COMMON)
    teacher = runs / "teacher" / "checkpoints" / "000002"
    flags = f"--teacher {teacher} --temperature 0.7 --prompts-per-step 4 --group-size 2"
    lines = train_and_resume(two_ranks, runs / "vocabulary_kl", fork, flags)
    (first,) = runs.glob("toy-*")
    tokenizer = AutoTokenizer.from_pretrained(first)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (first, teacher)]
    divergences = []
    for rollout in read_rollouts(runs / "vocabulary_kl", 1):
        prompt, completion = (tokenizer(rollout[name])["input_ids"] for name in ("prompt", "completion"))
        completion += [tokenizer.eos_token_id] * (rollout["finish_reason"] == "stop")
        with torch.no_grad():
            p, q = ((m(torch.tensor([prompt + completion])).logits[0] / 0.7).log_softmax(-1) for m in models)
        sampled_at = slice(len(prompt) - 1, len(prompt) + len(completion) - 1)
        divergences.append((p.exp() * (p - q)).sum(-1)[sampled_at])
    expected = float(torch.cat(divergences).mean())
    assert expected > 1e-6
    assert lines[0]["teacher/kl"] == pytest.approx(expected, rel=1e-3)
    assert lines[0]["policy/loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_replay_buffer(two_ranks, one_rank, runs, tmp_path):
    """The second step trains on the first's groups too, with the logprobs of their sampling; so does one rank."""
    fork = forked(tmp_path, "replay_buffer")
    flags = "--prompts-per-step 4 --group-size 4 --replayed-prompts 3"
    train_and_resume(two_ranks, runs / "replay", fork, flags)
    trained(one_rank, runs / "replay-one", fork, COMMON, flags)
    for name in ("replay", "replay-one"):
        first, second = (read_rollouts(runs / name, step) for step in (1, 2))
        assert (len(first), len(second)) == (16, 28)
        replayed = [rollout["completion"] for rollout in second if rollout["id"][0] < 4]
        ids = [tuple(rollout["id"]) for rollout in second if rollout["id"][0] < 4]
        by_id = {tuple(rollout["id"]): rollout["completion"] for rollout in first}
        assert replayed == [by_id[one] for one in ids]
        assert len({prompt for prompt, _ in ids}) == 3


@pytest.mark.slow
def test_curriculum(two_ranks, runs, tmp_path):
    """The first prompts are the shortest, the share of the rows grows, and a resume draws the same ones."""
    fork = forked(tmp_path, "curriculum")
    flags = "--prompts-per-step 4 --group-size 4 --first-share 0.05 --master 0"
    lines = train_and_resume(two_ranks, runs / "curriculum", fork, flags)
    assert [line["reward/share_of_rows"] for line in lines] == pytest.approx([0.05, 0.055])
    for step in (1, 2):
        assert {len(rollout["prompt"]) for rollout in read_rollouts(runs / "curriculum", step)} == {5}


@pytest.mark.parametrize(("name", "function"), [("self_play", "play"), ("tree_search", "search")])
def test_rollouts_of_several_branches_note_what_each_is_paid(name, function):
    """All turns of a branch get the same, the rollouts nothing: that is left to the fork with rewards of turns."""
    rollout = runpy.run_path(str(EXAMPLES / f"{name}.py"))[function]
    functions = {"reward": EpisodeReward()}
    if name == "tree_search":
        functions["right"] = EpisodeReward("right")
    groups = make_collector(functions=functions, rollout=rollout).collect(4)
    assert groups.rewards[..., 0].unique().tolist() == [0]
    for one in groups.rewarded.rollouts:
        paid = {(turn.branch, turn.extra["reward"]) for turn in one.episode.turns}
        assert len(paid) == len(one.branches)
        assert name == "tree_search" or sorted(reward for _, reward in paid) in ([-1], [-1, 1])


@pytest.mark.parametrize("patch", sorted(EXAMPLES.glob("*.patch")), ids=lambda path: path.stem)
def test_a_patch_applies_where_it_says(tmp_path, patch):
    """If its script has changed there, mend the fork and make the patch again: `diff -u` of the two."""
    compile(Path(forked(tmp_path, patch.stem)).read_text(), patch.stem, "exec")


def lines_of(path):
    """How many lines a script has, or a patch adds and takes out."""
    lines = path.read_text().splitlines()
    if path.suffix != ".patch":
        return str(len(lines))
    changes = [line[0] for line in lines if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]
    return f"+{changes.count('+')} -{changes.count('-')}"


def test_the_page_lists_every_example_with_its_lines():
    page = (EXAMPLES / "README.md").read_text()
    listed = dict(re.findall(r"^\| \[[\w.]+\]\(([\w.]+)\).*? \| ([-+ \d]+) \|", page, re.MULTILINE))
    counted = {path.name: lines_of(path) for path in EXAMPLES.iterdir() if path.suffix in (".py", ".patch")}
    for name, lines in sorted(counted.items()):
        print(f"{name:24}{lines:>8}")
    assert listed == counted
