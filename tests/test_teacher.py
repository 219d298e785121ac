"""Distillation: the policy learns from a teacher's logprobs of its own completions."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_grpo
from minirl.errors import InputError
from minirl.model.weights import load_replica, resize_vocabulary
from minirl.training.batch import pack
from minirl.training.frozen_models import FrozenModel, after_prompts, logprobs_as
from minirl.training.scoring import score
from support.collecting import make_collector, make_frozen
from support.resuming import digests, interrupted_copy
from support.rollouts import in_two_branches
from support.scripts import read_metrics, read_rollouts, run_in_pool, untimed

CPU = torch.device("cpu")
TINY = "--num-steps 2 --prompts-per-step 4 --group-size 3 --eval-rows 4 --num-minibatches 1 --save-every 1"
TINY += " --max-new-tokens 8"
SCRIPT = "train_grpo.py"


@pytest.fixture(scope="module")
def teacher(embedded_model, tmp_path_factory) -> Path:
    """Another model than the embedded one, with five more rows of embeddings."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(embedded_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 21}))
    torch.manual_seed(0)
    weights = {
        name: weight + 0.02 * torch.randn_like(weight)
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([table, torch.ones(5, table.shape[1])])
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Prompts, with hints for the teacher: the prompt itself, and another, longer one."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    prompts = [f"{i}{9 - i}{i % 4}=" for i in range(9)]
    rows = [{"prompt": prompt, "same": prompt, "hint": f"7{prompt[::-1]}1{prompt}"} for prompt in prompts]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def train(pool, runs, name, *flags):
    """The metrics of a run without times."""
    run_in_pool(pool, SCRIPT, TINY, *flags, f"--run-name {name}", runs=runs)
    return [untimed(line) for line in read_metrics(runs / name)]


def test_a_teacher_that_is_the_policy_teaches_nothing(two_ranks, runs, embedded_model):
    """No token has an advantage, and a step leaves each weight as it is, bit for bit; rewards are logged."""
    first, _ = train(two_ranks, runs, "self", f"--teacher {embedded_model} --lr 1e-2")
    assert (first["teacher/frac"], first["teacher/kl_k1"], first["optim/grad_norm"]) == (1, 0, 0)
    assert first["perf/skipped_tokens"] == 0
    rollouts = read_rollouts(runs / "self", 1)
    assert {rollout["advantage"] for rollout in rollouts} == {0}
    assert len({rollout["reward"] for rollout in rollouts}) > 1
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (embedded_model, runs / "self" / "checkpoints" / "000002")
    )
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_without_rewards_the_advantage_is_the_teachers_and_a_resume_has_the_same_bits(
    one_rank, two_ranks, runs, teacher, data
):
    """On one rank and on two; a prompt that is the policy's changes no bit, and another one changes the numbers."""
    flags = f"--data {data} --teacher {teacher} --temperature 0.7 --teacher-prompt"
    metrics = train(two_ranks, runs, "hint", f"{flags} hint")
    for line in metrics:
        assert line["teacher/frac"] == 1
        assert line["teacher/kl_k1"] > 0
        assert line["policy/loss"] == pytest.approx(line["teacher/kl_k1"], rel=1e-5)
        assert "reward/mean" not in line
    copy = interrupted_copy(runs / "hint", "hint-resumed", 1)
    train(two_ranks, runs, copy.name, f"{flags} hint")
    assert digests(copy) == digests(runs / "hint")
    args = json.loads((runs / "hint" / "args.json").read_text())
    assert str(teacher / "model.safetensors") in args["inputs"]

    alone = train(one_rank, runs, "hint-one", f"{flags} hint")[0]
    for name in ("teacher/kl_k1", "policy/loss", "optim/grad_norm"):
        assert alone[name] == pytest.approx(metrics[0][name], rel=1e-4)
    same = train(two_ranks, runs, "same", f"{flags} same")
    assert same[0]["teacher/kl_k1"] != metrics[0]["teacher/kl_k1"]
    assert train(two_ranks, runs, "none", flags.removesuffix(" --teacher-prompt")) == same


def test_beside_rewards_the_teachers_part_is_added_to_their_advantages(one_rank, runs, teacher):
    """With its weight, whatever the rewards' baseline."""
    metrics = {}
    for coef in (None, 1e-12, 0.5):
        flags = f"--teacher {teacher} --num-steps 1" + ("" if coef is None else f" --teacher-coef {coef}")
        train(one_rank, runs, f"beside-{coef}", flags)
        metrics[coef] = [rollout["advantage"] for rollout in read_rollouts(runs / f"beside-{coef}", 1)]
    alone, rewards, half = map(torch.tensor, metrics.values())
    torch.testing.assert_close(half, rewards + alone / 2)
    assert rewards.abs().max() > 0.1


def test_the_teacher_reads_the_same_completions_after_its_own_prompts():
    """Each sequence alone has these bits; of two branches the further one keeps its prompt. In small microbatches."""
    rollouts = list(map(in_two_branches, make_collector(group_size=3).collect(4).rewarded.rollouts))
    prompts = [[5] * (3 * ordinal + 1) for ordinal in range(4)]
    model = make_frozen().model
    batch = pack([branch for rollout in rollouts for branch in rollout.branches])
    outputs = after_prompts(logprobs_as("teacher_logprobs", 0.7), prompts.__getitem__, max_tokens=90)
    frozen = FrozenModel(model, outputs, names=["teacher_logprobs"], device=CPU, max_tokens=90)
    streams = frozen.add_to(batch, [list(range(len(batch.lengths)))]).teacher_logprobs.split(batch.lengths)
    branches = itertools.chain.from_iterable(rollout.branches for rollout in rollouts)
    for branch, stream in zip(branches, streams, strict=True):
        ordinal, _, number = branch.rollout_id
        start = branch.num_prompt_tokens
        prompt = branch.tokens[:start] if number else torch.tensor(prompts[ordinal])
        alone = pack([branch]).with_prompts(lambda ordinal: prompts[ordinal])
        assert torch.equal(alone.tokens, torch.cat([prompt, branch.tokens[start:]]))
        expected, _ = score(model, alone.tokens, alone.layout(), select=alone.loss_mask, temperature=0.7)
        assert torch.equal(stream[branch.loss_mask], expected[alone.loss_mask])
        assert not stream[~branch.loss_mask].any()


def test_a_larger_vocabulary_is_cut_and_a_smaller_one_gets_rows_of_zeros(teacher):
    """Head and embeddings stay one tensor where they are tied; the teacher's logits are over the policy's tokens."""
    table = load_replica(teacher, dtype=torch.float32).lm_head.weight
    for size in (16, 24):
        model = load_replica(teacher, dtype=torch.float32)
        resize_vocabulary(model, size)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, torch.cat([table, torch.zeros(3, table.shape[1])])[:size])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"teacher_prompt": "hin"},
            r"data.jsonl:1: --teacher-prompt hin: there is no such field, only \['hint'",
        ),
        (
            {"teacher_prompt": "number"},
            r"data.jsonl:2: --teacher-prompt number: '7' is neither text nor mess",
        ),
        (
            {"teacher_prompt": "hint", "max_new_tokens": 50},
            r"data.jsonl:2: --teacher-prompt hint: 20 tokens and",
        ),
        (
            {"teacher": "other"},
            r"--teacher \S+other: its tokenizer is another one: token 12 is '\+', and '='",
        ),
        ({"teacher": "small"}, r"--teacher \S+small: has 9 embeddings and the tokenizer 16 tokens"),
        ({"teacher": "/no/such"}, r"--teacher /no/such: no config.json there"),
    ],
)
def test_teachers_and_prompts_that_cannot_be_used_are_refused_before_work(
    tmp_path, embedded_model, changes, message
):
    """By file and line, field, flag or token, in a dry run as in a run."""
    rows = [{"prompt": "12=", "hint": "12=", "number": "1"}, {"prompt": "3=", "hint": "1" * 20, "number": 7}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, file, old, new in (
        ("other", "tokenizer.json", '"="', '"+"'),
        ("small", "config.json", '"vocab_size": 16', '"vocab_size": 9'),
    ):
        shutil.copytree(embedded_model, tmp_path / name)
        text = (tmp_path / name / file).read_text()
        assert old in text
        (tmp_path / name / file).write_text(text.replace(old, new))
    if "teacher" in changes:
        changes = {"teacher": str(tmp_path / changes["teacher"])}
    fields = {"teacher": str(embedded_model), "data": f"{tmp_path}/data.jsonl", "dry_run": True}
    with pytest.raises(InputError, match=message):
        train_grpo.main(train_grpo.Config(**{**fields, **changes}))
