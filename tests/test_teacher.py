"""Distillation: the policy learns from a teacher's logprobs of its own completions."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_grpo
from minirl.errors import InputError
from minirl.model.weights import load_unsharded_model, truncate_vocabulary
from minirl.training.batch import Batch, sequence_infos_from_lengths
from minirl.training.scoring import score_teacher
from support.models import moved_weights
from support.scripts import read_metrics, read_rollouts, trained, untimed, write_rows

TINY = "--num-steps 2 --prompts-per-step 4 --group-size 3 --num-minibatches 1 --save-every 1"
TINY += " --max-new-tokens 8"


@pytest.fixture(scope="module")
def teacher(embedded_model, tmp_path_factory) -> Path:
    """Return a folder with a perturbed copy of the bundled model, which has five more embedding rows."""
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


def train(pool, runs, name, *flags):
    """Train; return the metrics without times."""
    return list(map(untimed, read_metrics(trained(pool, runs / name, "train_grpo.py", TINY, *flags))))


def test_a_teacher_that_is_the_policy_teaches_nothing(two_ranks, runs, embedded_model):
    """No token has an advantage or a loss, and no step changes a bit of any weight; rewards are logged.

    Pitfall 62.
    """
    flags = f"--teacher {embedded_model} --temperature 0.7 --lr 1e-2"
    first, _ = train(two_ranks, runs, "same", flags)
    assert (first["teacher/kl_k1"], first["optim/grad_norm"]) == (0, 0)
    assert first["perf/skipped_tokens"] == 0
    rollouts = read_rollouts(runs / "same", 1)
    assert {rollout["advantage"] for rollout in rollouts} == {0}
    assert len({rollout["reward"] for rollout in rollouts}) > 1
    assert not any(moved_weights(embedded_model, runs / "same" / "checkpoints" / "000002").values())


def test_a_teacher_alone_makes_the_loss_its_kl_and_beside_rewards_is_added_to_their_advantages(
    one_rank, runs, teacher
):
    """The teacher term has its coefficient, whatever the rewards' baseline. Pitfall 64.

    A token without a teacher logprob would make the loss NaN.
    """
    advantages = []
    for i, coef in enumerate(("", "--teacher-coef 1e-12", "--teacher-coef 0.5")):
        flags = f"--teacher {teacher} --temperature 0.7 --num-steps 1 --max-tokens-per-microbatch 40 {coef}"
        (line,) = train(one_rank, runs, f"beside-{i}", flags)
        assert line["teacher/kl_k1"] > 0
        if not coef:
            assert line["policy/loss"] == pytest.approx(line["teacher/kl_k1"], rel=1e-5)
        advantages.append([rollout["advantage"] for rollout in read_rollouts(runs / f"beside-{i}", 1)])
    alone, rewards, half = map(torch.tensor, advantages)
    torch.testing.assert_close(half, rewards + alone / 2)
    assert rewards.abs().max() > 0.1


@torch.no_grad()
def test_a_larger_vocabulary_is_cut_and_ids_beyond_a_smaller_one_have_no_mass(teacher):
    """Each of 24 ids is sampled between two other tokens; logprobs stay finite for ids that the model lacks.

    Tied head and embeddings stay one tensor. Pitfall 63.
    """
    model = load_unsharded_model(teacher, dtype=torch.float32)
    tokens = torch.nn.functional.pad(torch.arange(24)[:, None], (1, 1), value=1).flatten()
    logprobs, _ = score_teacher(
        model, Batch(sequence_infos_from_lengths([3] * 24), tokens, torch.arange(72) % 3 > 0)
    )
    assert logprobs.isfinite().all()
    assert logprobs[1::3].exp().sum() == pytest.approx(1)
    truncate_vocabulary(model, 16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(model.lm_head.weight) == 16


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("tokenizer.json", '"="', '"+"', r"its tokenizer and .* disagree on these tokens: \+, =; use"),
        (
            "config.json",
            '"vocab_size": 16',
            '"vocab_size": 9',
            "has only 9 embeddings for 16 tokens",
        ),
    ],
    ids=["tokenizer", "vocabulary"],
)
def test_teachers_that_cannot_be_used_are_refused_before_work(
    tmp_path, embedded_model, file, old, new, message
):
    """The error names the flag and the tokens, in a dry run as in a run. Pitfall 63."""
    teacher = shutil.copytree(embedded_model, tmp_path / "teacher")
    text = (teacher / file).read_text()
    assert old in text
    (teacher / file).write_text(text.replace(old, new))
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "12="}])
    config = train_grpo.Config(teacher=str(teacher), data=str(data), dry_run=True)
    with pytest.raises(InputError, match=rf"--teacher \S+teacher: {message}"):
        train_grpo.main(config)
