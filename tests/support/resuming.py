"""The results that a resumed run must repeat, and runs as a kill leaves them."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.rank_pool import RankPool
from support.scripts import read_metrics, run_in_pool, untimed


def as_text(value: Any) -> str:
    """A text that is equal for values of the same types that are equal to the bit."""
    if isinstance(value, Tensor):
        content = value.contiguous().view(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, dict):
        return repr({key: as_text(item) for key, item in value.items()})
    return repr(list(map(as_text, value))) if isinstance(value, list) else repr(value)


def load(path: Path) -> dict[str, Any]:
    """A file in resume/ of a checkpoint."""
    return torch.load(path, weights_only=True)


def digests(folder: Path) -> dict[str, str]:
    """Digests of all that must be equal: checkpoints, rollouts, numbers except times.

    How full the cache and decode steps are is left out: it depends on when users' functions reply.
    """
    files = [*(folder / "checkpoints").rglob("*.safetensors"), *(folder / "rollouts").iterdir()]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    for path in (folder / "checkpoints").rglob("*.pt"):
        for name, value in load(path).items():
            found[f"{path.relative_to(folder)} {name}"] = as_text(value).encode()
    for line in read_metrics(folder):
        numbers = untimed(line)
        kept = [name for name in numbers if not name.startswith(("perf/decode", "count/dropped"))]
        found[f"metrics {line['step']}"] = json.dumps([(name, numbers[name]) for name in kept]).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def interrupted_copy(folder: Path, name: str, last_step: int) -> Path:
    """The run as a kill leaves it some time after the checkpoint of `last_step` (0: before the first)."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    for path in (copy / "checkpoints").iterdir():
        if int(path.name) > last_step:
            shutil.rmtree(path)
    (copy / "checkpoints" / f".half-{last_step + 1:06d}").mkdir()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "reward/me')
    return copy


def resume(pool: RankPool, script: str, folder: Path, *flags: str, last_step: int = 1) -> str:
    """Train on in an `interrupted_copy`, which must end like the whole run, bit for bit; what rank 0 printed."""
    copy = interrupted_copy(folder, f"{folder.name}-after-{last_step}", last_step)
    printed = run_in_pool(pool, script, *flags, f"--run-name {copy.name}", runs=copy.parent)
    differing = sorted({name for name, _ in digests(folder).items() ^ digests(copy).items()})
    assert not differing
    assert not list((copy / "checkpoints").glob(".*")), "half-made checkpoints are left"
    return printed
