"""Find a model's folder and the base model of an adapter folder; read config.json with transformers.

PEFT does not copy config.json from the base folder to an adapter folder, and often does not copy the tokenizer.
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
_hub_ids: dict[Path, str] = {}  # Hub id of each snapshot that this process resolved


def resolve_folder(model: str, *, flag: str = "--model", with_weights: bool = True) -> Path:
    """Return a model's local folder: `model` itself if it is a folder, otherwise the local snapshot for this Hub id.

    Downloads the snapshot if it is not cached; `with_weights=False` skips the weights. Raises InputError, naming the
    flag and the model.
    """
    folder = Path(model)
    if (folder / "config.json").is_file() or has_adapters(folder):
        return folder
    looks_like_path = model.startswith((".", "/"))
    refuse(
        folder.exists() or looks_like_path,
        f"{flag} {model}: no config.json found; pass a Hugging Face model folder or Hub id",
    )
    from huggingface_hub import snapshot_download

    allow_patterns = [*_DOWNLOADED_FILES, "*.safetensors"] if with_weights else _DOWNLOADED_FILES
    try:
        snapshot = Path(snapshot_download(model, allow_patterns=allow_patterns))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{flag} {model}: neither a local folder nor available from the Hub ({error})"
        ) from None
    _hub_ids[snapshot] = model
    return snapshot


def hub_id_or_path(folder: Path) -> str:
    """Return the Hub id from which a folder was resolved; for any other folder, return its absolute path."""
    return _hub_ids.get(folder, str(folder.absolute()))


def has_adapters(folder: Path) -> bool:
    """Return whether a folder contains adapters for a base model."""
    return (folder / ADAPTERS_FILE).is_file()


def base_model_folder(folder: Path, *, with_weights: bool = True) -> Path:
    """Return the local folder of an adapter folder's base model. Raises InputError if the base cannot be found."""
    path = folder / ADAPTERS_FILE
    base = read_json_object(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(
            f"{path}: base_model_name_or_path is {base!r}; name the folder or Hub id of the base model"
        )
    return resolve_folder(base, flag=f"{path}: base_model_name_or_path", with_weights=with_weights)


def model_file(folder: Path, name: str) -> Path:
    """Return the path to a file in a model's folder, or in the base folder if an adapter folder lacks the file.

    Raises InputError if the base folder cannot be found.
    """
    path = folder / name
    if path.is_file() or not has_adapters(folder):
        return path
    return base_model_folder(folder, with_weights=False) / name


def transformers_config(raw: Mapping[str, Any]) -> Any:
    """Return transformers' config object, which checks types and fills in missing keys.

    Raises InputError with transformers' reason, which names the key.
    """
    from transformers import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[raw["model_type"]]
        # transformers writes infinity as {"__float__": "Infinity"}. Copy the dict, because from_dict modifies nested
        # objects.
        return config_class.from_dict(copy.deepcopy(config_class._decode_special_floats(dict(raw))))
    except Exception as error:  # the exception type depends on the transformers version
        reason = " ".join(str(error).split())
        raise InputError(
            f"config.json: transformers cannot read model_type {raw.get('model_type')!r}: {reason}"
        ) from None
