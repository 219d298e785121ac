"""What config.json means for each model family: transformers' config class reads it, and we compute what it says.

Every key is supported, has one value that is, or is known to change no number. Any other is refused by name,
whatever its value: `is_causal: false` is another model.

To add a feature of models:

1. `config.py`: add a field to `ModelConfig`, named like the key of config.json if there is one.
2. This file: set the field in `config_from_dict`. Add the feature's keys to `_KEYS_OF_ALL`, or to the
   families in `FAMILIES` that have them, and refuse in `_check_ranges` the values that transformers accepts and
   the model does not compute.
3. `transformer.py`: branch on the field. New parameters need the names that they have in Hugging Face's
   checkpoints, by which `weights` loads and saves them.
4. `tests/test_model.py`: add a model with the feature to `CASES`. Its logits and gradients are compared with
   those of transformers.

A family whose features all exist takes an entry in `FAMILIES`, one in `CASES`, one each in `CLASSES` and
`OPTIONAL_KEYS` of `tests/test_weights.py`, and one in `BASES` of `tests/test_config_fuzz.py`.
"""

import copy
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object
from minirl.model.config import ModelConfig, RopeScaling
from minirl.model.delta_rule import DeltaNet


@dataclass(frozen=True)
class Family:
    """The keys of a `model_type` that not all families have, and what its classes do without a key."""

    keys: Set[str]
    # Whether it has a bias on q, k and v and none on o.
    qkv_bias: bool = False
    qk_norm: bool = False
    # Qwen3.5: an output gate of attention, norms that add 1, rope of a part of each head, gated delta nets.
    has_delta_net: bool = False
    # Keys of its own that are supported with one value.
    neutral: Mapping[str, Any] = field(default_factory=dict)


# Fields of `DeltaNet`, and their keys.
_DELTA_SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "kernel_size": "linear_conv_kernel_dim",
}
_QWEN_KEYS = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
FAMILIES = {
    "llama": Family({"attention_bias", "mlp_bias"}),
    "mistral": Family({"sliding_window"}),
    "qwen2": Family(_QWEN_KEYS, qkv_bias=True),
    "qwen3": Family(_QWEN_KEYS | {"attention_bias"}, qk_norm=True),
    "qwen3_5_text": Family(
        set(_DELTA_SIZES.values())
        | {"attention_bias", "full_attention_interval", "layer_types", "partial_rotary_factor"},
        qk_norm=True,
        has_delta_net=True,
        neutral={"attn_output_gate": True, "mlp_only_layers": []},
    ),
}
# The model types of folders that hold a vision model too, and the type of the text model that is read.
_TEXT_MODELS = {"qwen3_5": "qwen3_5_text"}
# The keys of such a folder's config.json that change nothing in the text model.
_VISION_KEYS = frozenset(
    "model_type architectures text_config vision_config tie_word_embeddings image_token_id video_token_id "
    "vision_start_token_id vision_end_token_id".split()
)
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
    # Heads that predict several tokens are not computed, and states are in fp32 at least.
    "mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype "
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
_DELTA_LAYER_TYPES = {"full_attention", "linear_attention"}
# What the only name in `architectures` ends with; other classes may compute something else from the same weights.
_CLASSIFIER = "ForSequenceClassification"
_CLASSES = ("ForCausalLM", "Model", _CLASSIFIER)
# transformers has a default for these sizes too: those of one model.
_REQUIRED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# The largest value of each size: beyond any model, and a tensor of such sizes has bytes that int64 can count, so
# that the weights can show what is wrong. fp32 has every whole number up to 2^24, so every position.
_SIZES = {
    **dict.fromkeys(
        (*_REQUIRED_SIZES, "num_key_value_heads", "head_dim", *_DELTA_SIZES.values()), 2**20
    ),
    "num_hidden_layers": 2**10,
    "max_position_embeddings": 2**24,
    "sliding_window": 2**24,
}
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
    prefix = weight_prefix(raw)
    raw = _text_part(raw)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        supported = ", ".join((*FAMILIES, *_TEXT_MODELS))
        raise InputError(f"config.json: model_type {name!r} is not supported (supported: {supported})")
    family = FAMILIES[name]
    known = _KEYS_OF_ALL | family.keys
    _check_keys(raw, known, _NEUTRAL_VALUES | family.neutral)
    raw = {key: value for key, value in raw.items() if key in known}
    _check_ranges(raw)
    config = _as_transformers_reads(raw)
    rope = {**config.rope_parameters}
    factor = _rotary_factor(rope, _head_dim(config)) if family.has_delta_net else 1.0
    theta, scaling = _rope(raw, rope)
    has_attention_bias = getattr(config, "attention_bias", False)
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        layer_windows=_windows(raw, config, _DELTA_LAYER_TYPES if family.has_delta_net else _LAYER_TYPES),
        # `attention_bias` puts a bias on q, k, v and o.
        qkv_bias=family.qkv_bias or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=config.tie_word_embeddings,
        norm_adds_one=family.has_delta_net,
        attention_gate=family.has_delta_net,
        delta_net=_delta_net(config) if family.has_delta_net else None,
        partial_rotary_factor=factor,
        weight_prefix=prefix,
        # transformers' Qwen3.5 leaves them out too.
        kept_weights=("model.visual.", "mtp.") if family.has_delta_net else (),
        scalar_head=_is_classifier(raw, config.num_labels),
    )


def weight_prefix(raw: Mapping[str, Any]) -> str:
    """Return what the names of a decoder's tensors begin with in a folder with this config.json."""
    return "model.language_model." if raw.get("model_type") in list(_TEXT_MODELS) else "model."


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a vision model's config.json; any other is returned unchanged.

    Raises InputError for keys that may change the text model.
    """
    name = raw.get("model_type")
    if name not in list(_TEXT_MODELS):
        return raw
    for key, value in raw.items():
        is_known = key in _VISION_KEYS | _HARMLESS_KEYS
        refuse(not is_known, f"config.json: {key}={value!r} is not supported beside text_config")
    text = raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != _TEXT_MODELS[name]:
        raise InputError(f"config.json: text_config has not the model_type {_TEXT_MODELS[name]!r}")
    classes = raw.get("architectures")
    refuse(
        bool(classes) and classes != ["Qwen3_5ForConditionalGeneration"],
        f"config.json: architectures={classes!r} is not supported; expected Qwen3_5ForConditionalGeneration",
    )
    tied = text.get("tie_word_embeddings", False)
    refuse(
        raw.get("tie_word_embeddings", tied) != tied,
        "config.json: tie_word_embeddings differs from that of text_config; keep the right one",
    )
    return {key: value for key, value in text.items() if key != "architectures"}


def scalar_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a sequence classifier with one label, on the layers of this model."""
    raw = _text_part(raw)
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


def _check_keys(raw: Mapping[str, Any], supported: Set[str], neutral_values: Mapping[str, Any]) -> None:
    """Raise InputError for a key that could change the numbers and is not among those that are supported."""
    for key, value in raw.items():
        if key in supported or key in _HARMLESS_KEYS:
            continue
        if key not in neutral_values:
            raise InputError(
                f"config.json: {key}={value!r} is not supported; if it changes no numbers, remove it"
            )
        neutral = neutral_values[key]
        refuse(
            value != neutral,
            f"config.json: {key}={value!r} is not supported for {raw['model_type']} (only {neutral!r})",
        )


def _check_ranges(raw: Mapping[str, Any]) -> None:
    """Raise InputError for what transformers accepts: a size that is missing or out of range.

    Objects for rope are looked at here too, because transformers names another key of theirs.
    """
    for key in _REQUIRED_SIZES:
        refuse(key not in raw, f"config.json: has no {key}")
    for key, largest in _SIZES.items():
        value = raw.get(key)
        is_size = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest
        expected = f"expected a positive integer, {largest} at most"
        refuse(value is not None and not is_size, f"config.json: {key}={value!r}; {expected}")
    eps = raw.get("rms_norm_eps", 1.0)
    refuse(
        not _is_positive(eps),
        f"config.json: rms_norm_eps={eps!r}; expected a positive number such as 1e-06",
    )
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        is_object = isinstance(value, dict | None)
        refuse(not is_object, f"config.json: {key}={value!r}; expected an object or null")


def _is_positive(value: Any) -> bool:
    """Whether it is a positive number that fp32 can hold, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MAX_FP32


def _as_transformers_reads(raw: Mapping[str, Any]) -> Any:
    """Return the object of transformers' config class: types are checked, and keys that are left out filled in.

    Raises InputError with the reason, which names the key.
    """
    from transformers import CONFIG_MAPPING

    try:
        # A copy, because transformers fills in the objects within.
        return CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(dict(raw)))
    except Exception as error:  # which one depends on the version of transformers
        reason = " ".join(str(error).split())
        raise InputError(f"config.json: transformers cannot read it: {reason}") from None


def _head_dim(config: Any) -> int:
    """Return the size of a head. Raises InputError if key heads do not divide the query heads, or rope the size."""
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    refuse(
        heads % kv_heads,
        f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}",
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    refuse(head_dim % 2, f"config.json: head_dim={head_dim}; rope needs an even number")
    return head_dim


def _is_classifier(raw: Mapping[str, Any], num_labels: int) -> bool:
    """Whether it is a sequence classifier. Raises InputError for other classes and for several labels."""
    classes = raw.get("architectures")
    if classes in (None, []):
        return False
    is_known = isinstance(classes, list) and len(classes) == 1 and str(classes[0]).endswith(_CLASSES)
    refuse(
        not is_known,
        f"config.json: architectures={classes!r} is not supported; expected one name that ends with one of "
        f"{', '.join(_CLASSES)}",
    )
    is_classifier = classes[0].endswith(_CLASSIFIER)
    refuse(
        is_classifier and num_labels != 1,
        "config.json: a sequence classifier with one label (num_labels=1) is a reward model; not this",
    )
    return is_classifier


def _rope(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling of rope. Raises InputError if they are not supported or given in two ways.

    rope: what transformers makes of the keys of `raw`: `rope_parameters` (transformers 5), or `rope_theta` and
    `rope_scaling` (before).
    """
    old = raw.get("rope_scaling") or {}
    new = raw.get("rope_parameters") or {}
    refuse(old and new and old != new, "config.json: rope_scaling and rope_parameters differ; remove one")
    for names in (("rope_theta",), ("rope_type", "type"), ("partial_rotary_factor",)):
        stated = [place[name] for place in (raw, old, new) for name in names if name in place]
        for value in stated:
            refuse(
                value != stated[0],
                f"config.json: {names[-1]} of rope is both {stated[0]!r} and {value!r}; keep the right one",
            )
    scaling = {**rope}
    theta = raw.get("rope_theta", scaling.pop("rope_theta"))
    kind = scaling.pop("rope_type")
    scaling.pop("type", None)
    refuse(not _is_positive(theta), f"config.json: rope_theta={theta!r}; expected a positive number")
    if kind == "default" and not scaling:
        return theta, None
    llama3_keys = list(RopeScaling.__dataclass_fields__)
    refuse(
        kind != "llama3" or scaling.keys() != set(llama3_keys),
        f"config.json: rope type {kind!r} with {scaling} is not supported (default; llama3: {llama3_keys})",
    )
    _check_llama3(scaling)
    return theta, RopeScaling(**scaling)


def _rotary_factor(rope: dict[str, Any], head_dim: int) -> float:
    """Take the share of a head's channels that is rotated out of rope's keys. Raises InputError for an odd number.

    The sections of mrope are taken out too: for text alone they change nothing.
    """
    for key in ("mrope_section", "mrope_interleaved"):
        rope.pop(key, None)
    factor = rope.pop("partial_rotary_factor", 1.0)
    is_share = _is_positive(factor) and factor <= 1
    refuse(
        not is_share or int(head_dim * factor) % 2 or int(head_dim * factor) == 0,
        f"config.json: partial_rotary_factor={factor!r} of head_dim={head_dim}; expected an even number of channels",
    )
    return float(factor)


def _delta_net(config: Any) -> DeltaNet | None:
    """Return the shape of the layers with a gated delta net. Raises InputError if key heads do not divide value heads."""
    layers = tuple(i for i, kind in enumerate(config.layer_types) if kind == "linear_attention")
    refuse(
        len(layers) == config.num_hidden_layers,
        "config.json: layer_types has no full_attention; a model without any is not supported",
    )
    shape = DeltaNet(layers, **{name: getattr(config, key) for name, key in _DELTA_SIZES.items()})
    refuse(
        shape.num_value_heads % shape.num_key_heads,
        f"config.json: linear_num_value_heads={shape.num_value_heads} is no multiple of "
        f"linear_num_key_heads={shape.num_key_heads}",
    )
    return shape if layers else None


def _check_llama3(scaling: Mapping[str, Any]) -> None:
    """Raise InputError for values with which the frequencies are not those that Llama 3 means."""
    for key, value in scaling.items():
        refuse(not _is_positive(value), f"config.json: {key}={value!r} of rope; expected a positive number")
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    refuse(high <= low, f"config.json: high_freq_factor={high} of rope is not above low_freq_factor={low}")


def _windows(
    raw: Mapping[str, Any], config: Any, layer_types: Set[str]
) -> tuple[int | None, ...]:
    """Return each layer's sliding window."""
    window = getattr(config, "sliding_window", None)
    # A family without types of layers has its window in all.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    refuse(
        set(kinds) - layer_types,
        f"config.json: layer_types={kinds} is not supported; expected {' or '.join(sorted(layer_types))}",
    )
    refuse(
        window is None and "sliding_attention" in (raw.get("layer_types") or ()),
        "config.json: layer_types asks for sliding_attention, but no sliding window is in use",
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
