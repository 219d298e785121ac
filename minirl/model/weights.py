"""Load and save model weights in Hugging Face folders.

Most parameters have the same names as the checkpoint's tensors; `checkpoint_tensors` converts the other names. Tensors
are loaded one by one, directly into each rank's shard. `families` reads the folder's config.json.
"""

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirl.errors import InputError, refuse
from minirl.files import durable
from minirl.files.json_files import read_json_object
from minirl.files.safetensors_files import INDEX, is_finite, open_tensors, read_tensor, write_tensors
from minirl.model.adapters import WEIGHTS_FILE, initial_values, peft_name, read_adapters
from minirl.model.config import ModelConfig
from minirl.model.families import config_from_dict, read_config
from minirl.model.folders import ADAPTERS_FILE, base_model_folder, has_adapters, model_file
from minirl.model.transformer import Transformer, make_meta_model
from minirl.ranks.process_group import local_world_size, rank, require_same, world_size

_TOKENIZER_FILES = (
    "tokenizer*",
    "*token*.json",
    "*vocab*.json",
    "*processor_config.json",
    "chat_template.json",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
_DTYPES = ("F32", "BF16", "F16", "F64")


def check_weights(config: ModelConfig, folder: Path) -> None:
    """Raise InputError if the folder's tensors do not fit this model. Call this before every load.

    Rejects missing safetensors files, missing or unexpected tensors, wrong shapes, unsupported dtypes, and an adapter
    folder if the model adds new adapters. Reads only names, shapes and dtypes, and allocates no weights, because a
    wrong config.json may call for more memory than the machine has. On several nodes, the call is collective, and all
    nodes must have the same weights.
    """
    refuse(
        config.adapters and has_adapters(folder),
        f"{folder}: already has adapters; merge them before adding new ones (see docs/adapters.md)",
    )
    files = _tensor_files(folder)
    expected_shapes = _checkpoint_shapes(replace(config, adapters=None))
    if config.scalar_head and (has_adapters(folder) or not read_config(folder).scalar_head):
        del expected_shapes["score.weight"]
    missing_keys = sorted(expected_shapes.keys() - files.keys())
    unexpected_keys = sorted(
        name for name in files.keys() - expected_shapes.keys() if not _is_unused(config, name)
    )
    refuse(
        missing_keys or unexpected_keys,
        f"{folder}: missing tensors {missing_keys[:5]}, unexpected tensors {unexpected_keys[:5]} (first five)",
    )
    for path in sorted(set(files.values())):
        with open_tensors(path) as file:
            for name in sorted(name for name in expected_shapes if files[name] == path):
                tensor_slice = file.get_slice(name)
                check_shape(tensor_slice.get_shape(), expected_shapes[name], f"{path}: {name}")
                dtype = tensor_slice.get_dtype()
                refuse(
                    dtype not in _DTYPES,
                    f"{path}: {name} has dtype {dtype}; expected one of {', '.join(_DTYPES)}; convert "
                    "quantized weights",
                )
    if local_world_size() < world_size():
        require_same(weights_fingerprint(folder), f"{folder}: the weights")


def load_weights(model: Transformer, folder: Path) -> None:
    """Fill the parameters from the folder's safetensors files. Not collective.

    For DTensors, fills this rank's shard. An adapter folder is loaded as the base model with the adapters merged in.
    The model's own adapters get initial values, and so does a scalar head if the folder contains a language model. Call
    `check_weights` first. Raises InputError, naming the tensor, if a tensor has non-finite values, an adapter does not
    fit, or the folder stores a head that differs from the embedding although the config ties them.
    """
    config = model.config
    files = _tensor_files(folder)
    adapters = read_adapters(folder)
    head_name = "lm_head.weight"
    if config.tie_word_embeddings and head_name in files and config.hf_backend is None:
        embedding_name = _checkpoint_name("model.embed_tokens.weight", config.weight_prefix)
        refuse(
            not torch.equal(
                read_tensor(files[head_name], head_name), read_tensor(files[embedding_name], embedding_name)
            ),
            f"{files[head_name]}: {head_name} differs from {embedding_name} although config.json has "
            "tie_word_embeddings=true; set it to false, or remove the tensor",
        )
    for name, param in model.named_parameters():
        module_name = name.removesuffix(".weight")
        stored_names = list(checkpoint_tensors(config, {name: torch.empty(param.shape, device="meta")}))
        if stored_names[0] in files:
            error_prefix = f"{files[stored_names[0]]}: {stored_names[0]}"
            value = adapters.merge(
                module_name, _read_stored_tensors(config, files, stored_names), error_prefix
            )
        elif module_name in adapters.tensors:  # a module that PEFT saved in full
            error_prefix = f"{adapters.path}: {module_name}"
            value = adapters.tensors.pop(module_name)
            check_shape(value.shape, param, error_prefix)
        else:
            error_prefix = name
            value = initial_values(name, param.shape)
        fill_parameter(param, value, error_prefix)
    refuse(
        adapters.tensors,
        f"{adapters.path}: the base model has no weights for {sorted(adapters.tensors)[:5]} (first five)",
    )


def _read_stored_tensors(config: ModelConfig, files: Mapping[str, Path], stored_names: Sequence[str]) -> Any:
    """Return a parameter's stored value: a safetensors slice of a single tensor, or several tensors joined into one.

    Each slice has a separate file handle, because pages that were read stay in memory until the file is closed.
    """
    if len(stored_names) == 1:
        with open_tensors(files[stored_names[0]]) as file:
            return file.get_slice(stored_names[0])
    assert config.hf_backend is not None
    return config.hf_backend.join_stored({name: read_tensor(files[name], name) for name in stored_names})


def checkpoint_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert parameters, keyed by the model's names, to checkpoint tensors, keyed by the checkpoint's names."""
    if config.hf_backend is not None:
        return config.hf_backend.to_checkpoint(tensors)
    return {_checkpoint_name(name, config.weight_prefix): tensor for name, tensor in tensors.items()}


def _checkpoint_shapes(config: ModelConfig) -> dict[str, Tensor]:
    """Return meta tensors with the names and shapes of the tensors that a folder stores for this model."""
    return checkpoint_tensors(config, dict(make_meta_model(config).named_parameters()))


def _checkpoint_name(name: str, prefix: str) -> str:
    """Replace the prefix "model." of a parameter's name with the folder's prefix."""
    return re.sub(r"^model\.", prefix, name)


def passthrough_tensors(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Return the folder's tensors that are not part of the model but are saved with the model.

    `config.passthrough_weight_patterns` matches the names of these tensors. For models with a scalar head or adapters,
    the result is empty.
    """
    if config.scalar_head or config.adapters or not config.passthrough_weight_patterns:
        return {}
    files = _tensor_files(folder)
    return {name: read_tensor(files[name], name) for name in files if _is_passthrough(config, name)}


def _is_passthrough(config: ModelConfig, name: str) -> bool:
    """Return whether the named tensor is stored in the model folder without being part of the model."""
    return any(re.search(pattern, name) for pattern in config.passthrough_weight_patterns)


def check_shape(shape: Sequence[int], param: Tensor, error_prefix: str) -> None:
    """Raise InputError, prefixed with `error_prefix`, if a stored tensor's shape differs from the parameter's."""
    refuse(
        tuple(shape) != param.shape,
        f"{error_prefix} has shape {list(shape)}; the model expects {list(param.shape)}",
    )


def load_unsharded_model(
    folder: Path, *, dtype: torch.dtype, scalar_head: bool | None = False
) -> Transformer:
    """Load a frozen, unsharded model in `dtype` on the host. Neither loading nor the model's forward is collective.

    Reference models and, with a scalar head, reward models are loaded this way. scalar_head: see `read_config`.
    """
    config = read_config(folder, scalar_head=scalar_head)
    check_weights(config, folder)
    model = make_meta_model(config)  # initializing the weights would take longer than loading them
    model.to(dtype).to_empty(device="cpu").requires_grad_(False)
    model.tie_weights()
    load_weights(model, folder)
    return model


def truncate_vocabulary(model: Transformer, vocab_size: int) -> None:
    """Truncate a frozen model's embeddings and head to `vocab_size` tokens if they have more."""
    for module in (model.embed_tokens, model.lm_head):
        for parameter in module.parameters():
            parameter.data = parameter.data[:vocab_size]


def _is_unused(config: ModelConfig, name: str) -> bool:
    """Return whether a folder is allowed to contain a tensor with this name even though the model does not use it."""
    # Old checkpoints store the RoPE frequencies, which minirl computes instead.
    if name.endswith("rotary_emb.inv_freq") or _is_passthrough(config, name):
        return True
    if config.scalar_head and name in _checkpoint_shapes(replace(config, scalar_head=False)):
        return True
    return config.tie_word_embeddings and name == "lm_head.weight"


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return each tensor's safetensors file: model.safetensors if it exists, otherwise the file named by the index.

    transformers also prefers model.safetensors. For an adapter folder, return the base model's files.
    """
    if has_adapters(folder):
        folder = base_model_folder(folder)
    path = folder / "model.safetensors"
    if path.is_file():
        with open_tensors(path) as file:
            return dict.fromkeys(file.keys(), path)
    index_path = folder / INDEX
    refuse(
        not index_path.is_file(),
        f"{folder}: contains neither model.safetensors nor {INDEX}; download one of them, or convert the weights from "
        "another format",
    )
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index_path}: no weight_map found; download or save the file again")
    files = {}
    for name, file_name in weight_map.items():
        files[name] = folder / str(file_name)
        refuse(
            not files[name].is_file(),
            f"{index_path}: {name} should be in {file_name!r}, which is missing; download or save the folder again",
        )
    return files


def weights_fingerprint(folder: Path) -> int:
    """Return a checksum computed from 16,384 bytes of each weights file. Any training changes the checksum. Not
    collective.

    Reading every byte would take as long as loading the weights.
    """
    checksum = 0
    for path in sorted(set(_tensor_files(folder).values())):
        stride = path.stat().st_size // 2**14 | 1  # odd, so that both bytes of bf16 values are sampled
        checksum = zlib.crc32(np.memmap(path, mode="r")[::stride].tobytes(), checksum)
    return checksum


@torch.no_grad()
def fill_parameter(param: Tensor, stored: Any, error_prefix: str) -> None:
    """Copy a stored tensor into `param`; for a DTensor, copy this rank's rows into its shard. Not collective.

    stored: a full tensor of the parameter's shape, or a slice from `safetensors.safe_open`, of which only the needed
    part is read. Raises InputError, prefixed with `error_prefix`, if a value is non-finite.
    """
    local_shard = param
    shard_rows: Any = ...
    if hasattr(param, "to_local"):
        local_shard = param.to_local()
        # FSDP splits the rows into chunks of equal size, except that the last chunks may have fewer rows, or none.
        first_row = rank() * math.ceil(len(param) / world_size())
        shard_rows = slice(first_row, first_row + len(local_shard))
    if local_shard.numel() == 0:
        return
    # Copy to the device before casting: `copy_` alone would cast on the host, and then transfer the larger dtype.
    local_shard.copy_(stored[shard_rows].to(local_shard.device))
    refuse(
        not is_finite(local_shard),
        f"{error_prefix} has non-finite values; the file is corrupt, so download or save it again",
    )


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return a folder's tokenizer and processor files and generation_config.json, keyed by relative path."""
    source = model_file(folder, "tokenizer_config.json").parent
    paths = {"generation_config.json": model_file(folder, "generation_config.json")}
    for pattern in _TOKENIZER_FILES:
        paths |= {str(path.relative_to(source)): path for path in source.glob(pattern)}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any],
    tokenizer_files: Mapping[str, bytes] = MappingProxyType({}),
    passthrough: Mapping[str, Tensor] = MappingProxyType({}),
    peft_config: Mapping[str, Any] | None = None,
) -> None:
    """Write the files of a Hugging Face folder and sync each file to disk. Raises OSError, naming the file.

    Writes `tensors` in their dtype, the `passthrough` tensors (see `passthrough_tensors`), `config` with the dtype of
    `tensors`, and `tokenizer_files`.
    peft_config: contents of adapter_config.json if `tensors` are adapters, which are written in PEFT's format.
    """
    file_contents = dict(tokenizer_files)
    dtype = next(iter(tensors.values())).dtype
    written_config = {**config, "dtype": str(dtype).removeprefix("torch.")}
    written_config.pop("torch_dtype", None)  # transformers' older name for `dtype`
    file_contents["config.json"] = (json.dumps(written_config, indent=2) + "\n").encode()
    model_config = config_from_dict(config)
    if peft_config is None:
        weights_name = "model.safetensors"
        stored_tensors = checkpoint_tensors(model_config, tensors)
    else:
        weights_name = WEIGHTS_FILE
        # transformers loads either the full vision model or only the language model, so write each tensor under both
        # names. Clone the tensors, because tensors in one file must not share memory.
        is_vision = model_config.weight_prefix != "model."
        weight_prefixes = ("model.", "model.language_model.") if is_vision else ("model.",)
        stored_tensors = {
            peft_name(_checkpoint_name(name, prefix)): tensor.clone()
            for prefix in weight_prefixes
            for name, tensor in tensors.items()
        }
        file_contents[ADAPTERS_FILE] = (json.dumps(peft_config, indent=2) + "\n").encode()
    for name, content in file_contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with durable.open_new_file(folder / name) as file:
            file.write(content)
    write_tensors(folder / weights_name, {**passthrough, **stored_tensors})
