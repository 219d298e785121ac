"""Digest the results that a resumed run must reproduce, and make run folders as a kill leaves them."""

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
    """Return a text that is equal only for values with equal types and bits."""
    if isinstance(value, Tensor):
        content = value.contiguous().view(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, dict):
        return repr({key: as_text(item) for key, item in value.items()})
    return repr(list(map(as_text, value))) if isinstance(value, list) else repr(value)


def load(path: Path) -> dict[str, Any]:
    """Load a file from a checkpoint's resume/ folder."""
    return torch.load(path, weights_only=True)


def digests(folder: Path) -> dict[str, str]:
    """Return digests of everything that must be equal: checkpoints, rollouts, and metrics except times.

    Cache and decode utilization are left out, because they depend on when users' functions reply.
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
    """Copy the run as a kill would leave it after the checkpoint of `last_step` (0: before the first one)."""
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
    """Resume an `interrupted_copy`, check that it ends bitwise like the original run; return rank 0's output."""
    copy = interrupted_copy(folder, f"{folder.name}-after-{last_step}", last_step)
    printed = run_in_pool(pool, script, *flags, f"--run-name {copy.name}", runs=copy.parent)
    differing = sorted({name for name, _ in digests(folder).items() ^ digests(copy).items()})
    assert not differing
    assert not list((copy / "checkpoints").glob(".*")), "half-made checkpoints are left"
    return printed
