"""Weights in Hugging Face folders: resolve, load and save.

Parameters have the names of the checkpoint's tensors, so loading and saving map each name to itself. Tensors
are loaded one at a time, straight into each rank's shard. `families` reads the folder's config.json.
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
from minirl.model.folders import ADAPTERS_FILE, base_folder, has_adapters, model_file
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
    """Raise InputError if the folder's tensors do not fit such a model. Every load begins with it.

    The error names the folder without safetensors files, or missing, unexpected or misshapen tensors and unsupported
    dtypes; or a folder with adapters for a model that gets some. Reads only names, shapes and dtypes, and makes no
    weights: a wrong config.json may ask for more memory than the machine has. Collective if there are several nodes,
    whose weights must be the same.
    """
    refuse(
        config.adapters and has_adapters(folder),
        f"{folder}: has adapters; for further ones merge them first, see docs/adapters.md",
    )
    files = _tensor_files(folder)
    expected = _checkpoint_shapes(replace(config, adapters=None))
    if config.scalar_head and (has_adapters(folder) or not read_config(folder).scalar_head):
        del expected["score.weight"]
    missing = sorted(expected.keys() - files.keys())
    unexpected = sorted(name for name in files.keys() - expected.keys() if not _is_unused(config, name))
    refuse(
        missing or unexpected,
        f"{folder}: missing tensors {missing[:5]}, unexpected tensors {unexpected[:5]} (first five)",
    )
    for path in sorted(set(files.values())):
        with open_tensors(path) as file:
            for name in sorted(name for name in expected if files[name] == path):
                stored = file.get_slice(name)
                check_shape(stored.get_shape(), expected[name], f"{path}: {name}")
                dtype = stored.get_dtype()
                refuse(
                    dtype not in _DTYPES,
                    f"{path}: {name} has dtype {dtype}; expected one of {', '.join(_DTYPES)}; convert "
                    "quantized weights",
                )
    if local_world_size() < world_size():
        require_same(weights_fingerprint(folder), f"{folder}: the weights")


def load_weights(model: Transformer, folder: Path) -> None:
    """Fill the parameters from the folder's safetensors. Not collective.

    In DTensors it fills this rank's shards. A folder with adapters is read as its base with these merged. The model's
    own adapters, and a scalar head if the folder holds a language model, get their first values. `check_weights` comes
    first. Raises InputError naming a tensor with values that are not finite, and adapters that do not fit.
    """
    config = model.config
    files = _tensor_files(folder)
    adapters = read_adapters(folder)
    if config.tie_word_embeddings and "lm_head.weight" in files and config.hf_backend is None:
        _check_tied_head(files, _checkpoint_name("model.embed_tokens.weight", config.weight_prefix))
    for name, param in model.named_parameters():
        layer = name.removesuffix(".weight")
        parts = list(checkpoint_tensors(config, {name: torch.empty(param.shape, device="meta")}))
        if parts[0] in files:
            label = f"{files[parts[0]]}: {parts[0]}"
            value = adapters.merge(layer, _read_stored(config, files, parts), label)
        elif layer in adapters.tensors:  # a module that PEFT saved whole
            label = f"{adapters.path}: {layer}"
            value = adapters.tensors.pop(layer)
            check_shape(value.shape, param, label)
        else:
            label = name
            value = initial_values(name, param.shape)
        fill_parameter(param, value, label)
    refuse(
        adapters.tensors,
        f"{adapters.path}: the base has no weights for {sorted(adapters.tensors)[:5]} (first five)",
    )


def _check_tied_head(files: Mapping[str, Path], embedding: str) -> None:
    """Raise InputError if a tied model's folder has a head that differs from the embedding of this name."""
    head = "lm_head.weight"
    refuse(
        not torch.equal(read_tensor(files[head], head), read_tensor(files[embedding], embedding)),
        f"{files[head]}: {head} differs from {embedding} although config.json has tie_word_embeddings=true; set it "
        "to false, or remove the tensor",
    )


def _read_stored(config: ModelConfig, files: Mapping[str, Path], parts: Sequence[str]) -> Any:
    """The value of a parameter that a folder stores in these tensors: a slice of the only one, or all of them joined.

    A slice keeps only its own file open: while a file is open, its pages stay in memory once read.
    """
    if len(parts) == 1:
        with open_tensors(files[parts[0]]) as file:
            return file.get_slice(parts[0])
    assert config.hf_backend is not None
    return config.hf_backend.join_stored({part: read_tensor(files[part], part) for part in parts})


def checkpoint_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder, by its names, from those of parameters, by the model's."""
    if config.hf_backend is not None:
        return config.hf_backend.to_checkpoint(tensors)
    return {_checkpoint_name(name, config.weight_prefix): tensor for name, tensor in tensors.items()}


def _checkpoint_shapes(config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors, on the meta device, that a folder has of such a model."""
    return checkpoint_tensors(config, dict(make_meta_model(config).named_parameters()))


def _checkpoint_name(name: str, prefix: str) -> str:
    """Return a parameter's name in a folder, whose prefix may differ from "model."."""
    return re.sub(r"^model\.", prefix, name)


def passthrough_tensors(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Return the folder's tensors outside of the model that are saved with it (`config.passthrough_weights`).

    A model with a scalar head or adapters saves none.
    """
    if config.scalar_head or config.adapters or not config.passthrough_weights:
        return {}
    files = _tensor_files(folder)
    return {name: read_tensor(files[name], name) for name in files if _is_passthrough(config, name)}


def _is_passthrough(config: ModelConfig, name: str) -> bool:
    """Return whether a folder's tensor of this name is outside of the model, and saved with it."""
    return any(re.search(pattern, name) for pattern in config.passthrough_weights)


def check_shape(shape: Sequence[int], param: Tensor, label: str) -> None:
    """Raise InputError, with `label`, if a stored tensor's shape differs from the parameter's."""
    refuse(
        tuple(shape) != param.shape,
        f"{label} has shape {list(shape)}, the model's has {list(param.shape)}",
    )


def load_replica(folder: Path, *, dtype: torch.dtype, scalar_head: bool | None = False) -> Transformer:
    """Load a frozen, unsharded model in `dtype` on the host. Not collective, nor is its forward.

    It is a reference model, or with a scalar head a reward model; scalar_head: see `read_config`.
    """
    config = read_config(folder, scalar_head=scalar_head)
    check_weights(config, folder)
    model = make_meta_model(config)  # first values would take more time than loading
    model.to(dtype).to_empty(device="cpu").requires_grad_(False)
    model.tie_weights()
    load_weights(model, folder)
    return model


def truncate_vocabulary(model: Transformer, vocab_size: int) -> None:
    """Cut a frozen model's embeddings and head to this number of tokens, if they have more."""
    for module in (model.embed_tokens, model.lm_head):
        for parameter in module.parameters():
            parameter.data = parameter.data[:vocab_size]


def _is_unused(config: ModelConfig, name: str) -> bool:
    """Return whether a folder may hold a tensor of this name although the model has no such parameter."""
    # Old checkpoints store the rope frequencies, which are computed.
    if name.endswith("rotary_emb.inv_freq") or _is_passthrough(config, name):
        return True
    if config.scalar_head and name in _checkpoint_shapes(replace(config, scalar_head=False)):
        return True
    return config.tie_word_embeddings and name == "lm_head.weight"


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor: the only file, as transformers prefers it, or by the index.

    For a folder with adapters, those of its base.
    """
    if has_adapters(folder):
        folder = base_folder(folder)
    path = folder / "model.safetensors"
    if path.is_file():
        with open_tensors(path) as file:
            return dict.fromkeys(file.keys(), path)
    index = folder / INDEX
    refuse(
        not index.is_file(),
        f"{folder}: no model.safetensors, and no {INDEX} for shards; fetch it, or convert other formats",
    )
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index}: has no weight_map; fetch or save it again")
    files = {}
    for name, file_name in weight_map.items():
        files[name] = folder / str(file_name)
        refuse(
            not files[name].is_file(),
            f"{index}: {name} should be in {file_name!r}, which is no file beside it; fetch or save it again",
        )
    return files


def weights_fingerprint(folder: Path) -> int:
    """A checksum of 16,384 bytes of each file of the folder's weights, which any training changes. Not collective.

    To read all bytes would take as long as to load them.
    """
    checksum = 0
    for path in sorted(set(_tensor_files(folder).values())):
        step = path.stat().st_size // 2**14 | 1  # odd, so that it meets both bytes of bf16
        checksum = zlib.crc32(np.memmap(path, mode="r")[::step].tobytes(), checksum)
    return checksum


@torch.no_grad()
def fill_parameter(param: Tensor, stored: Any, label: str) -> None:
    """Copy a stored tensor into `param`, or its part into this rank's shard of a DTensor. Not collective.

    stored: a whole tensor of the parameter's shape, or a slice of `safetensors.safe_open`, of which it reads only the
    needed part. Raises InputError, with `label`, if a value is not finite.
    """
    local = param
    rows: Any = ...
    if hasattr(param, "to_local"):
        local = param.to_local()
        # FSDP cuts the rows into chunks of equally many; the last ones may have fewer, or none.
        first = rank() * math.ceil(len(param) / world_size())
        rows = slice(first, first + len(local))
    if local.numel() == 0:
        return
    local.copy_(stored[rows].to(local.device))  # torch would cast it on the host, and move the larger dtype
    refuse(
        not is_finite(local),
        f"{label} has values that are not finite; the file is damaged, fetch or save it again",
    )


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder's tokenizer and processor, and generation_config.json: contents by path in it."""
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
    kept: Mapping[str, Tensor] = MappingProxyType({}),
    peft_config: Mapping[str, Any] | None = None,
) -> None:
    """Write the files of a Hugging Face folder, each through to the disk. Raises OSError naming a file.

    Writes the tensors in their dtype, with those of `passthrough_tensors`, `config` with that dtype, and
    `tokenizer_files`.
    peft_config: the tensors are those of adapters, which are written in PEFT's form.
    """
    contents = dict(tokenizer_files)
    dtype = next(iter(tensors.values())).dtype
    written_config = {**config, "dtype": str(dtype).removeprefix("torch.")}
    written_config.pop("torch_dtype", None)  # the older name of `dtype`
    contents["config.json"] = (json.dumps(written_config, indent=2) + "\n").encode()
    shape = config_from_dict(config)
    if peft_config is None:
        weights_name = "model.safetensors"
        stored = checkpoint_tensors(shape, tensors)
    else:
        weights_name = WEIGHTS_FILE
        # transformers opens a vision model as a whole, or its language model alone.
        is_vision = shape.weight_prefix != "model."
        prefixes = ("model.", "model.language_model.") if is_vision else ("model.",)
        stored = {
            peft_name(_checkpoint_name(name, prefix)): tensor.clone()  # a file's tensors share no memory
            for prefix in prefixes
            for name, tensor in tensors.items()
        }
        contents[ADAPTERS_FILE] = (json.dumps(peft_config, indent=2) + "\n").encode()
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with durable.new_file(folder / name) as file:
            file.write(content)
    write_tensors(folder / weights_name, {**kept, **stored})
