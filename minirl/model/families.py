"""What config.json means for each model family: implied features, defaults of missing keys, and refused keys.

Every key is supported, has one value that is, or is known to change no number. Any other is refused by name,
whatever its value: `is_causal: false` is another model.

To add a feature of models:

1. `config.py`: add a field to `ModelConfig`, named like the key of config.json if there is one.
2. This file: set the field in `config_from_dict`. Add the feature's keys to `_KEYS_OF_ALL`, or to the
   families in `FAMILIES` that have them, and check their values in `_check_values`.
3. `transformer.py`: branch on the field. New parameters need the names that they have in Hugging Face's
   checkpoints, by which `weights` loads and saves them.
4. `tests/test_model.py`: add a model with the feature to `CASES`. Its logits and gradients are compared with
   those of transformers.

A family whose features all exist takes an entry in `FAMILIES`, one in `CASES`, one each in `CLASSES` and
`OPTIONAL_KEYS` of `tests/test_weights.py`, and one in `BASES` of `tests/test_config_fuzz.py`.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object
from minirl.model.config import ModelConfig, RopeScaling


@dataclass(frozen=True)
class Family:
    """What the classes of a `model_type` do and config.json need not say."""

    # The keys that not all families have, and the values of keys that are left out.
    defaults: dict[str, Any]
    # Whether it has a bias on q, k and v and none on o.
    qkv_bias: bool = False
    qk_norm: bool = False


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
FAMILIES = {
    "llama": Family({"attention_bias": False, "mlp_bias": False}),
    "mistral": Family({"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(_QWEN_DEFAULTS, qkv_bias=True),
    "qwen3": Family({**_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False}, qk_norm=True),
}
# Supported in every family.
_KEYS_OF_ALL = frozenset(
    "model_type architectures id2label vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta "
    "rope_scaling rope_parameters tie_word_embeddings".split()
)
# Supported with one value, also in a family that has no such key.
_NEUTRAL_VALUES: dict[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "attention_chunk_size": None,
    "attention_dropout": 0.0,
    "cross_attention_hidden_size": None,
    "hidden_act": "silu",
    "is_causal": True,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "layer_types": None,
    "max_window_layers": None,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "quantization_config": None,
    "rope_interleaved": False,
    "sliding_window": None,
    "tie_encoder_decoder": False,
    "torchscript": False,
    "use_bfloat16": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
# Of any value: none changes the numbers of these families.
_HARMLESS_KEYS = frozenset(
    # Who wrote the file, and how a program is to hold and run the model.
    "_name_or_path name_or_path _commit_hash transformers_version transformers.js_config unsloth_fixed "
    "unsloth_version is_llama_config dtype torch_dtype use_cache gradient_checkpointing initializer_range "
    "attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled "
    "output_attentions output_hidden_states return_dict use_return_dict chunk_size_feed_forward "
    "base_model_tp_plan base_model_pp_plan keys_to_ignore_at_inference tf_legacy_loss "
    # Labels, losses and the tokenizer.
    "label2id problem_type finetuning_task task_specific_params tokenizer_class prefix bos_token_id "
    "eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id "
    # How other programs generate.
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature "
    "top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids "
    "encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens".split()
)
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# What the only name in `architectures` ends with; other classes may compute something else from the same weights.
_CLASSIFIER = "ForSequenceClassification"
_CLASSES = ("ForCausalLM", "Model", _CLASSIFIER)
# The largest value of each size: beyond any model, and a tensor of such sizes has bytes that int64 can count, so
# that the weights can show what is wrong. fp32 has every whole number up to 2^24, so every position.
_SIZES = {
    "vocab_size": 2**20,
    "hidden_size": 2**20,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**20,
    "num_key_value_heads": 2**20,
    "head_dim": 2**20,
    "max_position_embeddings": 2**24,
    "sliding_window": 2**24,
}
_REQUIRED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_NULLABLE_SIZES = ("num_key_value_heads", "head_dim", "sliding_window")
_SWITCHES = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
_MAX_FP32 = 3.4e38


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
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise InputError(f"config.json: model_type {name!r} is not supported (supported: {supported})")
    family = FAMILIES[name]
    known = _KEYS_OF_ALL | family.defaults.keys()
    _check_keys(raw, known)
    raw = family.defaults | {key: value for key, value in raw.items() if key in known}
    _check_values(raw)
    theta, scaling = _rope(raw)
    heads = raw["num_attention_heads"]
    has_attention_bias = raw.get("attention_bias", False)
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=_head_dim(raw),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        layer_windows=_windows(raw),
        # `attention_bias` puts a bias on q, k, v and o.
        qkv_bias=family.qkv_bias or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=raw.get("mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        scalar_head=_is_classifier(raw),
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


def _check_keys(raw: Mapping[str, Any], supported: Set[str]) -> None:
    """Raise InputError for a key that could change the numbers and is not among those that are supported."""
    for key, value in raw.items():
        if key in supported or key in _HARMLESS_KEYS:
            continue
        if key not in _NEUTRAL_VALUES:
            raise InputError(
                f"config.json: {key}={value!r} is not supported; if it changes no numbers, remove it"
            )
        neutral = _NEUTRAL_VALUES[key]
        refuse(
            value != neutral,
            f"config.json: {key}={value!r} is not supported for {raw['model_type']} (only {neutral!r})",
        )


def _check_values(raw: Mapping[str, Any]) -> None:
    """Raise InputError for a value that is missing, of another type or out of range.

    raw: the supported keys, with the family's defaults.
    """
    for key in _REQUIRED_SIZES:
        refuse(key not in raw, f"config.json: has no {key}")
    for key, largest in _SIZES.items():
        value = raw.get(key)
        is_null = value is None and (key not in raw or key in _NULLABLE_SIZES)
        expected = f"expected a positive integer, {largest} at most"
        refuse(not is_null and not _is_int(value, 1, largest), f"config.json: {key}={value!r}; {expected}")
    first_windowed = raw.get("max_window_layers", 0)
    refuse(
        not _is_int(first_windowed, 0, 2**24),
        f"config.json: max_window_layers={first_windowed!r}; expected a number of layers",
    )
    # An integer is an error in transformers.
    eps = raw.get("rms_norm_eps", 1e-6)
    refuse(
        not isinstance(eps, float) or not _is_positive(eps),
        f"config.json: rms_norm_eps={eps!r}; expected a positive number such as 1e-06",
    )
    for key in _SWITCHES:
        value = raw.get(key, False)
        refuse(not isinstance(value, bool), f"config.json: {key}={value!r}; expected true or false")
    for key in ("architectures", "layer_types"):
        value = raw.get(key)
        is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
        refuse(value is not None and not is_list, f"config.json: {key}={value!r}; expected a list of names")
    for key in ("id2label", "rope_scaling", "rope_parameters"):
        value = raw.get(key)
        refuse(
            not isinstance(value, dict | None), f"config.json: {key}={value!r}; expected an object or null"
        )


def _is_int(value: Any, smallest: int, largest: int) -> bool:
    """Whether it is an integer in this range; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest


def _is_positive(value: Any) -> bool:
    """Whether it is a positive number that fp32 can hold; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MAX_FP32


def _head_dim(raw: Mapping[str, Any]) -> int:
    """Return the size of a head. Raises InputError if heads do not divide what they must, or rope cannot."""
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    hidden_size = raw["hidden_size"]
    head_dim = raw.get("head_dim")
    refuse(
        heads % kv_heads,
        f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}",
    )
    refuse(
        head_dim is None and hidden_size % heads,
        f"config.json: hidden_size={hidden_size} is no multiple of num_attention_heads={heads}; set head_dim",
    )
    head_dim = head_dim or hidden_size // heads
    refuse(head_dim % 2, f"config.json: head_dim={head_dim}; rope needs an even number")
    return head_dim


def _is_classifier(raw: Mapping[str, Any]) -> bool:
    """Whether it is a sequence classifier. Raises InputError for other classes and for several labels."""
    architectures = raw.get("architectures") or ["Model"]
    is_known = len(architectures) == 1 and architectures[0].endswith(_CLASSES)
    refuse(
        not is_known,
        f"config.json: architectures={architectures} is not supported; expected one name that ends with one of "
        f"{', '.join(_CLASSES)}",
    )
    if not architectures[0].endswith(_CLASSIFIER):
        return False
    # transformers leaves `id2label` out for its default of two labels.
    num_labels = len(raw.get("id2label") or (0, 1))
    if num_labels != 1:
        raise InputError(
            "config.json: a sequence classifier with one label (num_labels=1) is a reward model; not this"
        )
    return True


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling of rope. Raises InputError if they are not supported or given in two ways.

    They are in `rope_parameters` (transformers 5) or in `rope_theta` and `rope_scaling` (before).
    """
    old = raw.get("rope_scaling") or {}
    new = raw.get("rope_parameters") or {}
    refuse(old and new and old != new, "config.json: rope_scaling and rope_parameters differ; remove one")
    scaling = {**old, **new}
    theta = raw.get("rope_theta", scaling.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    for key, value in (("rope_theta", theta), ("type", kind)):
        stated = scaling.pop(key, value)
        refuse(
            stated != value,
            f"config.json: {key} of rope is both {value!r} and {stated!r}; keep the right one",
        )
    scaling.pop("rope_type", None)
    refuse(not _is_positive(theta), f"config.json: rope_theta={theta!r}; expected a positive number")
    llama3_keys = list(RopeScaling.__dataclass_fields__)
    if kind == "llama3" and scaling.keys() == set(llama3_keys):
        _check_llama3(scaling)
        return theta, RopeScaling(**scaling)
    if kind != "default" or scaling:
        raise InputError(
            f"config.json: rope type {kind!r} with {scaling} is not supported "
            f"(default; llama3: {llama3_keys})"
        )
    return theta, None


def _check_llama3(scaling: Mapping[str, Any]) -> None:
    """Raise InputError for values with which the frequencies are not those that Llama 3 means."""
    for key, value in scaling.items():
        refuse(not _is_positive(value), f"config.json: {key}={value!r} of rope; expected a positive number")
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    refuse(high <= low, f"config.json: high_freq_factor={high} of rope is not above low_freq_factor={low}")


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's sliding window, by the rules of the family's config class in transformers."""
    num_layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window")
    # A family without this key has its window in use.
    if not raw.get("use_sliding_window", True):
        window = None
    if raw.get("layer_types") is None:
        # The layers from `max_window_layers` on have the window; without that key, all.
        first_windowed = raw.get("max_window_layers", 0)
        return tuple(None if layer < first_windowed else window for layer in range(num_layers))
    kinds = raw["layer_types"]
    refuse(
        set(kinds) - _LAYER_TYPES or len(kinds) != num_layers,
        f"config.json: layer_types={kinds} is not supported; "
        "expected full_attention or sliding_attention for each layer",
    )
    refuse(
        window is None and "sliding_attention" in kinds,
        "config.json: layer_types asks for sliding_attention, but no sliding window is in use",
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
