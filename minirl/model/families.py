"""Read a config.json of each model family, through transformers' config class, into a `ModelConfig`.

What a key means is what transformers makes of it. `read_config` compares a small model of the folder's config.json, as
it is read here, with transformers' (`extras.hf_models.gate`), so that a key that is not read here, and changes the
numbers there, is refused. Without that annex it is ignored.

docs/families.md lists the families; CONTRIBUTING.md explains how to add one.
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
    """A model of images and text, of which minirl reads the text model."""

    # The model_type of its text_config.
    text: str
    # The prefix of the names of the decoder's tensors.
    prefix: str


_POST_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GEMMA_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_OLMO = {"norms": _POST_NORMS, "qk_norm": True, "qk_norm_over_heads": True}
# The fields of `DeltaNet`, and their keys.
_DELTA_SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "kernel_size": "linear_conv_kernel_dim",
}
# The fields of `ModelConfig` that all models of a family have, as in transformers' classes.
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
        "passthrough_weights": (r"^vision_tower\.", r"^multi_modal_projector\."),
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "qwen3_5_text": {
        "norm_adds_one": True,
        "qk_norm": True,
        "attention_gate": True,
        "passthrough_weights": (r"^model\.visual\.", r"^mtp\."),
    },
    "smollm3": {},
}
_VISION_MODELS = {
    "qwen3_5": VisionModel("qwen3_5_text", "model.language_model."),
    "gemma3": VisionModel("gemma3_text", "language_model.model."),
}
# Refused with any value: the gate's small models do not show what these do.
_UNSUPPORTED_KEYS = {"attn_logit_softcapping", "auto_map", "final_logit_softcapping", "quantization_config"}
# The endings of the only name in `architectures`; other classes may compute something else from the same weights.
_CLASSIFIER_SUFFIX = "ForSequenceClassification"
_CLASS_SUFFIXES = ("ForCausalLM", "Model", "Decoder", _CLASSIFIER_SUFFIX)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# Fields of `ModelConfig`, and the keys with their values. Where a key is null, or its family lacks it, the field's
# default stays. Gemma alone has `hidden_activation`.
_FIELDS_AND_KEYS = (
    *((name, name) for name in (*_SIZES, "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")),
    ("qkv_bias", "attention_bias"),
    ("o_bias", "attention_bias"),
    ("mlp_bias", "mlp_bias"),
    ("activation", "hidden_act"),
    ("activation", "hidden_activation"),
)
# The largest value of each size. No model reaches it, and int64 can count the bytes of a tensor of such sizes, so
# comparing it with the weights finds a wrong size. fp32 has every whole number up to 2^24, so every position.
_MAX_SIZES = {
    **dict.fromkeys((*_SIZES, "head_dim", *_DELTA_SIZES.values()), 2**20),
    "num_hidden_layers": 2**10,
    "max_position_embeddings": 2**24,
}


def read_config(folder: Path, *, scalar_head: bool | None = None) -> ModelConfig:
    """Read the model's shape and features from the folder's config.json.

    scalar_head: True to refuse a language model, False to refuse a sequence classifier.
    Raises InputError, which names the folder and the key that is not supported.
    """
    raw = read_json_object(model_file(folder, "config.json"))
    try:
        config = config_from_dict(raw)
        if config.hf_backend is None and importlib.util.find_spec("minirl.extras.hf_models"):
            from minirl.extras.hf_models.types import check_native

            check_native(_text_config(raw), config_from_dict)
    except Exception as error:  # anything, if a value has the wrong type
        reason = error if isinstance(error, InputError) else f"config.json: it cannot be read: {error!r}"
        raise InputError(f"{folder}: {reason}") from None
    if scalar_head not in (None, config.scalar_head):
        kinds = {True: "a sequence classifier (reward model)", False: "a language model"}
        found = kinds[config.scalar_head]
        expected = kinds[not config.scalar_head]
        raise InputError(f"{folder}: config.json says {found}; this must be {expected}")
    return config


def config_from_dict(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the `ModelConfig` of a config.json's content, without the comparison of minirl's own modules.

    Raises InputError, which names the key that is not supported.
    """
    if raw.get("model_type") == "mistral" and "layer_types" in raw:  # as transformers' AutoConfig reads it
        raw = {**raw, "model_type": "ministral"}
    if raw.get("model_type") not in (*FAMILIES, *_VISION_MODELS):
        from minirl.extras.hf_models.types import read_hf_config

        scalar_head = _is_classifier(raw, transformers_config(raw).num_labels)
        return dataclasses.replace(read_hf_config(raw), scalar_head=scalar_head)
    text = _text_config(raw)
    config = transformers_config(text)
    # Keys of other families mean nothing here; the gate sees whether they do in transformers.
    own_keys = vars(type(config)()).keys()
    keys = {key: value for key, value in vars(config).items() if key in own_keys}
    _check_values(text, keys)
    fields = {field: keys[key] for field, key in _FIELDS_AND_KEYS if keys.get(key) is not None}
    fields["head_dim"] = head_dim = _head_dim(keys)
    kinds = _layer_types(keys)
    fields["layer_ropes"] = _layer_ropes(config, keys, kinds, head_dim)
    if keys["rope_parameters"].get("rope_type") == "yarn":
        fields["max_position_embeddings"] = _yarn_positions(keys)
    fields["layer_windows"] = tuple(
        keys["sliding_window"] if kind == "sliding_attention" else None for kind in kinds
    )
    if "query_pre_attn_scalar" in keys:
        fields["query_multiplier"] = 1 / math.sqrt(keys["query_pre_attn_scalar"]) / (1 / math.sqrt(head_dim))
    if "linear_attention" in kinds:
        fields["delta_net"] = _delta_net(keys, kinds)
    if text is not raw:
        fields["weight_prefix"] = _VISION_MODELS[raw["model_type"]].prefix
    fields["scalar_head"] = _is_classifier(text, config.num_labels)
    fields |= FAMILIES[text["model_type"]]
    refuse(
        fields["activation"] not in ACTIVATIONS,
        f"config.json: hidden_act={fields['activation']!r} is not supported; expected one of {', '.join(ACTIVATIONS)}",
    )
    return ModelConfig(**fields)


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a vision model's config.json; any other is returned unchanged.

    Raises InputError for keys beside it that change the text model.
    """
    vision = _VISION_MODELS.get(str(raw.get("model_type")))
    if vision is None:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != vision.text:
        raise InputError(f"config.json: text_config does not have the model_type {vision.text!r}")
    tied = transformers_config(text).tie_word_embeddings
    refuse(
        raw.get("tie_word_embeddings", tied) != tied,
        "config.json: tie_word_embeddings differs from that of text_config; keep the right one",
    )
    unseen = {key: raw[key] for key in raw.keys() & _UNSUPPORTED_KEYS}
    return unseen | {key: value for key, value in text.items() if key != "architectures"}


def scalar_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a sequence classifier with one label, on the layers of this model."""
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
    """Raise InputError for a key of `_UNSUPPORTED_KEYS`, and for a size that is too large."""
    for key in sorted(raw.keys() & _UNSUPPORTED_KEYS):
        refuse(raw[key] is not None, f"config.json: {key}={raw[key]!r} is not supported")
    for key, largest in _MAX_SIZES.items():
        value = keys.get(key) or 0
        refuse(value > largest, f"config.json: {key}={value!r}; {largest} at most")


def _head_dim(keys: Mapping[str, Any]) -> int:
    """Return the size of a head. Raises InputError if key heads do not divide the query heads, or rope the size."""
    heads = keys["num_attention_heads"]
    kv_heads = keys["num_key_value_heads"]
    refuse(
        heads % kv_heads,
        f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}",
    )
    head_dim: int = keys.get("head_dim") or keys["hidden_size"] // heads
    refuse(head_dim % 2, f"config.json: head_dim={head_dim}; rope needs an even number")
    return head_dim


def _is_classifier(raw: Mapping[str, Any], num_labels: int) -> bool:
    """Return whether it is a sequence classifier. Raises InputError for other classes and for several labels."""
    classes = raw.get("architectures") or ["Model"]
    refuse(
        not isinstance(classes, list) or len(classes) > 1 or not str(classes[0]).endswith(_CLASS_SUFFIXES),
        f"config.json: architectures={classes!r} is not supported; expected one name that ends with one of "
        f"{', '.join(_CLASS_SUFFIXES)}",
    )
    is_classifier = classes[0].endswith(_CLASSIFIER_SUFFIX)
    refuse(
        is_classifier and num_labels != 1,
        "config.json: a sequence classifier with one label (num_labels=1) is a reward model; not this",
    )
    return is_classifier


def _layer_types(keys: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer."""
    if kinds := keys.get("layer_types"):
        return list(kinds)
    # In a family without kinds of layers, all have the window.
    kind = "full_attention" if keys.get("sliding_window") is None else "sliding_attention"
    return [kind] * keys["num_hidden_layers"]


def _delta_net(keys: Mapping[str, Any], kinds: Sequence[str]) -> DeltaNet:
    """Return the shape of the layers with a gated delta net."""
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    sizes = {name: keys[key] for name, key in _DELTA_SIZES.items()}
    return DeltaNet(layers, **sizes)


def _yarn_positions(keys: Mapping[str, Any]) -> int:
    """Return how many positions a YaRN rope is made for, whether or not max_position_embeddings already says so."""
    rope = keys["rope_parameters"]
    # Without a factor, the ratio of the stated positions.
    stretched = int(rope["original_max_position_embeddings"] * (rope["factor"] or 1))
    return min(max(keys["max_position_embeddings"], stretched), _MAX_SIZES["max_position_embeddings"])


def _layer_ropes(
    config: Any, keys: Mapping[str, Any], kinds: Sequence[str], head_dim: int
) -> tuple[Rope, ...]:
    """Return the ropes of layers of these kinds. Raises InputError if one is not supported."""
    ropes = {kind: _rope(config, kind, head_dim) for kind in set(kinds)}
    if "no_rope_layers" not in keys:
        return tuple(ropes[kind] for kind in kinds)
    # 0 where a layer has none.
    pairs = zip(kinds, keys["no_rope_layers"], strict=True)
    return tuple(ropes[kind] if has_rope else Rope(()) for kind, has_rope in pairs)


def _rope(config: Any, kind: str, head_dim: int) -> Rope:
    """Return the rope of a kind of layer, by transformers' functions. Raises InputError if it is not supported."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    layer_type = None
    if "rope_type" not in rope:  # each kind of layer has its own
        layer_type = kind
        rope = rope[kind]
    name = rope["rope_type"]
    refuse(
        name not in _ROPE_TYPES,
        f"config.json: the rope {rope} is not supported; expected one of {', '.join(_ROPE_TYPES)}",
    )
    try:
        if name == "default":
            size = int(head_dim * rope.get("partial_rotary_factor", 1.0))
            exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
            frequencies, attention_factor = 1.0 / rope["rope_theta"] ** exponent, 1.0
        else:
            frequencies, attention_factor = ROPE_INIT_FUNCTIONS[name](config, "cpu", layer_type=layer_type)
    except Exception as error:  # which one depends on the version of transformers
        raise InputError(f"config.json: transformers cannot make the rope {rope}: {error!r}") from None
    return Rope(tuple(frequencies.tolist()), attention_factor)
