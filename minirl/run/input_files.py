"""The files that a run started with: a copy of the script, and digests to notice later changes."""

import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from minirl.errors import refuse
from minirl.files.durable import file_sha256
from minirl.model.folders import base_model, has_adapters
from minirl.ranks.process_group import broadcast_object
from minirl.run.config import RunConfig, rollout_flags
from minirl.run.run_folder import RunFolder

BASE = "--model"


def input_digests(config: RunConfig, *, base: Path | None = None) -> dict[str, str]:
    """SHA-256 by path of the script and of the existing files of data, rewards and models.

    base: the folder of the model under the run's adapters; its path is there by the name `BASE`.
    """
    functions = [*config.reward, *(spec for _, spec in rollout_flags(config))]
    sources = [spec.rpartition(":")[0] for spec in functions]
    named = [sys.argv[0], config.data, *config.eval_data, *sources]
    paths = [Path(name) for name in named if name]
    further = (getattr(config, name, None) for name in ("value_model", "teacher"))
    models = (config.model, *config.reward_model, *further)
    for folder in (Path(model) for model in (*models, base) if model):
        paths += _model_files(folder)
        if has_adapters(folder):
            paths += _model_files(Path(base_model(folder)))
    files = sorted({path for path in paths if path.is_file()})
    with ThreadPoolExecutor() as pool:
        digests = pool.map(file_sha256, files)
    found = {str(path): digest for path, digest in zip(files, digests, strict=True)}
    return found if base is None else found | {BASE: str(base.resolve())}


def _model_files(folder: Path) -> list[Path]:
    """The files of a local folder that loading a model reads."""
    return [*folder.glob("*.json"), *folder.glob("*.safetensors")]


def check_inputs(
    run: RunFolder, digests: Mapping[str, str], config: RunConfig, *, base: Path | None = None
) -> list[str]:
    """Notes on the files that have changed since the run in this folder last started (collective).

    digests: on rank 0, the present ones. base: the folder of the model under the run's adapters, which its checkpoints
    lack. Raises InputError, on every rank, if the data or this model has changed, or another model is under the
    adapters, because the run would not continue as it began. --resume force accepts the change. An evaluation refuses
    every change.
    """
    changed = broadcast_object(changed_inputs(run.args, digests))
    refuse(
        changed and not config.trains,
        f"{', '.join(changed)}: changed since this evaluation began; restore it, or take another --run-name",
    )
    kinds = {str(Path(name)): "data" for name in (config.data, *config.eval_data) if name}
    if base is not None:
        kinds |= dict.fromkeys([BASE, *map(str, _model_files(base))], "model under the adapters")
    for path in changed:
        kind = kinds.get(path)
        refuse(
            kind and config.resume != "force",
            f"{path}: the {kind} has changed since this run last started; restore it, start a new run with another "
            f"--run-name, or continue with the new {kind} by --resume force",
        )
    return [f"{path} has changed since this run last started" for path in changed]


def changed_inputs(args: Mapping[str, Any], digests: Mapping[str, str]) -> list[str]:
    """The files whose digests differ from those in a run's args."""
    before = args.get("inputs", {})
    return [name for name, digest in digests.items() if before.get(name, digest) != digest]


def keep_script(folder: Path, *, step: int) -> None:
    """Copy the script into the run's folder; a later version goes beside the first, named after the step."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or not script.is_file():
        return
    copies = sorted(folder.glob(f"{script.stem}*.py"))
    content = script.read_bytes()
    if any(copy.read_bytes() == content for copy in copies):
        return
    name = f"{script.stem}-from-step-{step + 1}.py" if copies else script.name
    shutil.copyfile(script, folder / name)
