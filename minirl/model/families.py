"""What each model family's config.json means: the features it implies, its defaults, and the keys that are refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minirl.errors import InputError
from minirl.model.config import ModelConfig, RopeScaling

# What a family implies: features that config.json does not name, and its defaults for keys that may be left out.
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"qkv_bias": True, **_QWEN},
    "qwen3": {"qk_norm": True, "head_dim": 128, **_QWEN},
}
_SHAPE_KEYS = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings attention_bias "
    "mlp_bias sliding_window use_sliding_window max_window_layers layer_types model_type".split()
)
_HARMLESS_KEYS = frozenset(
    "architectures dtype torch_dtype transformers_version bos_token_id eos_token_id pad_token_id use_cache "
    "initializer_range _name_or_path _attn_implementation output_attentions output_hidden_states "
    "return_dict chunk_size_feed_forward id2label label2id problem_type is_encoder_decoder use_return_dict "
    "base_model_tp_plan base_model_pp_plan keys_to_ignore_at_inference unsloth_fixed unsloth_version".split()
)
_NEUTRAL_VALUES: dict[str, Any] = {"pretraining_tp": 1, "hidden_act": "silu", "attention_dropout": 0}


def read_config(folder: Path, *, scalar_head: bool | None = None) -> ModelConfig:
    """The model's shape and features; InputError names the key of config.json that is not supported.

    scalar_head: refuse a language model (True) or a sequence classifier (False).
    """
    try:
        config = config_from_dict(json.loads((folder / "config.json").read_text()))
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from None
    if scalar_head not in (None, config.scalar_head):
        kinds = {True: "a sequence classifier (reward model)", False: "a language model"}
        raise InputError(
            f"{folder}: config.json says {kinds[config.scalar_head]}; this must be {kinds[not config.scalar_head]}"
        )
    return config


def config_from_dict(raw: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` of a config.json's content; InputError names the key that is not supported."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise InputError(
            f"config.json: model_type {family!r} is not supported (supported: {', '.join(FAMILIES)})"
        )
    for key, value in raw.items():
        if key in _NEUTRAL_VALUES and value not in (_NEUTRAL_VALUES[key], None):
            raise InputError(f"config.json: {key}={value!r} is not supported (only {_NEUTRAL_VALUES[key]!r})")
        if key not in _SHAPE_KEYS | _HARMLESS_KEYS | _NEUTRAL_VALUES.keys() and value not in (None, False):
            raise InputError(
                f"config.json: {key}={value!r} is not supported; if it changes no numbers, remove it"
            )
    is_classifier = any(name.endswith("ForSequenceClassification") for name in raw.get("architectures") or [])
    if is_classifier and len(raw.get("id2label") or (0, 1)) != 1:
        raise InputError(
            "config.json: a sequence classifier with one label (num_labels=1) is a reward model; not this"
        )
    raw = {**FAMILIES[family], **raw}
    theta, scaling = _rope(raw)
    heads = raw["num_attention_heads"]
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        layer_windows=_windows(raw),
        qkv_bias=raw.get("qkv_bias", bool(raw.get("attention_bias"))),
        o_bias=bool(raw.get("attention_bias")) and "qkv_bias" not in raw,
        mlp_bias=bool(raw.get("mlp_bias")),
        qk_norm=raw.get("qk_norm", False),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        scalar_head=is_classifier,
    )


def scalar_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a sequence classifier with one label on the trunk of this config.json's model."""
    family = (raw.get("architectures") or [str(raw["model_type"]).capitalize()])[0].split("For")[0]
    return {
        **raw,
        "architectures": [f"{family}ForSequenceClassification"],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
    }


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    found: dict[str, Any] = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = found.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    names = RopeScaling.__dataclass_fields__
    if kind == "llama3" and found.keys() == names.keys():
        return theta, RopeScaling(**found)
    if kind != "default" or found:
        raise InputError(
            f"config.json: rope type {kind!r} with {found} is not supported (default; llama3: {[*names]})"
        )
    return theta, None


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's sliding window, by the rules of its family's own configuration class."""
    num_layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if raw["model_type"] in ("qwen2", "qwen3") and not raw.get("use_sliding_window"):
        window = None
    if raw["model_type"] == "llama" or window is None:
        if "sliding_attention" in (raw.get("layer_types") or []):
            raise InputError(
                "config.json: layer_types asks for sliding_attention, but no sliding window is in use"
            )
        return (None,) * num_layers
    default = ["sliding_attention"] * num_layers
    if "max_window_layers" in raw:
        default = [
            "full_attention" if i < raw["max_window_layers"] else "sliding_attention"
            for i in range(num_layers)
        ]
    kinds = raw.get("layer_types") or default
    if set(kinds) - {"full_attention", "sliding_attention"} or len(kinds) != num_layers:
        raise InputError(
            f"config.json: layer_types={kinds} is not supported (full_attention, sliding_attention)"
        )
    if raw["model_type"] == "mistral" and kinds != default:
        raise InputError(
            f"config.json: layer_types={kinds} is not supported for mistral, where transformers ignores it"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
