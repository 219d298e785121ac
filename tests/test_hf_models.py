"""Model types that run on transformers' modules: the gate, exact decoding, tensor names, steps on two ranks.

`PYTHONPATH=tests python -m test_hf_models` prints the lists in docs/families.md, and trains each type for a step
on two ranks.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import train_grpo
from minirl.errors import InputError
from minirl.extras.hf_models import gate
from minirl.files.json_files import read_json_object
from minirl.model.config import Adapters
from minirl.model.families import config_from_dict
from minirl.model.transformer import is_batch_invariant
from minirl.model.weights import load_unsharded_model, passthrough_tensors, write_folder
from minirl.run.budget import num_parameters
from minirl.run.embedded_model import save_tokenizer
from minirl.training.batch import pack
from support.engines import CPU, make_engine, make_request, scores_of
from support.families import PUBLISHED_KEYS, check_peft, flags_to_train, logit_error
from support.marks import slow
from support.models import moved_weights
from support.rank_pool import RankPool
from support.resuming import resume
from support.scripts import ROOT, read_config, read_metrics, reward_of, trained, write_rows

DOCS = ROOT / "docs" / "families.md"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
# Keys of published models. Without these keys, transformers' defaults give an invalid or different model.
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2}
KEYS = {
    "deepseek_v2": EXPERTS,
    "dots1": EXPERTS,
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    **{kind: {"is_decoder": True} for kind in ("bert", "bert-generation", "electra", "ernie", "roc_bert")},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
# Tensors in published files that transformers ignores.
OUTSIDE = {"gpt2": "transformer.h.0.attn.bias", "deepseek_v3": "model.layers.61.eh_proj.weight"}
# Scripts and flags for steps on two ranks.
RUNS = {
    "phi": ("train_ppo.py", ""),
    "gpt_neox": ("train_grpo.py", "--recompute-layers on --shard-weights on"),
    "cohere": ("train_grpo.py", "--lora-rank 2 --kl-coef 0.1"),
    "qwen3_moe": ("train_grpo.py", "--kl-coef 0.1"),
}


def make_config(kind, **keys):
    return CONFIG_MAPPING[kind](**{"num_hidden_layers": 2} | KEYS.get(kind, {}) | keys)


def make_checkpoint(folder, kind, **keys):
    """Save a small random model with transformers, and return the model."""
    config, _ = gate.shrink_config(make_config(kind, **keys))
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    gate.scramble_weights(oracle)
    oracle.save_pretrained(folder)
    return oracle


@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",
        "cohere2",
        "phi",
        slow("bert"),
        slow("modernbert-decoder"),
        slow("granite"),
        slow("gpt_neox"),
        "mixtral",
        slow("deepseek_v3"),
    ],
)
def test_a_type_has_transformers_logits_its_bits_in_decoding_and_its_names_in_a_folder(tmp_path, kind):
    oracle = make_checkpoint(tmp_path / "read", kind)
    path = tmp_path / "read" / "model.safetensors"
    if kind in OUTSIDE:  # as in published files; minirl saves the tensor unchanged
        save_file(load_file(path) | {OUTSIDE[kind]: torch.ones(2, 3)}, path, metadata={"format": "pt"})
    model = load_unsharded_model(tmp_path / "read", dtype=torch.float32)
    assert logit_error(oracle, model) < 1e-5
    requests = [
        make_request(list(range(3, 3 + length)), number=length, member=member, max_new_tokens=24)
        for length in (5, 14, 100)
        for member in range(2)
    ]
    rollouts = make_engine(model).generate(requests)
    assert is_batch_invariant(model.config, torch.float32, CPU)
    assert torch.equal(scores_of(model, rollouts), pack(rollouts).sample_logprobs)
    raw = read_json_object(tmp_path / "read" / "config.json")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    kept = passthrough_tensors(model.config, tmp_path / "read")
    write_folder(tmp_path / "saved", dict(model.named_parameters()), config=raw, passthrough=kept)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("read", "saved"))
    assert before.keys() == after.keys()
    factors = {name: 1 if name == OUTSIDE.get(kind) else 2 for name in before}
    assert all(torch.equal(factors[name] * before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v2", slow("ernie4_5_moe")])
def test_peft_reads_adapters_of_a_type(tmp_path, kind):
    """This covers a mixture's shared experts and dense layers, whose modules are named like stacked experts."""
    make_checkpoint(tmp_path / "base", kind)
    check_peft(tmp_path / "base", tmp_path / "saved", AutoModelForCausalLM)


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("gemma2", {}, "softcap"),
        ("gemma2", {"attn_logit_softcapping": None}, "logits after the head"),
        ("gpt_oss", {}, "s_aux"),
        ("jamba", {}, "keep a different kind of state"),
        ("falcon", {}, "AttentionInterface"),
        ("llama4_text", {"attention_chunk_size": 64}, "later positions"),
        ("bert", {"is_decoder": False}, "not causal"),
        ("falcon_mamba", {}, "num_attention_heads"),
    ],
)
def test_what_would_be_computed_in_another_way_is_refused_by_name(kind, keys, reason):
    raw = make_config(kind, **keys).to_dict()
    with pytest.raises(InputError, match=f"{kind}.* is not supported.*{reason}"):
        config_from_dict(json.loads(json.dumps(raw)))


def test_adapters_of_layers_without_linear_modules_are_refused():
    """`--dry-run` rejects such models too, because it builds the model to count parameters."""
    config = config_from_dict(make_config("gpt2").to_dict())
    with pytest.raises(InputError, match="--lora-rank: this model"):
        num_parameters(dataclasses.replace(config, adapters=Adapters(2)))


def test_mistral_with_kinds_of_layers_is_ministral_as_in_transformers():
    config = config_from_dict(make_config("mistral", layer_types=["full_attention"] * 2).to_dict())
    assert (config.hf_backend is not None, config.layer_windows) == (True, (None, None))


def test_a_rope_that_depends_on_the_longest_sequence_ends_where_it_would_change():
    """Beyond that length, the gate detects the change."""
    raw = make_config("phi3", rope_parameters=LONGROPE, max_position_embeddings=131072).to_dict()
    assert config_from_dict(raw).max_position_embeddings == 4096
    sees = pytest.raises(InputError, match="RoPE for the longest")
    with mock.patch.object(gate, "ends_at_original", return_value=False), sees:
        gate.measure(CONFIG_MAPPING["phi3"].from_dict(raw))


def test_a_mixture_of_experts_gets_a_plan(tmp_path, capsys):
    """Qwen3-30B-A3B, from its published config.json, does not fit on a 60 GB GPU."""
    raw = PUBLISHED_KEYS["mixtures"]["Qwen3-30B-A3B"]
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    data = f"--data {write_rows(tmp_path / 'data.jsonl', [{'prompt': '1'}])} {reward_of(tmp_path, 'float(len(c))')}"
    flags = f"--model {tmp_path} {data} --lora-rank 16 --dry-run --gpus"
    train_grpo.main(read_config(train_grpo, [f"{flags} 8x80"]))
    assert "model    30,5" in capsys.readouterr().out
    with pytest.raises(InputError, match="does not fit into 60 GB per rank"):
        train_grpo.main(read_config(train_grpo, [f"{flags} 1x60"]))


def small_run(folder, kind, **keys):
    """Make a small model of this type; return its folder and flags to train the model."""
    make_checkpoint(folder / kind, kind, **keys)
    return folder / kind, flags_to_train(folder / kind)


@pytest.mark.parametrize("kind", [slow(kind) for kind in RUNS])
def test_steps_on_two_ranks_have_no_gap_and_a_resume_has_the_same_bits(two_ranks, runs, tmp_path, kind):
    script, more = RUNS[kind]
    folder, flags = small_run(tmp_path, kind)
    flags += f" {more} --num-steps 2 --save-every 1"
    run = trained(two_ranks, runs / kind, script, flags)
    for line in read_metrics(run):
        assert line["policy/logp_equal_frac"] == 1
    if "lora" not in more:
        assert any(moved_weights(folder, run / "checkpoints/000002").values())
    resume(two_ranks, script, run, flags)


def passing_types():
    """Return transformers' dense and MoE types that pass the gate with 4 layers and equal bits."""
    dense, mixtures = [], []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = make_config(kind, num_hidden_layers=4)
            other = config_from_dict(json.loads(json.dumps(config.to_dict()))).hf_backend
            assert other is None or other.is_exact
        except Exception as error:
            print(kind, repr(error)[:150], file=sys.stderr)
            continue
        has_experts = any("expert" in key and value for key, value in config.to_dict().items())
        (mixtures if has_experts else dense).append(kind)
    return dense, mixtures


@pytest.mark.slow
def test_the_page_lists_the_types_that_pass():
    page = " ".join(DOCS.read_text().split())
    if f"With transformers {transformers.__version__.rpartition('.')[0]}, the types below pass" not in page:
        pytest.skip("the page was measured with another version of transformers")
    for kinds in passing_types():
        assert ", ".join(f"`{kind}`" for kind in kinds) in page


def trains(pool, folder, kind):
    """Return whether a step on two ranks has a gradient and no logprob gap."""
    _, flags = small_run(folder, kind, num_hidden_layers=4)
    try:
        run = trained(pool, folder / "runs" / kind, "train_grpo.py", flags, "--temperature 99 --num-steps 1")
    except AssertionError as error:
        print(kind, str(error)[-300:], file=sys.stderr)
        return False
    (line,) = read_metrics(run)
    return line["policy/logp_gap_max"] == 0 and line["optim/grad_norm"] > 0


if __name__ == "__main__":
    ranks = RankPool(2)
    for kinds in passing_types():
        print(len(kinds), ", ".join(f"`{kind}`" for kind in kinds))
        with tempfile.TemporaryDirectory() as made:
            others = [kind for kind in kinds if not trains(ranks, Path(made), kind)]
        print(len(kinds) - len(others), "train; not", others)
    ranks.stop()
