"""The results that a resumed run must repeat, and runs as a kill leaves them."""

import hashlib
import json
import shutil
from pathlib import Path

from support.scripts import untimed


def digests(folder: Path) -> dict[str, str]:
    """Digests of all that must be equal: tensor files, state, the script's memory, rollouts, numbers except times."""
    files = [*(folder / "checkpoints").rglob("*.safetensors"), *(folder / "rollouts").iterdir()]
    files += (folder / "checkpoints").rglob("resume/**/*.json")
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    for path in (folder / "checkpoints").glob("*/manifest.json"):
        found[f"{path.parent.name} state"] = json.dumps(json.loads(path.read_text())["state"]).encode()
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        found[f"metrics {line['step']}"] = json.dumps(untimed(line)).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def interrupted_copy(folder: Path, name: str, last_step: int) -> Path:
    """The run as a kill leaves it some time after the checkpoint of `last_step` (0: before the first)."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    for path in (copy / "checkpoints").iterdir():
        if int(path.name) > last_step:
            shutil.rmtree(path)
    (copy / "checkpoints" / f".tmp-{last_step + 1:06d}-0").mkdir()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "reward/me')
    return copy
