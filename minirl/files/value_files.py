"""Values in files, without pickle: JSON values and tensors, nested in dicts and lists.

NAME.json           the values, with null where a tensor stands
NAME.safetensors    the tensors, if any, each by its place as JSON: ["buffer", 3, "tokens"]
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.errors import InputError, refuse
from minirl.files import durable
from minirl.files.durable import Digest
from minirl.files.safetensors_files import STORED_DTYPES, open_tensors, raw_bytes, write_tensors

_MAX_DEPTH = 100
_MAX_BITS = 8192  # of an int: Python neither prints nor reads thousands of digits
_MAX_HEADER_BYTES = 100_000_000  # a safetensors file with a longer header cannot be read
_ENTRY_BYTES = 120  # at most, of a tensor in the header, besides its name
# None of their subclasses, such as np.float64, which come back as something else.
_PLAIN_TYPES = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class ValueCopy:
    """A copy of named values; the originals may change afterwards.

    plain: the values, with None for each tensor. tensors: on the host, by their place as JSON.
    """

    plain: dict[str, Any]
    tensors: dict[str, Tensor]

    @staticmethod
    def of(values: Mapping[str, Any], name: str) -> "ValueCopy":
        """Copy the values. Raises InputError naming the place, as in name["buffer"][3], of one that files cannot hold.

        Files cannot hold values that would come back changed: tuples, keys that are not text, other classes.
        Tensors come back detached and on the host; two references to one tensor or list as two copies.
        """
        tensors: dict[str, Tensor] = {}
        plain = _without_tensors(dict(values), [], tensors, name)
        header_bytes = sum(len(json.dumps(place)) + _ENTRY_BYTES for place in tensors)
        refuse(
            header_bytes > _MAX_HEADER_BYTES,
            f"{name}: {len(tensors):,} tensors are too many for one file; stack or concatenate the small ones",
        )
        return ValueCopy(plain, tensors)

    def write(self, folder: Path, stem: str) -> dict[str, Digest]:
        """Write folder/stem.json and .safetensors, each through to the disk; their digests by path in the folder."""
        path = folder / stem
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.plain)
        digests = {f"{stem}.json": durable.write_file(Path(f"{path}.json"), [text.encode()])}
        if self.tensors:
            digests[f"{stem}.safetensors"] = write_tensors(Path(f"{path}.safetensors"), self.tensors)
        return digests

    def fingerprints(self) -> dict[str, str]:
        """For each name the SHA-256 of its value, tensors included."""
        hashes = {name: hashlib.sha256(json.dumps(value).encode()) for name, value in self.plain.items()}
        for place, tensor in self.tensors.items():
            sha256 = hashes[json.loads(place)[0]]
            sha256.update(f"{place} {tensor.dtype} {list(tensor.shape)}".encode())
            for chunk in raw_bytes([tensor]):
                sha256.update(chunk)
        return {name: sha256.hexdigest() for name, sha256 in hashes.items()}


def read_values(stem: Path) -> dict[str, Any]:
    """The values that `ValueCopy.write` wrote there, {} if it wrote none; tensors on the host."""
    path = Path(f"{stem}.json")
    if not path.is_file():
        return {}
    values: dict[str, Any] = json.loads(path.read_text())
    tensors_path = Path(f"{stem}.safetensors")
    if not tensors_path.is_file():
        return values
    with open_tensors(tensors_path) as file:
        for place in sorted(file.keys()):
            *outer, last = json.loads(place)
            holder: Any = values
            for key in outer:
                holder = holder[key]
            # Cloned, because the tensor may be a view of the file.
            holder[last] = file.get_tensor(place).clone()
    return values


def _without_tensors(value: Any, place: list[str | int], tensors: dict[str, Tensor], name: str) -> Any:
    """A copy of the value with None for each tensor, a copy of which is added to `tensors`."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        if kind is int and value.bit_length() > _MAX_BITS:
            raise InputError(f"{_described(name, place)}: an int of over {_MAX_BITS} bits; make it a text")
        return value
    if len(place) > _MAX_DEPTH:
        raise InputError(f"{_described(name, place[:1])}: is over {_MAX_DEPTH} deep, or contains itself")
    if kind is dict:
        strange = [key for key in value if type(key) is not str]
        if strange:
            raise InputError(
                f"{_described(name, place)}: has the key {strange[0]!r}; a checkpoint's keys are text"
            )
        return {key: _without_tensors(item, [*place, key], tensors, name) for key, item in value.items()}
    if kind is list:
        return [_without_tensors(item, [*place, i], tensors, name) for i, item in enumerate(value)]
    if kind is not Tensor:
        raise InputError(
            f"{_described(name, place)}: a checkpoint cannot hold a {kind.__module__}.{kind.__name__}; make it a list, "
            "a dict, a torch.Tensor, a text, a number, a bool or None"
        )
    if value.dtype not in STORED_DTYPES or value.layout != torch.strided:
        raise InputError(
            f"{_described(name, place)}: a checkpoint cannot hold a tensor of {value.dtype}, {value.layout}"
        )
    tensors[json.dumps(place)] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return None


def _described(name: str, place: list[str | int]) -> str:
    return name + "".join(f"[{json.dumps(key)}]" for key in place)
