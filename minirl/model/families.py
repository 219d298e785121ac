"""What config.json means for each model family: implied features, defaults of missing keys, and refused keys.

A key that could change the numbers and is not supported is refused by name, never ignored.

To add a feature of models:

1. `config.py`: add a field to `ModelConfig`, named like the key of config.json if there is one.
2. This file: set the field in `config_from_dict`. Add the feature's keys to `_SHAPE_KEYS`; if a family has
   the feature without a key that says so, add it to `FAMILIES`.
3. `transformer.py`: branch on the field. New parameters need the names that they have in Hugging Face's
   checkpoints, by which `weights` loads and saves them.
4. `tests/test_model.py`: add a model with the feature to `CASES`. Its logits and gradients are compared with
   those of transformers.

A family whose features all exist takes an entry in `FAMILIES`, one in `CASES`, and one each in `CLASSES` and
`OPTIONAL_KEYS` of `tests/test_weights.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minirl.errors import InputError
from minirl.files.json_files import read_json_object
from minirl.model.config import ModelConfig, RopeScaling

# By `model_type`: features that config.json does not name, and the family's own defaults for missing keys.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "qkv_bias": True,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "qk_norm": True,
        "head_dim": 128,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
# Keys that `config_from_dict` reads.
_SHAPE_KEYS = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters "
    "tie_word_embeddings attention_bias mlp_bias sliding_window use_sliding_window max_window_layers "
    "layer_types model_type".split()
)
# Keys that do not change the numbers.
_HARMLESS_KEYS = frozenset(
    "architectures dtype torch_dtype transformers_version bos_token_id eos_token_id pad_token_id use_cache "
    "initializer_range _name_or_path _attn_implementation output_attentions output_hidden_states "
    "return_dict chunk_size_feed_forward id2label label2id problem_type is_encoder_decoder use_return_dict "
    "base_model_tp_plan base_model_pp_plan keys_to_ignore_at_inference unsloth_fixed unsloth_version".split()
)
# Keys of which one value is supported.
_NEUTRAL_VALUES: dict[str, Any] = {"pretraining_tp": 1, "hidden_act": "silu", "attention_dropout": 0}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_NULLABLE_SIZES = ("num_key_value_heads", "head_dim")
_NUMBERS = ("rms_norm_eps", "rope_theta")
_SWITCHES = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")


def read_config(folder: Path, *, scalar_head: bool | None = None) -> ModelConfig:
    """Read the model's shape and features from the folder's config.json.

    scalar_head: True to refuse a language model, False to refuse a sequence classifier.
    Raises InputError, which names the folder and the key that is not supported.
    """
    try:
        config = config_from_dict(read_json_object(folder / "config.json"))
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from None
    if scalar_head not in (None, config.scalar_head):
        kinds = {True: "a sequence classifier (reward model)", False: "a language model"}
        found = kinds[config.scalar_head]
        expected = kinds[not config.scalar_head]
        raise InputError(f"{folder}: config.json says {found}; this must be {expected}")
    return config


def config_from_dict(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the `ModelConfig` of a config.json's content.

    Raises InputError, which names the key that is not supported.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise InputError(f"config.json: model_type {family!r} is not supported (supported: {supported})")
    _check_keys(raw)
    _check_values(raw)
    is_classifier = _is_classifier(raw)
    raw = {**FAMILIES[family], **raw}
    theta, scaling = _rope(raw)
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise InputError(
            f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    has_attention_bias = bool(raw.get("attention_bias"))
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        layer_windows=_windows(raw),
        # `attention_bias` puts a bias on q, k, v and o. A family that always has one on q, k, v ignores it.
        qkv_bias=raw.get("qkv_bias", has_attention_bias),
        o_bias=has_attention_bias and "qkv_bias" not in raw,
        mlp_bias=bool(raw.get("mlp_bias")),
        qk_norm=raw.get("qk_norm", False),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        scalar_head=is_classifier,
    )


def scalar_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a sequence classifier with one label, on the layers of this model."""
    if raw.get("architectures"):
        family = raw["architectures"][0].split("For")[0]
    else:
        family = str(raw["model_type"]).capitalize()
    return {
        **raw,
        "architectures": [f"{family}ForSequenceClassification"],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
    }


def _check_keys(raw: Mapping[str, Any]) -> None:
    """Raise InputError for a key that could change the numbers and is not supported."""
    known = _SHAPE_KEYS | _HARMLESS_KEYS | _NEUTRAL_VALUES.keys()
    for key, value in raw.items():
        if key in _NEUTRAL_VALUES and value not in (_NEUTRAL_VALUES[key], None):
            neutral = _NEUTRAL_VALUES[key]
            raise InputError(f"config.json: {key}={value!r} is not supported (only {neutral!r})")
        # An unknown feature that is off (null or false) is harmless.
        if key not in known and value not in (None, False):
            raise InputError(
                f"config.json: {key}={value!r} is not supported; if it changes no numbers, remove it"
            )


def _check_values(raw: Mapping[str, Any]) -> None:
    """Raise InputError for a size, number or switch that is missing or of another type."""
    for key in _SIZES:
        if key not in raw and key in _OPTIONAL_SIZES:
            continue
        if key not in raw:
            raise InputError(f"config.json: has no {key}")
        value = raw[key]
        if value is None and key in _NULLABLE_SIZES:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"config.json: {key}={value!r}; expected a positive integer")
    for key in _NUMBERS:
        value = raw.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"config.json: {key}={value!r}; expected a positive number")
    for key in _SWITCHES:
        if not isinstance(raw.get(key), bool | None):
            raise InputError(f"config.json: {key}={raw[key]!r}; expected true or false")


def _is_classifier(raw: Mapping[str, Any]) -> bool:
    """Whether it is a sequence classifier. Raises InputError for one with several labels."""
    architectures = raw.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return False
    # transformers leaves `id2label` out for its default of two labels.
    num_labels = len(raw.get("id2label") or (0, 1))
    if num_labels != 1:
        raise InputError(
            "config.json: a sequence classifier with one label (num_labels=1) is a reward model; not this"
        )
    return True


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling of rope.

    They are in `rope_parameters` (transformers 5) or in `rope_theta` and `rope_scaling` (before).
    """
    scaling = dict(raw.get("rope_scaling") or {})
    scaling |= raw.get("rope_parameters") or {}
    theta = scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    rope_type = scaling.pop("rope_type", None)
    old_name = scaling.pop("type", None)
    kind = rope_type or old_name or "default"
    llama3_keys = list(RopeScaling.__dataclass_fields__)
    if kind == "llama3" and scaling.keys() == set(llama3_keys):
        return theta, RopeScaling(**scaling)
    if kind != "default" or scaling:
        raise InputError(
            f"config.json: rope type {kind!r} with {scaling} is not supported "
            f"(default; llama3: {llama3_keys})"
        )
    return theta, None


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's sliding window, by the rules of the family's config class in transformers."""
    num_layers = raw["num_hidden_layers"]
    family = raw["model_type"]
    window = raw.get("sliding_window")
    if family == "llama":
        window = None
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window"):
        window = None
    layer_types = raw.get("layer_types") or []
    if window is None:
        if "sliding_attention" in layer_types:
            raise InputError(
                "config.json: layer_types asks for sliding_attention, but no sliding window is in use"
            )
        return (None,) * num_layers
    # Without `layer_types`, the layers from `max_window_layers` on have the window; without that key, all.
    first_windowed = raw.get("max_window_layers", 0)
    default = ["full_attention" if i < first_windowed else "sliding_attention" for i in range(num_layers)]
    kinds = layer_types or default
    if set(kinds) - _LAYER_TYPES or len(kinds) != num_layers:
        raise InputError(
            f"config.json: layer_types={kinds} is not supported (full_attention, sliding_attention)"
        )
    if family == "mistral" and kinds != default:
        raise InputError(
            f"config.json: layer_types={kinds} is not supported for mistral, where transformers ignores it"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
