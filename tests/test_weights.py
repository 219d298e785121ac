"""Hugging Face folders: the meaning of config.json, rejected folders, and round trips that keep every bit."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

from minirl.errors import InputError
from minirl.model.families import config_from_dict, read_config, scalar_head_config
from minirl.model.folders import hub_id_or_path, resolve_folder
from minirl.model.transformer import Transformer
from minirl.model.weights import (
    check_weights,
    load_unsharded_model,
    load_weights,
    read_tokenizer_files,
    write_folder,
)
from support.families import PUBLISHED, PUBLISHED_KEYS

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN = {"model_type": "qwen2", "num_hidden_layers": 3}
SLIDING = QWEN | {"sliding_window": 5, "use_sliding_window": True}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def random_model(dtype=torch.float32, *, scalar_head=False, **overrides):
    model = Transformer(dataclasses.replace(config_from_dict(TINY | overrides), scalar_head=scalar_head))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    return model.to(dtype)


def save(model, folder, **overrides):
    config = scalar_head_config(TINY | overrides) if model.config.scalar_head else TINY | overrides
    write_folder(folder, dict(model.named_parameters()), config=config)
    return folder


def load_value_model(folder):
    """Return a value model on the folder's trunk, as in train_ppo.py, in memory that was filled with NaN."""
    model = Transformer(dataclasses.replace(read_config(folder), scalar_head=True))
    for param in model.parameters():
        param.data.fill_(torch.nan)
    check_weights(model.config, folder)
    load_weights(model, folder)
    return model


def assert_equal_parameters(model, expected):
    expected = expected if isinstance(expected, dict) else dict(expected.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, param in model.named_parameters():
        assert param.dtype == expected[name].dtype, name
        assert torch.equal(param, expected[name]), name


def edit_tensors(folder, edit):
    """Rewrite the folder's safetensors after `edit` has changed the dictionary of its tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3"} | LLAMA3},
        {"rope_parameters": {"rope_type": "llama3"} | LLAMA3, "rope_theta": 500.0},
    ],
    ids=str,
)
def test_rope_is_read_from_both_places(keys):
    """Covers `rope_parameters` (transformers 5), `rope_theta` with `rope_scaling`, and both keys for the type."""
    raw = TINY | copy.deepcopy(keys)
    (rope,) = set(config_from_dict(raw).layer_ropes)
    assert raw == TINY | keys, "what is saved later is what was read"
    # Only the second of the two frequencies makes less than one turn in the original context.
    assert rope.frequencies == pytest.approx((1.0, 500**-0.5 / 8))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "gpt9"}, "gpt9"),
        ({"model_type": None}, "model_type"),
        ({"vocab_size": None}, "'vocab_size' expected int, got NoneType"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"is_causal": False}, "the attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 0.5}},
            "the attention",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0}}, "the attention"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "llama3"),
        ({"rope_theta": None}, "'rope_theta': None"),
        ({"rope_scaling": [1]}, "rope_parameters"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures=.*Eagle3"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        (QWEN | {"hidden_size": 20}, "head_dim=5 is odd; RoPE needs an even number"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000 exceeds the limit of 1048576"),
        (QWEN | {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        (QWEN | {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        # transformers' default is two labels, which config.json omits; a model with two labels is no reward model.
        ({"architectures": ["LlamaForSequenceClassification"]}, r"config\.json.*one label"),
    ],
    ids=str,
)
def test_what_changes_the_numbers_and_is_not_supported_is_refused(tmp_path, keys, named):
    """A key that may change the model, or has a bad value, is never silently ignored. Fault 33."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | keys))
    with pytest.raises(InputError, match=named):
        read_config(tmp_path)


# Keys of families without a published model, and published models. Vision models have other config classes.
CONFIGS = {name: TINY | raw for name, raw in PUBLISHED_KEYS["keys of others"].items()}
CONFIGS |= {name: raw for name, (raw, _) in PUBLISHED.items() if "text_config" not in raw}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_are_read_with_all_of_their_keys(name):
    """Covers the keys of published models, of their copies, and all keys that transformers 4 and 5 write. Fault 33.

    Dropout changes nothing. Pitfall 8.
    """
    raw = CONFIGS[name]
    config = config_from_dict(raw)
    more = PUBLISHED_KEYS["keys that transformers 4 writes"] | PUBLISHED_KEYS["keys of copies"]
    assert config_from_dict(more | raw | {"attention_dropout": 0.5}) == config
    assert config_from_dict(CONFIG_MAPPING[raw["model_type"]].from_dict(raw).to_dict()) == config


@pytest.mark.parametrize("scalar_head", [False, True])
def test_the_other_kind_of_model_is_refused_with_its_folder(tmp_path, scalar_head):
    """A language model cannot be a reward model, and a classifier cannot be a policy: the error names both kinds."""
    folder = save(random_model(scalar_head=not scalar_head), tmp_path / "saved")
    kinds = ("a language model", r"a sequence classifier \(reward model\)")
    said = rf"{folder}: config\.json describes {kinds[not scalar_head]}; expected {kinds[scalar_head]}"
    with pytest.raises(InputError, match=said):
        load_unsharded_model(folder, dtype=torch.float32, scalar_head=scalar_head)
    assert read_config(folder) == read_config(folder, scalar_head=not scalar_head)


def test_a_value_model_from_a_language_model_starts_at_zero_everywhere(tmp_path):
    """The trunk equals the policy's bit for bit; the head is 0, whatever was in memory, and trainable. Pitfall 32."""
    source = random_model()
    model = load_value_model(save(source, tmp_path / "saved"))
    trunk = {name: param for name, param in source.named_parameters() if name != "lm_head.weight"}
    assert_equal_parameters(model, trunk | {"score.weight": torch.zeros(1, 16)})
    assert model.score.weight.requires_grad


def load_policy(folder):
    check_weights(random_model().config, folder)


UP_PROJ = "model.layers.0.mlp.up_proj.weight"
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("load", "is_classifier", "name", "tensor", "said"),
    [
        (load_value_model, True, "score.weight", None, "missing.*score.weight"),
        (load_value_model, False, "score.weight", torch.ones(1, 16), "unexpected.*score.weight"),
        (load_policy, False, "lm_head.weight", None, "missing.*lm_head.weight"),
        (load_policy, False, Q_BIAS, torch.ones(16), f"unexpected.*{Q_BIAS}"),
        (load_policy, False, UP_PROJ, torch.ones(16, 20), rf"{UP_PROJ}.*\[16, 20\].*\[20, 16\]"),
        (
            load_policy,
            False,
            UP_PROJ,
            torch.ones(20, 16).to(torch.float8_e4m3fn),
            f"{UP_PROJ} has dtype F8_E4M3; expected one of F32, BF16, F16, F64",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_or_need_decoding_are_refused_by_name(
    tmp_path, load, is_classifier, name, tensor, said
):
    """No model is loaded partially; only a value head that a language model lacks is created. Faults 32 and 33.

    Quantized weights keep scales in other tensors, so loading them directly would give another model.
    """
    folder = save(random_model(scalar_head=is_classifier), tmp_path / "saved")
    edit_tensors(folder, lambda t: t.pop(name) if tensor is None else t.update({name: tensor}))
    with pytest.raises(InputError, match=said):
        load(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["5GB", "2KB"])
@pytest.mark.parametrize(
    ("stored", "dtype"), [(torch.float64, torch.float32), (torch.float16, torch.bfloat16)], ids=str
)
def test_a_replica_is_frozen_and_has_the_weights_that_transformers_reads(
    tmp_path, tied, max_shard_size, stored, dtype
):
    """Weights come from one safetensors file or several with an index, and are converted to the requested dtype."""
    config = LlamaConfig.from_dict(TINY | {"tie_word_embeddings": tied})
    made = AutoModelForCausalLM.from_config(config, dtype=stored)
    made.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "2KB")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    replica = load_unsharded_model(tmp_path, dtype=dtype)
    assert_equal_parameters(replica, oracle)
    assert ("lm_head.weight" in dict(replica.named_parameters())) != tied
    assert not any(param.requires_grad for param in replica.parameters())


def test_weights_are_compared_with_the_config_before_any_are_made(tmp_path):
    """A config.json for a model too large for this machine is rejected by comparing tensor shapes. Fault 33."""
    folder = save(random_model(), tmp_path / "saved")
    config = config_from_dict(TINY | {"vocab_size": 2**20, "hidden_size": 2**20, "intermediate_size": 2**20})
    with pytest.raises(InputError, match="shape"):
        check_weights(config, folder)


def test_tensors_that_hold_nothing_new_are_ignored(tmp_path):
    """Old checkpoints store RoPE frequencies, and a tied head a second time."""
    source = random_model(tie_word_embeddings=True)
    folder = save(source, tmp_path / "saved", tie_word_embeddings=True)

    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)

    edit_tensors(folder, edit)
    model = Transformer(source.config)
    load_weights(model, folder)
    assert_equal_parameters(model, source)


@pytest.mark.parametrize(
    ("family", "tied", "scalar_head", "dtype"),
    [
        ("llama", True, False, torch.bfloat16),
        ("mistral", False, True, torch.bfloat16),
        ("qwen2", True, True, torch.float32),
        ("qwen3", False, True, torch.float32),
    ],
)
def test_a_saved_folder_loads_bit_equal_in_transformers_and_here(tmp_path, family, tied, scalar_head, dtype):
    """The folder is a language model or, with a scalar head, a classifier in the weights' dtype. Fault 33.

    The source's config.json may have another dtype or name no class. A value model from a classifier keeps its head.
    """
    keys = {"model_type": family, "tie_word_embeddings": tied, "torch_dtype": "float16"}
    keys["architectures"] = [] if family == "qwen2" else [f"{CLASSES[family]}ForCausalLM"]
    source = random_model(dtype, scalar_head=scalar_head, **keys)
    folder = save(source, tmp_path / "deep" / "saved", **keys)
    assert "torch_dtype" not in json.loads((folder / "config.json").read_text())
    auto_class = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    loaded, info = auto_class.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded).__name__.startswith(CLASSES[family])
    assert_equal_parameters(source, loaded)
    again = Transformer(read_config(folder, scalar_head=scalar_head)).to(dtype)
    load_weights(again, folder)
    assert_equal_parameters(again, source)
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


def test_weights_that_are_views_are_saved_as_they_look(tmp_path):
    """A transposed or sliced tensor is saved in its logical order, without neighbouring memory."""
    source = random_model()
    tensors = {name: param.detach() for name, param in source.named_parameters()}
    padded = {name: torch.cat([x, x])[: len(x)] for name, x in tensors.items()}
    transposed = {name: x.t().contiguous().t() if x.ndim == 2 else x for name, x in padded.items()}
    write_folder(tmp_path / "saved", transposed, config=TINY)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)


def test_a_checkpoint_has_all_files_of_tokenizer_and_processor_and_nothing_else(tmp_path):
    """Inference servers can load a saved folder; the source's weights and config are not copied."""
    copied = (
        "generation_config.json tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json "
        "vocab.json vocab.txt merges.txt added_tokens.json chat_template.jinja spiece.model qwen.tiktoken "
        "additional_chat_templates/tool_use.jinja preprocessor_config.json processor_config.json chat_template.json"
    ).split()
    others = (
        "config.json pytorch_model.bin model.safetensors model.safetensors.index.json README.md value/a.json"
    )
    source = tmp_path / "source"
    for name in (*copied, *others.split()):
        (source / name).parent.mkdir(exist_ok=True, parents=True)
        (source / name).write_text(f"{name} of the source")
    folder = tmp_path / "saved"
    tensors = dict(random_model().named_parameters())
    write_folder(folder, tensors, config=TINY, tokenizer_files=read_tokenizer_files(source))
    made = {"config.json", "model.safetensors"}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)) for path in files} == {*copied, *made}
    assert all((folder / name).read_text() == f"{name} of the source" for name in copied)
    assert json.loads((folder / "config.json").read_text()) == TINY | {"dtype": "float32"}


@pytest.mark.parametrize("name", ["./nowhere", "{tmp}"])
def test_a_path_without_config_is_not_found_and_not_looked_up(tmp_path, monkeypatch, name):
    """A name that looks like a path never causes a Hub request; the error names the path and the flag."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    name = name.format(tmp=tmp_path)
    with pytest.raises(InputError, match=rf"--model {name}.*config\.json"):
        resolve_folder(name)


def test_other_names_are_hub_ids(tmp_path, monkeypatch):
    """A Hub id is downloaded without pickles and code, unless a folder has the same name."""
    patterns = []

    def download(name, allow_patterns):
        patterns.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub_id_or_path(resolve_folder("owner/model")) == "owner/model"
    assert {"*.json", "*.safetensors"} <= set(patterns)
    files = map(Path, ("pytorch_model.bin", "a.pt", "a.py"))
    assert not any(file.match(pattern) for file in files for pattern in patterns)
    Path("owner/model").mkdir(parents=True)
    Path("owner/model/config.json").touch()
    assert resolve_folder("owner/model") == Path("owner/model")
