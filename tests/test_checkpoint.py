"""Checkpoints are complete at every moment and exact on any number of ranks. `benchmarks/kill_jobs.py` kills jobs."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

from minirl.errors import InputError, SaveError
from minirl.model.families import config_from_dict
from minirl.run.checkpoint import Checkpoints, checkpoints_in
from minirl.run.progress import Progress
from minirl.run.run_folder import RunFolder, lock_run_folder
from support.models import RAW_CONFIG, adamw, full_tensor, make_folder, sharded
from support.processes import file_limit
from support.resuming import as_text


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Run as the only rank, without a process group."""
    monkeypatch.setattr(dist, "barrier", lambda: None)


class TinyModel:
    """Stand-in for a `ShardedModel` on one rank, whose tensors contain the step number."""

    def __init__(self):
        self.module = dataclasses.make_dataclass("Module", ["config"])(config_from_dict(RAW_CONFIG))
        self.masters = {"weight": torch.zeros(5000)}

    def full_weights(self, *, keep: bool) -> dict[str, torch.Tensor]:
        return self.masters

    def state_tensors(self, optimizer: None) -> dict[str, torch.Tensor]:
        return {"masters.weight": self.masters["weight"], "exp_avg.weight": self.masters["weight"] + 1}

    def load_state(self, optimizer: None, saved: list[dict[str, torch.Tensor]], *, origin: str) -> None:
        (self.state,) = saved


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Set and return the folder of all runs."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def open_run_folder(name: str) -> RunFolder:
    """Lock a run folder and stay in its setup block."""
    return ExitStack().enter_context(lock_run_folder(name))


class Saver:
    """An open run with its `Checkpoints`. The model's initial folder is deleted before the first save (row 51)."""

    def __init__(self, *, keep: int = 2, names: tuple[str, ...] = ("policy",)):
        self.run = open_run_folder("a")
        self.model = TinyModel()
        models = dict.fromkeys(names, (self.model, None))
        with tempfile.TemporaryDirectory() as source:
            self.model.folder = Path(source)
            (self.model.folder / "config.json").write_text(json.dumps(RAW_CONFIG))
            (self.model.folder / "tokenizer.json").write_text("{}")
            self.checkpoints = Checkpoints(self.run.path, models, keep=keep)

    def save(self, step: int, score: float | None = None, **remembered) -> None:
        self.model.masters["weight"].fill_(step)
        evaluated = {} if score is None else {"eval/reward": score}
        self.checkpoints.save(vars(Progress(step=step, evaluated=evaluated, **remembered)))


@contextmanager
def saving(**options) -> Iterator[Saver]:
    """Make a `Saver` whose run ends with the block."""
    saver = Saver(**options)
    try:
        yield saver
    finally:
        saver.run.lock.close()  # as the exit of a process does


def save_steps(steps, scores=(), **options) -> Path:
    """Save checkpoints after these steps; return the run folder."""
    with saving(**options) as saver:
        for step, score in itertools.zip_longest(steps, scores):
            saver.save(step, score)
    return saver.run.path


def resumed_step(**options) -> int:
    """Resume the run and return the checkpoint's step, which every tensor must contain."""
    with saving(**options) as saver:
        checkpoint = saver.run.checkpoint
        assert checkpoint is not None
        assert not list(checkpoint.parent.glob(".*")), "a killed save left files behind"
        step = saver.checkpoints.restore(checkpoint)["step"]
    assert checkpoint.name == f"{step:06d}"
    weights = load_file(checkpoint / "model.safetensors")
    values = {name: set(x.tolist()) for name, x in (saver.model.state | weights).items()}
    assert values == {"masters.weight": {step}, "exp_avg.weight": {step + 1}, "weight": {step}}
    return step


def fork(function) -> ForkProcess:
    """Start a forked process that runs a function."""
    process = ForkProcess(target=function)
    process.start()
    return process


FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def die_before_operation(k: int) -> None:
    """Install an audit hook that kills this process before its k-th file operation."""
    numbers = itertools.count(1)

    def hook(event, args):
        is_read = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in FILE_EVENTS and not is_read and next(numbers) == k:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_row_02_a_kill_before_each_file_operation_loses_nothing(tmp_path, monkeypatch):
    """Saving step 3 deletes step 1. Wherever the kill hits, step 2 or 3 is complete and no partial files remain."""
    save_steps([1, 2])
    newest = []
    is_killed = True
    while is_killed:
        root = tmp_path / f"runs{len(newest)}"
        shutil.copytree(tmp_path / "runs", root)
        monkeypatch.setenv("MINIRL_RUNS", str(root))

        def save_third():
            with saving() as saver:
                die_before_operation(len(newest) + 1)
                saver.save(3)

        process = fork(save_third)
        process.join()
        is_killed = process.exitcode == -signal.SIGKILL
        newest.append(resumed_step())
        files = {path.name: len(list(path.rglob("*"))) for path in checkpoints_in(root / "a")}
        assert len(set(files.values())) == 1, "a partial checkpoint is left"
    assert process.exitcode == 0
    assert newest == sorted(newest)
    assert set(newest) == {2, 3}
    assert [*files] == ["000002", "000003"]


def rank_state(
    rank: int, folder: Path, run: Path, checkpoint: Path | None, steps: int, options: dict
) -> dict[str, str]:
    """Restore, train a few steps and save; return the full tensors of model and optimizer as text."""
    model = sharded(folder, **options)
    optimizer = adamw(model, 0.1)
    checkpoints = Checkpoints(run, {"policy": (model, optimizer)}, keep=0)
    progress = Progress(**(checkpoints.restore(checkpoint) if checkpoint else {}))
    for _ in range(steps):
        for i, master in enumerate(model.masters.values()):
            master.grad = torch.full_like(master, 0.1 * (i + 1) + progress.step)
        model.step(optimizer, lr=0.01, max_grad_norm=1.0)
        progress.step += 1
    if steps:
        checkpoints.save(vars(progress))
    whole = {f"compute.{name}": weight for name, weight in model.compute_weights.items()}
    for name, master in model.masters.items():
        whole[f"masters.{name}"] = master
        whole |= {f"{key}.{name}": value for key, value in optimizer.state[master].items()}
    return {name: as_text(full_tensor(x).detach()) for name, x in whole.items()}


ON_HOST = {"offload_optimizer": True}


@pytest.mark.parametrize(
    ("first", "second", "options", "restored_with"),
    [
        ("one_rank", "two_ranks", {}, ON_HOST),
        ("two_ranks", "one_rank", ON_HOST, {}),
    ],
)
def test_a_checkpoint_is_restored_bit_for_bit_on_any_number_of_ranks_wherever_its_optimizer_was(
    request, tmp_path, first, second, options, restored_with
):
    """Fault 11: masters, moments, step counts and compute weights are restored; training continues as if uninterrupted.

    Pitfall 47.
    """
    model_folder = make_folder(tmp_path / "tiny", RAW_CONFIG)
    ranks = request.getfixturevalue(first)
    saved, *_ = ranks.run(rank_state, model_folder, tmp_path, None, 3, options)
    checkpoint = tmp_path / "checkpoints" / "000003"
    assert any(name.startswith("exp_avg_sq.") for name in saved)
    others = request.getfixturevalue(second)
    for restored in others.run(rank_state, model_folder, tmp_path, checkpoint, 0, restored_with):
        assert restored == saved
    uninterrupted, *_ = ranks.run(rank_state, model_folder, tmp_path / "whole", None, 5, options)
    resumed, *_ = ranks.run(rank_state, model_folder, tmp_path, checkpoint, 2, restored_with)
    assert resumed == uninterrupted


def test_row_08_a_checkpoint_that_cannot_be_read_is_refused_by_name():
    """Covers a truncated file, another format and other models. If deleted, the previous checkpoint is used."""
    path = save_steps([1, 2]) / "checkpoints" / "000002" / "resume" / "progress.pt"
    for damaged in (path.read_bytes()[:-100], b"PK\3\4 no archive"):
        path.write_bytes(damaged)
        with pytest.raises(
            InputError, match=rf"{path} cannot be read .*delete {path.parent.parent} to resume"
        ):
            resumed_step()
    shutil.rmtree(path.parent.parent)
    with pytest.raises(
        InputError, match=r"has the models \['policy'\], but this script has \['policy', 'value'\]"
    ):
        resumed_step(names=("policy", "value"))
    assert resumed_step() == 1


def test_row_14_two_runs_never_share_a_folder():
    """A second start is rejected. When the first process exits, even by SIGKILL, its lock is released."""
    held = open_run_folder("a")
    with pytest.raises(InputError, match="/a: another run is using it"):
        open_run_folder("a")
    held.lock.close()
    fork(lambda: (open_run_folder("a"), os.kill(os.getpid(), signal.SIGKILL))).join()
    open_run_folder("a").lock.close()


def test_rows_07_and_47_a_folder_that_cannot_be_a_runs_is_refused_by_name(runs, monkeypatch):
    """Covers a file, a foreign folder, a folder that even root cannot create, and a name that is a path.

    Nothing changes in the folder of runs, or next to it.
    """
    (runs / "file").touch()
    (runs / "taken").mkdir()
    (runs / "taken" / "metrics.jsonl").touch()
    before = sorted(runs.parent.rglob("*"))
    for root, name, said in (
        *((runs, path, "plain name") for path in ("..", "", "/tmp/x", "a/b", ".hidden", "a\0b", "-x")),
        (runs, "file", f"{runs}/file: File exists; see --run-name"),
        (runs, "taken", f"{runs}/taken is not a run folder"),
        (runs / "file", "a", f"{runs}/file/a: Not a directory; see .*MINIRL_RUNS"),
    ):
        monkeypatch.setenv("MINIRL_RUNS", str(root))
        with pytest.raises(InputError, match=said):
            open_run_folder(name)
    assert sorted(runs.parent.rglob("*")) == before


@contextmanager
def without_folder(path: Path) -> Iterator[None]:
    """Replace the checkpoints folder with a file, in which even root cannot write."""
    aside = path.rename(path.with_name("aside"))
    path.touch()
    yield
    path.unlink()
    aside.rename(path)


@pytest.mark.parametrize(
    ("num_bytes", "cause"),
    [
        (10_000, r"model.safetensors: .*File too large \(os error 27\)"),
        (30_000, "0-of-1.pt: File too large"),
        (60_000, "progress.pt: File too large"),
        (None, "checkpoints/.*: Not a directory"),
    ],
)
def test_row_06_a_full_disk_or_unwritable_folder_ends_the_run_with_path_and_cause_and_loses_no_checkpoint(
    num_bytes, cause
):
    """The next start finds the old checkpoint and can save again."""
    with saving() as saver:
        saver.save(1)
        refusing = file_limit(num_bytes) if num_bytes else without_folder(saver.run.path / "checkpoints")
        said = rf"^{saver.run.path}/.*{cause} \([\d,]+ bytes are free\); .* step 2 is not saved"
        with refusing, pytest.raises(SaveError, match=said):
            saver.save(2, extra={"large": torch.zeros(20_000)})
    assert resumed_step() == 1
    save_steps([2])
    assert resumed_step() == 2


@pytest.mark.parametrize(
    ("keep", "scores", "left"),
    [
        (0, [], [1, 2, 3, 4, 5]),
        (1, [0.1, 0.9, 0.2, None, 0.3], [2, 5]),
        (2, [0.9, 0.5, None, 0.9, 0.1], [4, 5]),
    ],
)
def test_the_newest_and_the_best_checkpoints_stay(keep, scores, left):
    """Steps are compared as numbers, even beyond six digits. Of equal scores, the later stays; `keep` 0 keeps all."""
    folder = save_steps(range(999_997, 1_000_002), keep=keep, scores=scores)
    assert [int(path.name) - 999_996 for path in checkpoints_in(folder)] == left
    assert resumed_step() == 1_000_001


def test_row_08_an_unreadable_old_checkpoint_is_kept_and_does_not_fail_a_save():
    """A user may delete `resume/` to save space."""
    folder = save_steps([1])
    shutil.rmtree(folder / "checkpoints" / "000001" / "resume")
    save_steps([2, 3], keep=1)
    assert [path.name for path in checkpoints_in(folder)] == ["000001", "000003"]


def test_a_scripts_own_state_is_restored_exactly_as_it_was_saved(tmp_path):
    """Types, dtypes and bits stay, NaN included, even if the script modifies the values later. Other values are
    rejected.

    Fault 48: only the owner can read the run folder, whatever the umask, and resume/ even after a copy.
    """
    tensors = [torch.tensor([True]), torch.arange(6).view(2, 3).T, torch.tensor([torch.nan, -0.0]).bfloat16()]
    extra = {"": None, 'quo"ted': [True, 1, (1.0, -0.0), "ä"], "nested": {"x": tensors, 3: 2**200}}
    expected = as_text(extra)
    before = os.umask(0)
    with saving() as saver:
        saver.save(1, extra=extra)
        extra["nested"].clear()
        copied = shutil.copytree(saver.run.path / "checkpoints" / "000001", tmp_path / "copied")
        progress = saver.checkpoints.restore(copied)
    os.umask(before)
    assert as_text(progress["extra"]) == expected
    files = (saver.run.path, copied / "resume", copied, copied / "model.safetensors")
    assert [path.stat().st_mode & 0o777 for path in files] == [0o700, 0o700, 0o777, 0o666]
    for value in (np.float64(1), len):
        with (
            saving() as saver,
            pytest.raises(InputError, match=r"^progress.extra: use only numbers, strings"),
        ):
            saver.save(2, extra={"fine": 1, "level": [0, {"x": value}]})
    differing = mock.patch("minirl.run.checkpoint.gather_objects", lambda own: [own, f"{own} of rank 1"])
    with (
        saving() as saver,
        differing,
        pytest.raises(InputError, match=r"^progress.extra: differs between ranks"),
    ):
        saver.save(2, extra={"level": 1})
    assert resumed_step() == 1
