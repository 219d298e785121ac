"""LoRA: adapters are never merged during a run, are saved in PEFT's format, and leave their base unchanged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_grpo
import train_ppo
from minirl.errors import InputError
from minirl.model.adapters import WEIGHTS_FILE
from minirl.model.attention import PackedLayout, Sequence
from minirl.model.config import Adapters
from minirl.model.folders import ADAPTERS_FILE
from minirl.model.transformer import is_batch_invariant
from minirl.model.weights import load_unsharded_model
from minirl.training.batch import Batch, sequence_infos_from_lengths
from minirl.training.frozen_models import without_adapters
from minirl.training.scoring import score_batch
from support.families import adapted
from support.marks import slow
from support.models import RAW_CONFIG, adamw, make_folder, sharded
from support.resuming import resume
from support.scripts import (
    read_metrics,
    reward_of,
    run_in_pool,
    trained,
    write_rows,
)

CPU = torch.device("cpu")
TINY = "--num-steps 2 --prompts-per-step 4 --group-size 3 --save-every 1 --max-new-tokens 8"
NARROW, WIDE = Adapters(2, 4.0), Adapters(12, 6.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a random fp64 model."""
    return make_folder(tmp_path_factory.mktemp("base") / "model", RAW_CONFIG)


def logprobs_of(model, tokens, lengths):
    is_sampled = PackedLayout(tuple(map(Sequence, lengths)), CPU).positions > 0
    return score_batch(model, Batch(sequence_infos_from_lengths(lengths), tokens, is_sampled))[0]


@pytest.mark.parametrize("adapters", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_adapters_change_no_bit_and_others_no_token_by_its_batch(folder, dtype, adapters):
    """Packed sequences equal separate sequences even at rank 2, whose small matmuls could depend on the batch."""
    tokens = torch.arange(90) % 33
    base = load_unsharded_model(folder, dtype=dtype)
    assert torch.equal(
        logprobs_of(adapted(folder, adapters, dtype), tokens, (90,)), logprobs_of(base, tokens, (90,))
    )
    model = adapted(folder, adapters, dtype, seed=1)
    packed = logprobs_of(model, tokens, (40, 30, 20)).split((40, 30, 20))
    if not is_batch_invariant(model.config, dtype, CPU):
        pytest.skip("this machine's matrix library gives rows other bits in other batches")
    for part, own in zip(packed, tokens.split((40, 30, 20)), strict=True):
        assert torch.equal(part, logprobs_of(model, own, (len(own),)))
    assert not torch.equal(packed[0], logprobs_of(base, tokens[:40], (40,)))


def train_one_update(rank, folder, options):
    """Return the weights after an update of the adapters; check which weights share storage."""
    model = sharded(folder, adapters=NARROW, **options)
    optimizer = adamw(model)
    addresses = [parameter.data_ptr() for parameter in model.decoder.parameters()]
    tokens = torch.arange(20) % 33
    reference = without_adapters(lambda base, batch: [logprobs_of(base, batch, (20,))])
    with pytest.raises(TypeError):
        without_adapters(lambda base, batch: 1 + batch)(model.decoder, "")  # the adapters are on again
    (at_first,) = reference(model.decoder, tokens)
    model.backward(logprobs_of(model.module, tokens, (20,)).sum(), is_last=True)
    model.step(optimizer, lr=0.01, max_grad_norm=0.0)
    assert torch.equal(reference(model.decoder, tokens)[0], at_first)
    assert not torch.equal(logprobs_of(model.decoder, tokens, (20,)), at_first)
    # A CUDA graph reads the adapters at these addresses.
    assert addresses == [parameter.data_ptr() for parameter in model.decoder.parameters()]
    assert all(".lora_" in name for name in model.masters)
    for own_base in (folder, folder / ".." / folder.name):  # the second path counts as another folder
        value = sharded(own_base, scalar_head=True, adapters=NARROW, base=model, **options)
        assert value.masters.keys() == {*model.masters, "score.weight"}
        for name, weight in value.compute_weights.items():
            if name not in value.masters:
                is_shared = weight.data_ptr() == model.compute_weights[name].data_ptr()
                assert is_shared == (own_base == folder), name
    return {name: weight.detach().clone() for name, weight in model.compute_weights.items()}


@pytest.mark.parametrize("options", [{}, slow({"shard_gradients": True, "offload_optimizer": True})], ids=str)
def test_an_update_changes_the_adapters_alone_and_as_on_one_rank(one_rank, two_ranks, folder, options):
    """The base has no masters. The reference shares the base's storage, and so does a value model from its folder."""
    base = dict(load_unsharded_model(folder, dtype=torch.float32).named_parameters())
    (expected,) = one_rank.run(train_one_update, folder, {})
    for after in two_ranks.run(train_one_update, folder, options):
        assert all(torch.equal(after[name], weight) for name, weight in base.items())
        assert all(weight.any() for weight in after.values()), "the adapters' B was 0"
        for name, weight in after.items():
            # Two ranks double the gradient, which halves the effect of AdamW's epsilon.
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def data(runs) -> str:
    """Return flags for prompts, and for a reward that is hardly ever equal within a group."""
    path = write_rows(runs / "data.jsonl", [{"prompt": f"{i}2="} for i in range(1, 9)])
    return f"--data {path} {reward_of(runs, 'sum(map(ord, c)) % 7')}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("train_grpo.py", "--lora-rank 1 --num-steps 3 --kl-coef 0.1 --max-staleness 1"),
        (
            "train_ppo.py",
            "--lora-rank 2 --kl-reward-coef 0.1 --dtype bfloat16",
        ),
    ],
    ids=["grpo", "ppo"],
)
def test_a_run_of_adapters_has_no_gap_and_resumes_with_the_same_bits(two_ranks, runs, data, script, more):
    """Both runs use two ranks and a reference; GRPO has partial rollouts, and one rank holds A's only row.

    A checkpoint has no copy of the base.
    """
    flags = f"{TINY} {data} {more}"
    folder = trained(two_ranks, runs / f"lora-{script[:-3]}", script, flags)
    gaps = [line.get("policy/logp_gap_max") for line in read_metrics(folder)]
    assert gaps[0] == 0
    assert {*gaps} <= {0.0, None}, "older weights may have sampled all of GRPO's second step"
    resume(two_ranks, script, folder, flags)
    checkpoint = folder / "checkpoints" / "000002"
    assert not list(checkpoint.rglob("model.safetensors"))
    if script == "train_ppo.py":
        assert "base_model.model.score.weight" in load_file(checkpoint / "value" / WEIGHTS_FILE)
        kl = [line["policy/kl_ref_completion"] for line in read_metrics(folder)]
        assert kl[0] == 0 != kl[1], "the reference does not move with the policy"


@pytest.fixture(scope="module")
def checkpoint(one_rank, runs) -> Path:
    """Return a run's checkpoint, in which training has changed the adapters much."""
    folder = trained(one_rank, runs / "lora-saved", "train_grpo.py", TINY, "--lora-rank 2 --lr 0.05")
    return folder / "checkpoints" / "000002"


@pytest.fixture
def peft_folder(checkpoint, tmp_path) -> Path:
    """Return adapters as PEFT saves them: config and tokenizer are only in the base's folder."""
    for name in (ADAPTERS_FILE, WEIGHTS_FILE):
        shutil.copy(checkpoint / name, tmp_path)
    return tmp_path


def test_what_peft_merges_has_the_bits_of_what_minirl_reads(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    adapted_model = peft.AutoPeftModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    adapted_model.merge_and_unload().save_pretrained(tmp_path)
    merged, replica = (
        dict(load_unsharded_model(folder, dtype=torch.float32).named_parameters())
        for folder in (tmp_path, checkpoint)
    )
    assert all(torch.equal(weight, replica[name]) for name, weight in merged.items())


def test_adapters_resume_on_a_moved_base_and_are_refused_on_another_or_with_another_rank(
    one_rank, runs, embedded_model, tmp_path, data
):
    """A checkpoint has only adapters, which give another model on another base, such as a later snapshot.

    Fault 13.
    """
    for name in ("base", "moved", "later"):
        shutil.copytree(embedded_model, tmp_path / name)
    weights = load_file(tmp_path / "later" / "model.safetensors")
    save_file(
        {name: 1.01 * weight for name, weight in weights.items()}, tmp_path / "later" / "model.safetensors"
    )
    flags = f"{data} --num-steps 1 --prompts-per-step 1 --group-size 2 --max-new-tokens 4 --lora-rank 2"
    flags += f" --run-name lora-moved --model {tmp_path}/"
    run_in_pool(one_rank, "train_grpo.py", f"{flags}base", runs=runs)
    for changed, old_and_new in (
        ("later", f"saved '{tmp_path}/base', current '{tmp_path}/later'"),
        ("base --lora-rank 1", "saved 2, current 1"),
    ):
        with pytest.raises(
            AssertionError, match=rf"has different adapters for the policy: .*\({old_and_new}\)"
        ):
            run_in_pool(one_rank, "train_grpo.py", f"{flags}{changed}", runs=runs)
    assert "already finished" in run_in_pool(one_rank, "train_grpo.py", f"{flags}moved", runs=runs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_rslora": True}, "use_rslora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"option_of_2027": [1]}, r"option_of_2027 is \[1\]"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None; name the folder"),
    ],
    ids=str,
)
def test_adapters_that_would_be_computed_in_another_way_are_refused(peft_folder, change, message):
    """The error names file and key."""
    file = peft_folder / ADAPTERS_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=f"{ADAPTERS_FILE}.*{message}"):
        load_unsharded_model(peft_folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.0.mlp.up_proj.lora_B", [384, 4], r"lora_A \[2, 128\] and lora_B \[384, 4\] with r 2"),
        ("embed_tokens.lora_embedding_A", [2, 16], "no weights for .*embed_tokens.lora_embedding_A"),
    ],
)
def test_adapters_that_do_not_fit_their_base_are_refused(peft_folder, name, shape, message):
    """No adapter is dropped silently."""
    tensors = load_file(peft_folder / WEIGHTS_FILE)
    tensors[f"base_model.model.model.{name}.weight"] = torch.zeros(shape)
    save_file(tensors, peft_folder / WEIGHTS_FILE)
    with pytest.raises(InputError, match=message):
        load_unsharded_model(peft_folder, dtype=torch.float32)


def test_adapters_learn_at_ten_times_the_learning_rate():
    """An explicit --lr takes precedence."""
    assert train_grpo.Config(lora_rank=8).peak_lr == 10 * train_grpo.Config().peak_lr
    assert train_ppo.Config(lora_rank=8, lr=1e-4).peak_lr == 1e-4
