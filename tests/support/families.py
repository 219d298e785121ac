"""Tiny random models of every family, made by transformers."""

import functools
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from minirl.model.attention import PackedLayout
from minirl.model.batch_invariance import head_logits
from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer
from minirl.model.weights import named_parameters

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
# name: (family, the keys that differ from `make_checkpoint`'s own, the windows of the layers)
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


WINDOWED = ["sliding_attention"] * 3 + ["full_attention"]
YARN_8 = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32,
    "beta_slow": 1,
}


def _published(
    model_type: str, sizes: str, billions: float, rms_norm_eps: float = 1e-6, **keys: Any
) -> tuple[dict[str, Any], float]:
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings"
    )
    shape = dict(zip(names.split(), map(int, sizes.split()), strict=True))
    return {"model_type": model_type, "rms_norm_eps": rms_norm_eps, **shape, **keys}, billions


def _beside_vision(sizes: str, billions: float, **keys: Any) -> tuple[dict[str, Any], float]:
    """A Qwen3.5 text model inside its vision model."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    text, _ = _published(
        "qwen3_5_text",
        sizes,
        billions,
        head_dim=256,
        full_attention_interval=4,
        attn_output_gate=True,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        rope_parameters=rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
        **keys,
    )
    ids = {"image_token_id": 248056, "vision_start_token_id": 248053}
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, **ids, **keys}, billions


# Published models from memory: config.json without keys of the tokenizer, and billions of parameters.
PUBLISHED = {
    "Qwen2.5-7B with YaRN": _published(
        "qwen2",
        "152064 3584 18944 28 28 4 32768",
        7.62,
        rope_theta=1e6,
        sliding_window=131072,
        max_window_layers=28,
        use_sliding_window=False,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "gemma-3-1b": _published(
        "gemma3_text",
        "262144 1152 6912 26 4 1 32768",
        1.0,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=512,
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=10000,
        rope_scaling=None,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        cache_implementation="hybrid",
    ),
    "gemma-3-4b-it": (
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        3.88,
    ),
    "OLMo-2-7B": _published(
        "olmo2", "100352 4096 11008 32 32 32 4096", 7.3, rope_theta=5e5, attention_bias=False
    ),
    "Olmo-3-7B": _published(
        "olmo3",
        "100278 4096 11008 32 32 32 65536",
        7.3,
        sliding_window=4096,
        layer_types=WINDOWED * 8,
        rope_theta=5e5,
        rope_scaling=YARN_8 | {"attention_factor": 1.2079441541679836},
    ),
    "Qwen3.5-0.8B": _beside_vision("248320 1024 3584 24 8 2 262144", 0.752, tie_word_embeddings=True),
    "SmolLM3-3B": _published(
        "smollm3",
        "128256 2048 11008 36 16 4 65536",
        3.08,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        layer_types=["full_attention"] * 36,
        max_window_layers=28,
        pretraining_tp=2,
        sliding_window=None,
        use_sliding_window=False,
        rope_theta=5e6,
        rope_scaling=None,
        tie_word_embeddings=True,
    ),
}


@functools.cache
def make_checkpoint(name, scalar_head=False, **more_keys):
    """A transformers model with weights at which every feature matters: norms off 1, biases off 0, sharp attention."""
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
    """The model here with the weights of one of transformers."""
    model = Transformer(config_from_dict(oracle.config.to_dict()), **options)
    parameters = dict(oracle.named_parameters())
    for name, parameter in named_parameters(model).items():
        parameter.data = parameters[name].data
    return model


@torch.no_grad()
def logit_error(oracle: Any, model: Transformer) -> float:
    """The relative error of the model's logits to those of transformers."""
    tokens = torch.arange(150) * 7 % model.config.vocab_size
    layout = PackedLayout((150,), torch.device("cpu"))
    got = head_logits(model(tokens, layout.positions, layout), model.lm_head.weight).double()
    expected = oracle(tokens[None]).logits[0].double()
    return float((got - expected).norm() / expected.norm())


def family_table() -> dict[str, float]:
    """Of each family the largest relative error of its cases' logits to transformers' (fp32)."""
    errors: dict[str, float] = {}
    for name in CASES:
        oracle = make_checkpoint(name)
        family = oracle.config.model_type
        errors[family] = max(errors.get(family, 0.0), logit_error(oracle, twin(oracle)))
    return errors


if __name__ == "__main__":  # for docs/families.md
    print(", ".join(f"`{family}` {error:.0e}" for family, error in family_table().items()))
