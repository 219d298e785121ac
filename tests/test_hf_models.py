"""Types that minirl has no modules for: the gate, bits of decoding, names of tensors, steps on two ranks.

`PYTHONPATH=tests python tests/test_hf_models.py` prints the table of docs/families.md; with types, that of these.
"""

import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import train_grpo
from minirl.errors import InputError
from minirl.extras.hf_models import gate
from minirl.files.json_files import read_json_object
from minirl.model.families import config_from_dict
from minirl.model.transformer import is_batch_invariant
from minirl.model.weights import load_replica, named_parameters, save_folder
from minirl.run.embedded_model import write_shape
from support.engines import make_engine, make_request, scores_of
from support.families import logit_error
from support.marks import slow
from support.rank_pool import RankPool
from support.resuming import resume
from support.scripts import read_config, read_metrics, reward_of, run_in_pool, write_rows

CPU = torch.device("cpu")
DOCS = Path(__file__).parent.parent / "docs" / "families.md"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
# Keys of published models without which transformers' defaults are no model, or another.
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2}
KEYS = {
    "deepseek_v2": EXPERTS,
    "dots1": EXPERTS | {"n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen3_5_text": {"linear_num_key_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
# The flags of steps on two ranks.
RUNS = {
    "stablelm": ("train_ppo.py", ""),
    "gpt2": ("train_grpo.py", "--recompute-layers on"),
    "cohere": ("train_grpo.py", "--lora-rank 2 --kl-coef 0.1"),
    "qwen3_moe": ("train_grpo.py", "--kl-coef 0.1"),
}
# Of the table, in the tests.
FEW = "granite exaone4 mixtral glm4_moe".split()


def make_config(kind, **keys):
    return CONFIG_MAPPING[kind](**{"num_hidden_layers": 2} | KEYS.get(kind, {}) | keys)


def make_checkpoint(folder, kind, **keys):
    """A small random model of transformers, saved by it."""
    config, _ = gate.small_config(make_config(kind, **keys))
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    gate.scramble(oracle)
    oracle.save_pretrained(folder)
    return oracle


@pytest.mark.parametrize(
    "kind", ["gpt2", "cohere2", slow("granite"), slow("gpt_neox"), "mixtral", slow("deepseek_v3")]
)
def test_a_type_has_transformers_logits_its_bits_in_decoding_and_its_names_in_a_folder(tmp_path, kind):
    oracle = make_checkpoint(tmp_path / "read", kind)
    model = load_replica(tmp_path / "read", dtype=torch.float32)
    assert logit_error(oracle, model) < 1e-5
    requests = [
        make_request(list(range(3, 3 + length)), number=length, member=member, max_new_tokens=24)
        for length in (5, 14, 100)
        for member in range(2)
    ]
    rollouts = make_engine(model).generate(requests)
    assert is_batch_invariant(model.config, torch.float32, CPU)
    assert torch.equal(
        scores_of(model, rollouts), torch.cat([rollout.sample_logprobs for rollout in rollouts])
    )
    raw = read_json_object(tmp_path / "read" / "config.json")
    save_folder(tmp_path / "saved", named_parameters(model), config=raw, tokenizer_from=None)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("read", "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("gemma2", {}, "softcap"),
        ("gemma2", {"attn_logit_softcapping": None}, "logits after the head"),
        ("gpt_oss", {}, "s_aux"),
        ("phi", {}, "logits after the head"),
        ("jamba", {}, "keep another state"),
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


def test_a_rope_that_depends_on_the_longest_sequence_ends_where_it_would_change():
    """Beyond, the gate sees it."""
    raw = make_config("phi3", rope_parameters=LONGROPE, max_position_embeddings=131072).to_dict()
    assert config_from_dict(raw).max_position_embeddings == 4096
    sees = pytest.raises(InputError, match="rope of the longest")
    with mock.patch.object(gate, "ends_at_original", return_value=False), sees:
        gate.measure(CONFIG_MAPPING["phi3"].from_dict(raw))


def test_a_mixture_of_experts_gets_a_plan(tmp_path, capsys):
    """Qwen3-30B-A3B by its published config.json; on two cards of 80 GB it does not fit."""
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    folder = write_shape(tmp_path)
    (folder / "config.json").write_text(json.dumps(raw))
    data = f"--data {write_rows(tmp_path / 'data.jsonl', [{'prompt': '1'}])} {reward_of(tmp_path, 'float(len(c))')}"
    flags = f"--model {folder} {data} --lora-rank 16 --dry-run --gpus"
    assert train_grpo.main(read_config(train_grpo, [f"{flags} 8x80"])) == 0
    assert "model    30,5" in capsys.readouterr().out
    with pytest.raises(InputError, match="60 GB is too small"):
        train_grpo.main(read_config(train_grpo, [f"{flags} 1x60"]))


def flags_of(runs, kind):
    """The flags of steps with a small random model of a type."""
    folder = runs / f"model-{kind}"
    make_checkpoint(folder, kind)
    write_shape(runs / "tokens")
    for path in (runs / "tokens").glob("tokenizer*"):
        path.rename(folder / path.name)
    data = f"--data {write_rows(runs / 'data.jsonl', [{'prompt': f'{i}{9 - i}='} for i in range(9)])}"
    flags = (
        f"--model {folder} {data} {reward_of(runs, 'len(set(c)) / 8')} --prompts-per-step 4 --group-size 4"
    )
    return f"{flags} --max-new-tokens 8 --lr 1e-3 --temperature 9"


def run_without_gap(pool, runs, kind, flags, script="train_grpo.py"):
    """The folder of steps on two ranks in which sampled logprobs are those of training."""
    run_in_pool(pool, script, flags, f"--run-name {kind}", runs=runs)
    for line in read_metrics(runs / kind):
        assert line["policy/logp_equal_frac"] == 1
    return runs / kind


@pytest.mark.parametrize("kind", [slow(kind) for kind in RUNS])
def test_steps_on_two_ranks_have_no_gap_and_a_resume_has_the_same_bits(two_ranks, tmp_path, kind):
    script, more = RUNS[kind]
    flags = f"{flags_of(tmp_path, kind)} {more} --num-steps 2 --save-every 1"
    run = run_without_gap(two_ranks, tmp_path, kind, flags, script)
    if "lora" not in more:
        before, after = (
            load_file(path / "model.safetensors")
            for path in (tmp_path / f"model-{kind}", run / "checkpoints/000002")
        )
        assert before.keys() == after.keys()
        assert not all(torch.equal(before[name], after[name]) for name in before)
    resume(two_ranks, script, run, flags)


def trained_types(pool, runs, kinds):
    """Those of the types that pass the gate with 4 layers and equal bits, and take a step on two ranks without a gap.

    Dense ones, and mixtures of experts.
    """
    dense, mixtures = [], []
    for kind in kinds:
        try:
            config = make_config(kind, num_hidden_layers=4)
            read = config_from_dict(json.loads(config.to_json_string(use_diff=False)))
            assert is_batch_invariant(read, torch.float32, CPU), "decoding has other bits than scoring"
            run_without_gap(pool, runs, kind, f"{flags_of(runs, kind)} --num-steps 1")
        except (Exception, SystemExit) as error:
            print(kind, repr(error)[-300:].replace(chr(10), " "), file=sys.stderr)
            continue
        has_experts = any("expert" in key and value for key, value in config.to_dict().items())
        (mixtures if has_experts else dense).append(kind)
    return dense, mixtures


@pytest.mark.slow
def test_types_of_the_page_take_a_step_on_two_ranks(two_ranks, tmp_path):
    found = trained_types(two_ranks, tmp_path, FEW)
    assert sorted(found[0] + found[1]) == sorted(FEW)
    assert all(f"`{kind}`" in DOCS.read_text() for kind in FEW)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as runs:
        for kinds in trained_types(
            RankPool(2), Path(runs), sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        ):
            print(len(kinds), ", ".join(f"`{kind}`" for kind in kinds))
