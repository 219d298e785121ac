"""Hugging Face folders: config.json to `ModelConfig`, safetensors to parameters, and back.

Parameter names are the checkpoint's, so loading and saving are the identity on keys. A config key that may change the
numbers and is not supported is refused by name. Tensors move one at a time, straight into each rank's shard.
"""

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minirl.errors import InputError
from minirl.files import durable
from minirl.files.durable import Digest
from minirl.files.safetensors_files import open_tensors, write_tensors
from minirl.model.families import read_config
from minirl.model.transformer import Transformer

_TOKENIZER_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "*.jinja",
)


def resolve_folder(model: str, *, flag: str = "--model") -> Path:
    """The local folder of a model: itself, or the hub's snapshot of that id. Raises InputError with both."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    if Path(model).exists() or model.startswith((".", "/")):
        raise InputError(f"{flag} {model}: no config.json there; give a Hugging Face folder or hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "merges.txt"])
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"{flag} {model}: neither a folder here nor to be had from the hub ({error})"
        ) from None


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
    missing, unexpected = (
        sorted(params.keys() - files.keys()),
        sorted(files.keys() - params.keys() - redundant),
    )
    if missing or unexpected:
        raise InputError(
            f"{folder}: missing tensors {missing[:5]}, unexpected tensors {unexpected[:5]} (first five)"
        )
    for path in sorted(set(files.values())):
        with open_tensors(path) as file:
            names = {name for name in params if files[name] == path}
            if lacking := sorted(names - set(file.keys())):
                raise InputError(f"{path}: lacks tensors {lacking[:5]} that the index promises (first five)")
            for name in sorted(names):
                fill(params[name], file.get_slice(name), f"{path}: {name}")


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
    with open_tensors(folder / "model.safetensors") as file:
        return dict.fromkeys(file.keys(), folder / "model.safetensors")


@torch.no_grad()
def fill(param: Tensor, stored: Any, place: str) -> None:
    """Copy into a tensor, or into this rank's shard of a DTensor, what is stored of it (has `get_shape`, is sliced).

    Not collective. Raises InputError naming `place` for another shape and for values that are not finite.
    """
    if tuple(stored.get_shape()) != tuple(param.shape):
        raise InputError(f"{place} has shape {list(stored.get_shape())}, the model's has {list(param.shape)}")
    rows, local = slice(None), param
    if hasattr(param, "placements"):
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        assert isinstance(param, DTensor)
        local = param.to_local()
        shape, offset = compute_local_shape_and_global_offset(
            param.shape, param.device_mesh, param.placements
        )
        rows = slice(offset[0], offset[0] + shape[0])
    if local.numel():
        local.copy_(stored[rows])
        if not local.isfinite().all():
            raise InputError(
                f"{place} has values that are not finite; the file is damaged, fetch or save it again"
            )


def save_folder(
    folder: Path, tensors: Mapping[str, Tensor], *, config: Mapping[str, Any], tokenizer_from: Path | None
) -> None:
    """Write a Hugging Face folder that appears whole, by a rename. One rank calls it.

    Raises OSError when there is a folder of that name.
    """
    half_made = folder.with_name(f".half-{folder.name}-{secrets.token_hex(4)}")
    try:
        write_folder(half_made, tensors, config=config, tokenizer_from=tokenizer_from)
        durable.publish(half_made, folder)
    finally:
        shutil.rmtree(half_made, ignore_errors=True)


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], *, config: Mapping[str, Any], tokenizer_from: Path | None
) -> dict[str, Digest]:
    """Write the files of a Hugging Face folder; returns their digests by name.

    Weights as they are, `config` with their dtype, the tokenizer files copied. Peak memory is one tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    stated = {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": dtype}
    sources = (
        [] if tokenizer_from is None else [path for p in _TOKENIZER_FILES for path in tokenizer_from.glob(p)]
    )
    contents = {source.name: source.read_bytes() for source in sources}
    contents["config.json"] = (json.dumps(stated, indent=2) + "\n").encode()
    digests = {name: durable.write_file(folder / name, [content]) for name, content in contents.items()}
    return digests | {"model.safetensors": write_tensors(folder / "model.safetensors", tensors)}
