"""Hugging Face folders: config.json to `ModelConfig`, safetensors to parameters, and back.

Parameter names are the checkpoint's, so loading and saving are the identity on keys. A config key that may change the
numbers and is not supported is refused by name. Tensors move one at a time, straight into each rank's shard.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from minirl import watch
from minirl.errors import InputError
from minirl.model import ModelConfig, RopeScaling, Transformer

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
_TOKENIZER_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "*.jinja",
)
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def resolve_folder(model: str, *, flag: str = "--model") -> Path:
    """The local folder of a model: itself, or the hub's snapshot of that id. Raises InputError with both."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    if Path(model).exists() or model.startswith((".", "/")):
        raise InputError(f"{flag} {model}: no config.json there; give a Hugging Face folder or hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "merges.txt"]))
    except (OSError, ValueError) as error:
        raise InputError(f"{flag} {model}: neither a folder here nor to be had from the hub ({error})") from None


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
        raise InputError(f"config.json: model_type {family!r} is not supported (supported: {', '.join(FAMILIES)})")
    for key, value in raw.items():
        if key in _NEUTRAL_VALUES and value not in (_NEUTRAL_VALUES[key], None):
            raise InputError(f"config.json: {key}={value!r} is not supported (only {_NEUTRAL_VALUES[key]!r})")
        if key not in _SHAPE_KEYS | _HARMLESS_KEYS | _NEUTRAL_VALUES.keys() and value not in (None, False):
            raise InputError(f"config.json: {key}={value!r} is not supported; if it changes no numbers, remove it")
    is_classifier = any(name.endswith("ForSequenceClassification") for name in raw.get("architectures") or [])
    if is_classifier and len(raw.get("id2label") or (0, 1)) != 1:
        raise InputError("config.json: a sequence classifier with one label (num_labels=1) is a reward model; not this")
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
        raise InputError(f"config.json: rope type {kind!r} with {found} is not supported (default; llama3: {[*names]})")
    return theta, None


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's sliding window, by the rules of its family's own configuration class."""
    num_layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if raw["model_type"] in ("qwen2", "qwen3") and not raw.get("use_sliding_window"):
        window = None
    if raw["model_type"] == "llama" or window is None:
        if "sliding_attention" in (raw.get("layer_types") or []):
            raise InputError("config.json: layer_types asks for sliding_attention, but no sliding window is in use")
        return (None,) * num_layers
    default = ["sliding_attention"] * num_layers
    if "max_window_layers" in raw:
        default = ["full_attention" if i < raw["max_window_layers"] else "sliding_attention" for i in range(num_layers)]
    kinds = raw.get("layer_types") or default
    if set(kinds) - {"full_attention", "sliding_attention"} or len(kinds) != num_layers:
        raise InputError(f"config.json: layer_types={kinds} is not supported (full_attention, sliding_attention)")
    if raw["model_type"] == "mistral" and kinds != default:
        raise InputError(
            f"config.json: layer_types={kinds} is not supported for mistral, where transformers ignores it"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by checkpoint name, a tied one once."""
    return dict(model.named_parameters())


def load_weights(model: Transformer, folder: Path) -> None:
    """Fill the parameters (plain, or this rank's shards of DTensors) from the folder's safetensors. Not collective.

    A scalar head that a language model's folder does not have is set to 0.

    Raises InputError without safetensors files, and InputError naming missing, unexpected or misshapen tensors.
    """
    files = _file_of_each_tensor(folder)
    params = named_parameters(model)
    redundant = {name for name in files if name.endswith("rotary_emb.inv_freq")}
    if model.config.tie_word_embeddings or model.config.scalar_head:
        redundant.add("lm_head.weight")
    if model.config.scalar_head and not read_config(folder).scalar_head:
        torch.nn.init.zeros_(params.pop("score.weight"))
    missing, unexpected = sorted(params.keys() - files.keys()), sorted(files.keys() - params.keys() - redundant)
    if missing or unexpected:
        raise InputError(f"{folder}: missing tensors {missing[:5]}, unexpected tensors {unexpected[:5]} (first five)")
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            names = {name for name in params if files[name] == path}
            if lacking := sorted(names - set(file.keys())):
                raise InputError(f"{path}: lacks tensors {lacking[:5]} that the index promises (first five)")
            for name in sorted(names):
                _fill(params[name], file.get_slice(name), f"{path}: {name}")


def load_replica(folder: Path, *, dtype: torch.dtype, scalar_head: bool = False) -> Transformer:
    """A frozen, unsharded model on the host, in `dtype`: a reference, or with a scalar head a reward model.

    It needs no collectives. Not collective.
    """
    model = Transformer(read_config(folder, scalar_head=scalar_head)).to(dtype).requires_grad_(False)
    load_weights(model, folder)
    return model


def _file_of_each_tensor(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not (folder / "model.safetensors").is_file():
        raise InputError(f"{folder}: no model.safetensors and no index; convert other formats to safetensors")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / "model.safetensors")


@torch.no_grad()
def _fill(param: nn.Parameter, stored: Any, place: str) -> None:
    if tuple(stored.get_shape()) != tuple(param.shape):
        raise InputError(f"{place} has shape {stored.get_shape()}, config.json asks for {list(param.shape)}")
    if type(param) is nn.Parameter:
        param.copy_(stored[:])
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(param, DTensor)
    local = param.to_local()
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    if local.numel():
        local.copy_(stored[offset[0] : offset[0] + shape[0]])


def save_folder(
    folder: Path, tensors: Mapping[str, Tensor], *, config: Mapping[str, Any], tokenizer_from: Path | None
) -> None:
    """Write a Hugging Face folder: weights as they are, `config` with their dtype, the tokenizer files copied.

    One rank calls it; peak memory is one tensor. The folder must not exist: it appears whole, by a rename.
    """
    half_made = folder.with_name(f".half-{folder.name}")
    shutil.rmtree(half_made, ignore_errors=True)
    half_made.mkdir(parents=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    stated = {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": dtype}
    (half_made / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
    sources = [] if tokenizer_from is None else [path for p in _TOKENIZER_FILES for path in tokenizer_from.glob(p)]
    for source in sources:
        shutil.copy(source, half_made)
    _write_safetensors(half_made / "model.safetensors", tensors)
    os.replace(half_made, folder)


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The safetensors format, written one tensor at a time (the library's writer wants all of them in memory)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for data in _raw_bytes(tensors.values()):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _raw_bytes(tensors: Iterable[Tensor]) -> Iterator[bytes]:
    for tensor in tensors:
        watch.beat()  # a slow disk is no hang
        yield tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
