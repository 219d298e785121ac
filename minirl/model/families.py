"""Convert each model family's config.json to a `ModelConfig`, using transformers' config class.

transformers defines what each key means. `read_config` builds a small model from the config.json and compares its
outputs with the outputs of transformers' model (`extras.hf_models.gate`). A config is rejected if a key that minirl
ignores changes transformers' outputs. Without the `hf_models` extra, there is no comparison, and minirl silently
ignores such keys.

docs/families.md lists the families; CONTRIBUTING.md explains how to add a family.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object
from minirl.model.config import DeltaNet, LayerNorms, ModelConfig, Rope
from minirl.model.folders import model_file, transformers_config
from minirl.model.layers import ACTIVATIONS


class VisionModel(NamedTuple):
    """A vision-language model. minirl loads only the text model."""

    # The model_type of text_config.
    text_model_type: str
    # The name prefix of the decoder's tensors.
    prefix: str


_POST_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GEMMA_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_OLMO_FEATURES = {"norms": _POST_NORMS, "qk_norm": True, "qk_norm_over_heads": True}
# The fields of `DeltaNet` and their keys in config.json.
_DELTA_SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "kernel_size": "linear_conv_kernel_dim",
}
# The `ModelConfig` fields with the same value for all models in a family. transformers hardcodes these values, too.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma3_text": {
        "norms": _GEMMA_NORMS,
        "norm_adds_one": True,
        "qk_norm": True,
        "scales_embeddings": True,
        "passthrough_weight_patterns": (r"^vision_tower\.", r"^multi_modal_projector\."),
    },
    "olmo2": _OLMO_FEATURES,
    "olmo3": _OLMO_FEATURES,
    "qwen3_5_text": {
        "norm_adds_one": True,
        "qk_norm": True,
        "attention_gate": True,
        "passthrough_weight_patterns": (r"^model\.visual\.", r"^mtp\."),
    },
    "smollm3": {},
}
_VISION_MODELS = {
    "qwen3_5": VisionModel("qwen3_5_text", "model.language_model."),
    "gemma3": VisionModel("gemma3_text", "language_model.model."),
}
# Keys that are rejected unless null, because a comparison of small models would not reveal their effects.
_UNSUPPORTED_KEYS = {"attn_logit_softcapping", "auto_map", "final_logit_softcapping", "quantization_config"}
# Supported suffixes for the class name in `architectures`. Other classes may use the same weights differently.
_CLASSIFIER_SUFFIX = "ForSequenceClassification"
_CLASS_SUFFIXES = ("ForCausalLM", "Model", "Decoder", _CLASSIFIER_SUFFIX)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# The fields of `ModelConfig` and their keys in config.json. A field keeps its default if its key is null or if the
# family has no such key. Only Gemma has `hidden_activation`.
_FIELDS_AND_KEYS = (
    *(
        (name, name)
        for name in (*_SIZE_KEYS, "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    ),
    ("qkv_bias", "attention_bias"),
    ("o_bias", "attention_bias"),
    ("mlp_bias", "mlp_bias"),
    ("activation", "hidden_act"),
    ("activation", "hidden_activation"),
)
# Upper limit for each size. No real model reaches these limits. Within the limits, a tensor's size in bytes fits in an
# int64, so a wrong size is caught by comparison with the weights. fp32 represents every integer up to 2^24 exactly, and
# hence every position.
_MAX_SIZES = {
    **dict.fromkeys((*_SIZE_KEYS, "head_dim", *_DELTA_SIZES.values()), 2**20),
    "num_hidden_layers": 2**10,
    "max_position_embeddings": 2**24,
}


def read_config(folder: Path, *, scalar_head: bool | None = None) -> ModelConfig:
    """Read the model's shape and features from the folder's config.json.

    scalar_head: True rejects a language model; False rejects a sequence classifier; None accepts both.
    Raises InputError, naming the folder and the unsupported key.
    """
    raw_config = read_json_object(model_file(folder, "config.json"))
    try:
        config = config_from_dict(raw_config)
        if config.hf_backend is None and importlib.util.find_spec("minirl.extras.hf_models"):
            from minirl.extras.hf_models.types import check_native

            check_native(_text_config(raw_config), config_from_dict)
    except Exception as error:  # a value of the wrong type may raise anything
        reason = error if isinstance(error, InputError) else f"config.json: cannot be read: {error!r}"
        raise InputError(f"{folder}: {reason}") from None
    if scalar_head not in (None, config.scalar_head):
        model_kinds = {True: "a sequence classifier (reward model)", False: "a language model"}
        found_kind = model_kinds[config.scalar_head]
        expected_kind = model_kinds[not config.scalar_head]
        raise InputError(f"{folder}: config.json describes {found_kind}; expected {expected_kind}")
    return config


def config_from_dict(raw: Mapping[str, Any]) -> ModelConfig:
    """Convert the contents of config.json to a `ModelConfig`, without checking it against transformers' modules.

    Raises InputError, naming the unsupported key.
    """
    if raw.get("model_type") == "mistral" and "layer_types" in raw:  # as in transformers' AutoConfig
        raw = {**raw, "model_type": "ministral"}
    if raw.get("model_type") not in (*FAMILIES, *_VISION_MODELS):
        from minirl.extras.hf_models.types import read_hf_config

        scalar_head = _is_classifier(raw, transformers_config(raw).num_labels)
        return dataclasses.replace(read_hf_config(raw), scalar_head=scalar_head)
    text_config = _text_config(raw)
    config = transformers_config(text_config)
    # Ignore keys of other families. The gate detects keys that have an effect in transformers.
    family_keys = vars(type(config)()).keys()
    keys = {key: value for key, value in vars(config).items() if key in family_keys}
    _check_values(text_config, keys)
    fields = {field: keys[key] for field, key in _FIELDS_AND_KEYS if keys.get(key) is not None}
    fields["head_dim"] = head_dim = _head_dim(keys)
    layer_types = _layer_types(keys)
    fields["layer_ropes"] = _layer_ropes(config, keys, layer_types, head_dim)
    if keys["rope_parameters"].get("rope_type") == "yarn":
        fields["max_position_embeddings"] = _max_yarn_positions(keys)
    fields["layer_windows"] = tuple(
        keys["sliding_window"] if layer_type == "sliding_attention" else None for layer_type in layer_types
    )
    if "query_pre_attn_scalar" in keys:
        fields["query_multiplier"] = 1 / math.sqrt(keys["query_pre_attn_scalar"]) / (1 / math.sqrt(head_dim))
    if "linear_attention" in layer_types:
        linear_attention_layers = tuple(
            i for i, layer_type in enumerate(layer_types) if layer_type == "linear_attention"
        )
        fields["delta_net"] = DeltaNet(
            linear_attention_layers, **{name: keys[key] for name, key in _DELTA_SIZES.items()}
        )
    if text_config is not raw:
        fields["weight_prefix"] = _VISION_MODELS[raw["model_type"]].prefix
    fields["scalar_head"] = _is_classifier(text_config, config.num_labels)
    fields |= FAMILIES[text_config["model_type"]]
    refuse(
        fields["activation"] not in ACTIVATIONS,
        f"config.json: hidden_act={fields['activation']!r} is not supported; expected one of {', '.join(ACTIVATIONS)}",
    )
    return ModelConfig(**fields)


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's section of a vision model's config.json; return any other config unchanged.

    Raises InputError if a key outside that section changes the text model.
    """
    vision_model = _VISION_MODELS.get(str(raw.get("model_type")))
    if vision_model is None:
        return raw
    text_config = raw.get("text_config")
    if not isinstance(text_config, dict) or text_config.get("model_type") != vision_model.text_model_type:
        raise InputError(f"config.json: text_config must have model_type {vision_model.text_model_type!r}")
    tie_word_embeddings = transformers_config(text_config).tie_word_embeddings
    refuse(
        raw.get("tie_word_embeddings", tie_word_embeddings) != tie_word_embeddings,
        "config.json: tie_word_embeddings differs between the top level and text_config; set both to the same value",
    )
    unsupported_keys = {key: raw[key] for key in raw.keys() & _UNSUPPORTED_KEYS}
    return unsupported_keys | {key: value for key, value in text_config.items() if key != "architectures"}


def scalar_head_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json for a sequence classifier with this model's layers and one label."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    raw = _text_config(raw)
    family = str(raw["model_type"])
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(
        family, family.capitalize() + _CLASSIFIER_SUFFIX
    )
    return {
        **raw,
        "architectures": [name],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
    }


def _check_values(raw: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    """Raise InputError if a key is unsupported or a size exceeds its limit."""
    for key in sorted(raw.keys() & _UNSUPPORTED_KEYS):
        refuse(raw[key] is not None, f"config.json: {key}={raw[key]!r} is not supported")
    for key, limit in _MAX_SIZES.items():
        value = keys.get(key) or 0
        refuse(value > limit, f"config.json: {key}={value!r} exceeds the limit of {limit}")


def _head_dim(keys: Mapping[str, Any]) -> int:
    """Return the head dimension.

    Raises InputError if the head dimension is odd, or if the number of query heads is not a multiple of the number of
    KV heads.
    """
    num_heads = keys["num_attention_heads"]
    num_kv_heads = keys["num_key_value_heads"]
    refuse(
        num_heads % num_kv_heads,
        f"config.json: num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}",
    )
    head_dim: int = keys.get("head_dim") or keys["hidden_size"] // num_heads
    refuse(head_dim % 2, f"config.json: head_dim={head_dim} is odd; RoPE needs an even number")
    return head_dim


def _is_classifier(raw: Mapping[str, Any], num_labels: int) -> bool:
    """Return whether the model is a sequence classifier. Raises InputError for other classes or several labels."""
    classes = raw.get("architectures") or ["Model"]
    refuse(
        not isinstance(classes, list) or len(classes) > 1 or not str(classes[0]).endswith(_CLASS_SUFFIXES),
        f"config.json: architectures={classes!r} is not supported; expected a single name that ends in one of "
        f"{', '.join(_CLASS_SUFFIXES)}",
    )
    is_classifier = classes[0].endswith(_CLASSIFIER_SUFFIX)
    refuse(
        is_classifier and num_labels != 1,
        f"config.json: num_labels={num_labels}; only sequence classifiers with one label are supported",
    )
    return is_classifier


def _layer_types(keys: Mapping[str, Any]) -> list[str]:
    """Return the attention type of each layer."""
    if layer_types := keys.get("layer_types"):
        return list(layer_types)
    # In families without layer types, every layer uses the sliding window, if there is one.
    layer_type = "full_attention" if keys.get("sliding_window") is None else "sliding_attention"
    return [layer_type] * keys["num_hidden_layers"]


def _max_yarn_positions(keys: Mapping[str, Any]) -> int:
    """Return the number of positions that a YaRN RoPE supports; max_position_embeddings may be the unscaled number."""
    rope = keys["rope_parameters"]
    # Without a factor, YaRN scales to max_position_embeddings.
    scaled_positions = int(rope["original_max_position_embeddings"] * (rope["factor"] or 1))
    return min(max(keys["max_position_embeddings"], scaled_positions), _MAX_SIZES["max_position_embeddings"])


def _layer_ropes(
    config: Any, keys: Mapping[str, Any], layer_types: Sequence[str], head_dim: int
) -> tuple[Rope, ...]:
    """Return each layer's RoPE config. Raises InputError if a layer's RoPE is not supported."""
    ropes = {layer_type: _make_rope(config, layer_type, head_dim) for layer_type in set(layer_types)}
    if "no_rope_layers" not in keys:
        return tuple(ropes[layer_type] for layer_type in layer_types)
    # In `no_rope_layers`, 0 marks a layer without RoPE.
    types_and_has_rope = zip(layer_types, keys["no_rope_layers"], strict=True)
    return tuple(ropes[layer_type] if has_rope else Rope(()) for layer_type, has_rope in types_and_has_rope)


def _make_rope(config: Any, layer_type: str, head_dim: int) -> Rope:
    """Build the RoPE of one layer type with transformers' functions. Raises InputError for an unsupported RoPE type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    per_type_key = None
    if "rope_type" not in rope:  # each layer type has a separate RoPE
        per_type_key = layer_type
        rope = rope[layer_type]
    name = rope["rope_type"]
    refuse(
        name not in _ROPE_TYPES,
        f"config.json: the RoPE {rope} is not supported; expected rope_type to be one of {', '.join(_ROPE_TYPES)}",
    )
    try:
        if name == "default":
            rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
            exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
            frequencies, attention_factor = 1.0 / rope["rope_theta"] ** exponent, 1.0
        else:
            frequencies, attention_factor = ROPE_INIT_FUNCTIONS[name](config, "cpu", layer_type=per_type_key)
    except Exception as error:  # the exception type depends on the transformers version
        raise InputError(f"config.json: transformers cannot build the RoPE {rope}: {error!r}") from None
    return Rope(tuple(frequencies.tolist()), attention_factor)
