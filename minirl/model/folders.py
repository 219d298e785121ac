"""The folder of a model, and of the base that its adapters are for; its config.json as transformers reads it.

PEFT leaves config.json, and often the tokenizer, to the base.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object

ADAPTERS_FILE = "adapter_config.json"
_DOWNLOADED_FILES = [
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
]
_hub_ids: dict[Path, str] = {}  # by the snapshots that this process has resolved


def resolve_folder(model: str, *, flag: str = "--model", with_weights: bool = True) -> Path:
    """Return the local folder of a model: `model` itself, or a snapshot of that id from the hub.

    Downloads the snapshot if it is not cached, without the weights if they are not asked for. Raises InputError,
    which names the flag and the model.
    """
    folder = Path(model)
    if (folder / "config.json").is_file() or has_adapters(folder):
        return folder
    looks_like_path = model.startswith((".", "/"))
    refuse(
        folder.exists() or looks_like_path,
        f"{flag} {model}: no config.json there; give a Hugging Face folder or hub id",
    )
    from huggingface_hub import snapshot_download

    patterns = [*_DOWNLOADED_FILES, "*.safetensors"] if with_weights else _DOWNLOADED_FILES
    try:
        snapshot = Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{flag} {model}: neither a local folder nor available from the hub ({error})"
        ) from None
    _hub_ids[snapshot] = model
    return snapshot


def hub_id_or_path(folder: Path) -> str:
    """The hub id from which a folder was resolved, or else its absolute path."""
    return _hub_ids.get(folder, str(folder.absolute()))


def has_adapters(folder: Path) -> bool:
    """Return whether a folder holds adapters for a model of another folder."""
    return (folder / ADAPTERS_FILE).is_file()


def base_folder(folder: Path, *, with_weights: bool = True) -> Path:
    """Return the local folder of the model that a folder's adapters are for. Raises InputError."""
    path = folder / ADAPTERS_FILE
    base = read_json_object(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(
            f"{path}: base_model_name_or_path is {base!r}; name the folder or hub id of the base"
        )
    return resolve_folder(base, flag=f"{path}: base_model_name_or_path", with_weights=with_weights)


def model_file(folder: Path, name: str) -> Path:
    """Return the path of a model's file; if adapters lack it, that of their base. Raises InputError."""
    path = folder / name
    if path.is_file() or not has_adapters(folder):
        return path
    return base_folder(folder, with_weights=False) / name


def transformers_config(raw: Mapping[str, Any]) -> Any:
    """Return the object of transformers' config class, which checks types and fills in missing keys.

    Raises InputError with the reason, which names the key.
    """
    from transformers import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[raw["model_type"]]
        # transformers writes an infinity as {"__float__": "Infinity"}. A copy, because it fills in the objects within.
        return config_class.from_dict(copy.deepcopy(config_class._decode_special_floats(dict(raw))))
    except Exception as error:  # which one depends on the version of transformers
        reason = " ".join(str(error).split())
        raise InputError(
            f"config.json: transformers cannot read model_type {raw.get('model_type')!r}: {reason}"
        ) from None
