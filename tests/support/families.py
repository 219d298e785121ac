"""Tiny random models of every family, created with transformers."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from minirl.files.json_files import read_json_object
from minirl.model.adapters import peft_config
from minirl.model.attention import PackedLayout, Sequence
from minirl.model.batch_invariance import head_logits
from minirl.model.config import Adapters, is_adapter
from minirl.model.families import config_from_dict, read_config
from minirl.model.transformer import Transformer, make_meta_model
from minirl.model.weights import load_unsharded_model, load_weights, write_folder
from minirl.run.embedded_model import save_tokenizer
from support.scripts import reward_of, write_rows

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 80,
    "beta_fast": 8.0,
}
ROPE_OF_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
}
DELTA_NET = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 3.0, "score": 3.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# name: (family, config keys that differ from `make_checkpoint`'s defaults, window of each layer)
CASES = {
    "llama": ("Llama", {}, (None, None)),
    "llama_tied_mha": (
        "Llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "mlp_bias": True},
        (None, None),
    ),
    "llama_head_dim": ("Llama", {"head_dim": 8, "rms_norm_eps": 0.1}, (None, None)),
    "llama_rope_llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}, (None, None)),
    "llama_biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "intermediate_size": 131},
        (None, None),
    ),
    "mistral_window": ("Mistral", {"sliding_window": 37, "intermediate_size": 131}, (37, 37)),
    "qwen2": (
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 33},
        (None, None),
    ),
    "qwen2_window_above": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1, "num_hidden_layers": 3},
        (None, 33, 33),
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, (None, None)),
    "qwen3_mixed_windows": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 130,
            "layer_types": MIXED,
            "num_hidden_layers": 3,
            "head_dim": 16,
        },
        (130, None, 130),
    ),
    "qwen3_5_text_heads": (
        "Qwen3_5Text",
        DELTA_NET | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
        (None, None),
    ),
    "qwen3_5_text": (
        "Qwen3_5Text",
        DELTA_NET
        | {
            "full_attention_interval": 3,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        (None, None, None, None),
    ),
    "qwen3_yarn": (
        "Qwen3",
        {"head_dim": 32, "rope_parameters": YARN_ROPE, "max_position_embeddings": 80},
        (None, None),
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            "head_dim": 24,
            "sliding_window": 37,
            "layer_types": MIXED,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 50,
            "rope_parameters": ROPE_OF_KIND,
        },
        (37, None, 37),
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4, "attention_bias": True}, (None, None)),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 37,
            "layer_types": MIXED,
            "num_hidden_layers": 3,
            "rope_parameters": ROPE_OF_KIND | {"full_attention": YARN_ROPE},
        },
        (37, None, 37),
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "tie_word_embeddings": True},
        (None, None, None),
    ),
    "smollm3_window": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 37, "mlp_bias": True},
        (None, 37),
    ),
}


# Published models. "models" maps each name to the config.json without tokenizer keys and to the parameter count in
# billions; the types in "mixtures" run with transformers' modules.
PUBLISHED_KEYS = json.loads(Path(__file__).with_name("published.json").read_text())
PUBLISHED = PUBLISHED_KEYS["models"]


@functools.cache
def make_checkpoint(name, scalar_head=False, **more_keys):
    """Return a transformers model whose weights exercise every feature: norms != 1, biases != 0, sharp attention."""
    family, overrides, _ = CASES[name]
    auto_class = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    keys = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 320,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 1e-5,
    }
    if scalar_head:
        keys["num_labels"] = 1
    config = getattr(transformers, f"{family}Config")(**keys | overrides | more_keys)
    model = auto_class.from_config(config, attn_implementation="eager")
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(len(str(overrides)))
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if param.ndim == 1:
            adds_one = family in ("Gemma3Text", "Qwen3_5Text") and "linear_attn" not in name
            is_around_one = "norm" in name and not adds_one
            param.data = is_around_one + (0.3 if "norm" in name else 0.5) * noise
        else:
            gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
            param.data = gain * noise / (1 if "embed" in name else param.shape[1] ** 0.5)
    return model.eval()


def twin(oracle: Any, **options: bool) -> Transformer:
    """Return minirl's model with the weights of a transformers model."""
    model = Transformer(config_from_dict(oracle.config.to_dict()), **options)
    parameters = dict(oracle.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.shape == parameters[name].shape, name
        parameter.data = parameters[name].data
    return model


@torch.no_grad()
def logit_error(oracle: Any, model: Transformer) -> float:
    """Return the relative error of the model's logits against transformers."""
    tokens = torch.arange(150) * 7 % model.config.vocab_size
    layout = PackedLayout((Sequence(150),), torch.device("cpu"))
    got = head_logits(model(tokens, layout.positions, layout), model.head).double()
    expected = oracle(tokens[None]).logits[0].double()
    return float((got - expected).norm() / expected.norm())


def adapted(folder, adapters, dtype=torch.float32, *, seed=None):
    """Return the folder's model with adapters: newly initialized ones or, with a seed, random full-rank ones."""
    config = dataclasses.replace(read_config(folder), adapters=adapters)
    model = make_meta_model(config)
    model.to(dtype).to_empty(device="cpu")
    model.tie_weights()
    load_weights(model, folder)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.data.normal_(std=0.3, generator=generator)
    return model


@torch.no_grad()
def check_peft(folder: Path, saved: Path, auto_class: Any) -> None:
    """Check that PEFT reproduces training's logits from saved adapters, and that minirl loads merged weights."""
    peft = pytest.importorskip("peft")
    model = adapted(folder, Adapters(2), seed=0)
    adapters = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    raw = read_json_object(folder / "config.json")
    config = peft_config(model.config, raw, adapters, str(folder))
    write_folder(saved, adapters, config=raw, peft_config=config)
    oracle = peft.PeftModel.from_pretrained(auto_class.from_pretrained(folder, dtype=torch.float32), saved)
    oracle.save_pretrained(saved / "again")
    for same in (
        model,
        *(load_unsharded_model(path, dtype=torch.float32) for path in (saved, saved / "again")),
    ):
        assert logit_error(oracle, same) < 1e-4


def flags_to_train(model: Path) -> str:
    """Give a small model the bundled model's tokenizer; return flags to train the model on new rows."""
    save_tokenizer(model)
    data = write_rows(model.with_name("data.jsonl"), [{"prompt": f"{i}{9 - i}="} for i in range(9)])
    flags = "--prompts-per-step 4 --group-size 4 --max-new-tokens 8 --lr 1e-3 --temperature 9"
    return f"--model {model} --data {data} {reward_of(model.parent, 'len(set(c)) / 8')} {flags}"


def family_table() -> dict[str, float]:
    """Return each family's largest relative logit error against transformers over its cases (fp32)."""
    errors: dict[str, float] = {}
    for name in CASES:
        oracle = make_checkpoint(name)
        family = oracle.config.model_type
        errors[family] = max(errors.get(family, 0.0), logit_error(oracle, twin(oracle)))
    return errors


if __name__ == "__main__":  # for docs/families.md
    print(", ".join(f"`{family}` {error:.0e}" for family, error in family_table().items()))
