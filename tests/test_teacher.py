"""Distillation: the policy learns from a teacher's logprobs of its own completions."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import train_grpo
from minirl.errors import InputError
from minirl.model.weights import load_replica, resize_vocabulary
from minirl.objective.kl import kl_penalty
from minirl.objective.losses import clipped_policy_loss
from minirl.training import distillation
from minirl.training.distillation import Divergence
from support.marks import slow
from support.memory import allocated_bytes
from support.resuming import resume
from support.scripts import read_metrics, read_rollouts, trained, untimed, write_rows
from support.worked import assert_six_decimals

TINY = "--num-steps 2 --prompts-per-step 4 --group-size 3 --num-minibatches 1 --save-every 1"
TINY += " --max-new-tokens 8"
FORMS = {"sampled": "teacher/kl_k1", "reverse": "teacher/kl", "forward": "teacher/kl"}


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
    """Prompts without rewards."""
    prompts = [f"{i}{9 - i}{i % 4}=" for i in range(9)]
    rows = [{"prompt": prompt} for prompt in prompts]
    return str(write_rows(tmp_path_factory.mktemp("data") / "data.jsonl", rows))


def train(pool, runs, name, *flags):
    """The metrics of a run without times."""
    return list(map(untimed, read_metrics(trained(pool, runs / name, "train_grpo.py", TINY, *flags))))


@pytest.mark.parametrize("form", ["sampled", slow("reverse"), slow("forward")])
def test_a_teacher_that_is_the_policy_teaches_nothing(two_ranks, runs, embedded_model, form):
    """No token has an advantage or a loss, and a step leaves each weight as it is, bit for bit; rewards are logged.

    Pitfall 62.
    """
    flags = f"--teacher {embedded_model} --teacher-kl {form} --temperature 0.7 --lr 1e-2"
    first, _ = train(two_ranks, runs, form, flags)
    assert (first["teacher/frac"], first[FORMS[form]], first["optim/grad_norm"]) == (1, 0, 0)
    assert first["perf/skipped_tokens"] == 0
    rollouts = read_rollouts(runs / form, 1)
    assert {rollout["advantage"] for rollout in rollouts} == {0}
    assert len({rollout["reward"] for rollout in rollouts}) > 1
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (embedded_model, runs / form / "checkpoints" / "000002")
    )
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_without_rewards_the_loss_is_the_kl_and_a_resume_has_the_same_bits(
    one_rank, two_ranks, runs, teacher, data, form
):
    """On one rank in small microbatches and on two. Pitfall 64."""
    flags = f"--data {data} --teacher {teacher} --teacher-kl {form} --temperature 0.7"
    name = f"alone-{form}"
    metrics = train(two_ranks, runs, name, flags)
    for line in metrics:
        assert line["teacher/frac"] == 1
        assert line[FORMS[form]] > 0
        assert line["policy/loss"] == pytest.approx(line[FORMS[form]], rel=1e-5)
        assert "reward/mean" not in line
    resume(two_ranks, "train_grpo.py", runs / name, TINY, flags)

    small = f"{flags} --max-tokens-per-microbatch 40 --num-steps 1"
    alone = train(one_rank, runs, f"{name}-one", small)[0]
    for metric in (FORMS[form], "policy/loss", "optim/grad_norm"):
        assert alone[metric] == pytest.approx(metrics[0][metric], rel=1e-4)


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


P, Q = torch.tensor([[0.7, 0.2, 0.1]]).double(), torch.tensor([[0.5, 0.3, 0.2]]).double()
LOGITS = torch.tensor([[2.0, 1, 0, -1]]).double(), torch.tensor([[1.5, 1.5, -0.5, 0]]).double()


def divergence(policy, teacher, *, is_forward):
    """Of logits: the head's weights are the unit matrix."""
    unit = torch.eye(policy.shape[1], dtype=policy.dtype)
    return Divergence.apply(policy, unit, teacher, unit, torch.ones(1, 1), is_forward)


def test_the_divergence_has_the_values_of_worked_examples():
    """KL((.7, .2, .1) || (.5, .3, .2)) and the other way round; of two rows of logits, and the sampled advantages."""
    assert_six_decimals(divergence(P.log(), Q.log(), is_forward=False), [0.085123])
    assert_six_decimals(divergence(P.log(), Q.log(), is_forward=True), [0.092033])
    assert_six_decimals(divergence(*LOGITS, is_forward=False), [0.132851])
    assert_six_decimals(divergence(*LOGITS, is_forward=True), [0.148095])
    policy, teacher = (logits.log_softmax(-1) for logits in LOGITS)
    advantages = -kl_penalty(policy, teacher, "k1")
    assert_six_decimals(advantages, [[-0.417821, 0.582179, -0.417821, 1.082179]])


def test_the_sampled_form_is_the_reverse_kl_in_expectation():
    """Over the tokens of the vocabulary: minus the advantage, and the gradient of the policy loss."""
    policy = LOGITS[0].clone().requires_grad_()
    logprobs, teacher = policy.log_softmax(-1), LOGITS[1].log_softmax(-1)
    advantages = -kl_penalty(logprobs, teacher, "k1").detach()
    probs = logprobs.detach().exp()
    loss = clipped_policy_loss((logprobs - logprobs.detach()).exp(), advantages, clip_low=0.2, clip_high=0.2)
    (sampled,) = torch.autograd.grad((probs * loss).sum(), policy)
    full = divergence(policy, LOGITS[1], is_forward=False)
    (expected,) = torch.autograd.grad(full.sum(), policy)
    torch.testing.assert_close((-probs * advantages).sum(-1), full.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sampled, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("is_forward", [False, True])
@pytest.mark.parametrize("tile_logits", [1, 40, 60, 999])
def test_the_divergence_in_tiles_is_that_of_full_logits(monkeypatch, is_forward, tile_logits):
    """Values and gradients, of states and head of another width than the teacher's; the teacher gets no gradient."""
    monkeypatch.setattr(distillation, "TILE_LOGITS", tile_logits)
    generator = torch.Generator().manual_seed(1)
    sizes = [(11, 6), (19, 6), (11, 5), (19, 5)]
    tensors = [torch.randn(size, generator=generator).double().requires_grad_() for size in sizes]
    weights = torch.randn(11, generator=generator).double()
    got = Divergence.apply(*tensors, torch.full((len(tensors[0]), 1), 0.75), is_forward)
    p, q = ((states @ head.t() / 0.75).log_softmax(-1) for states, head in (tensors[:2], tensors[2:]))
    expected = functional.kl_div(p, q, log_target=True, reduction="none").sum(-1)
    if not is_forward:
        expected = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)
    gradients = torch.autograd.grad((weights * got).sum(), tensors, allow_unused=True)
    wanted = torch.autograd.grad((weights * expected).sum(), tensors[:2])
    assert gradients[2:] == (None, None)
    for gradient, other in zip(gradients, wanted, strict=False):
        torch.testing.assert_close(gradient, other, atol=1e-12, rtol=1e-9)


def test_no_logits_of_all_tokens_exist(monkeypatch):
    """At most four tiles besides the results: forward and backward, of 1,024 tokens and a vocabulary of 4,096."""
    states, head = torch.randn(1024, 8).requires_grad_(), torch.randn(4096, 8).requires_grad_()
    others = states.detach().clone(), head.detach().clone()
    tile_logits = 1024 * 64
    monkeypatch.setattr(distillation, "TILE_LOGITS", tile_logits)

    def update():
        Divergence.apply(states, head, *others, torch.ones(len(states), 1), False).sum().backward()

    update()  # measures the products once
    states.grad = head.grad = None
    peak, _ = allocated_bytes(update)
    assert peak <= 4 * (6 * tile_logits + 4 * (states.numel() + head.numel()))
    assert peak < 0.2 * 4 * 1024 * 4096


def test_a_larger_vocabulary_is_cut_and_a_smaller_one_gets_rows_of_zeros(teacher):
    """Head and embeddings stay one tensor where they are tied; the teacher's logits are over the policy's tokens."""
    table = load_replica(teacher, dtype=torch.float32).lm_head.weight
    for size in (16, 24):
        model = load_replica(teacher, dtype=torch.float32)
        resize_vocabulary(model, size)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, torch.cat([table, torch.zeros(3, table.shape[1])])[:size])


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (
            "other",
            r"--teacher \S+other: its tokenizer differs: token 12 is '\+', and '='",
        ),
        ("small", r"--teacher \S+small: has 9 embeddings and the tokenizer 16 tokens"),
        ("/no/such", r"--teacher /no/such: no config.json there"),
    ],
)
def test_teachers_that_cannot_be_used_are_refused_before_work(tmp_path, embedded_model, teacher, message):
    """By flag or token, in a dry run as in a run. Pitfall 63."""
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "12="}])
    for name, file, old, new in (
        ("other", "tokenizer.json", '"="', '"+"'),
        ("small", "config.json", '"vocab_size": 16', '"vocab_size": 9'),
    ):
        shutil.copytree(embedded_model, tmp_path / name)
        text = (tmp_path / name / file).read_text()
        assert old in text
        (tmp_path / name / file).write_text(text.replace(old, new))
    config = train_grpo.Config(teacher=str(tmp_path / teacher), data=str(data), dry_run=True)
    with pytest.raises(InputError, match=message):
        train_grpo.main(config)
