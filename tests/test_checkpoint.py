"""Checkpoints: whole at every moment, exact on any number of ranks, and never trusted without their digests.

The fast and the point layer of the kill test are here; whole jobs are killed by `benchmarks/kill_jobs.py`.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from minirl.errors import InputError, SaveError
from minirl.files import durable, value_files
from minirl.files.value_files import read_values
from minirl.model.families import config_from_dict
from minirl.run import checkpoint as checkpoint_module
from minirl.run.checkpoint import IN_FLIGHT, Checkpoints, copy_remembered, own_records, prune, stored_tensors
from minirl.run.run_folder import (
    RunFolder,
    checkpoints_in,
    open_run_folder,
    read_manifest,
)
from minirl.training.sharded_model import ShardedModel
from support.marks import slow
from support.models import RAW_CONFIG, adamw, make_folder, sharded

CPU = torch.device("cpu")
FLAGS = {"lr": 0.1, "data": None, "save_every": 2}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Rank 0 of 1 without a process group."""

    def gather(values, mine):
        values[:] = [mine] * len(values)

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values: None)


class TinyModel:
    """Stands for a `ShardedModel` of one rank: its tensors tell the step."""

    def __init__(self):
        self.module = dataclasses.make_dataclass("Module", ["config"])(config_from_dict(RAW_CONFIG))
        self.set(0)

    def set(self, step: int) -> None:
        self.compute_weights = {"weight": torch.full((5000,), float(step))}

    def whole_weights(self, *, keep: bool) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in self.compute_weights.items()}

    def state_tensors(self, optimizer: None) -> dict[str, torch.Tensor]:
        return {
            f"{kind}.weight": self.compute_weights["weight"] + i
            for i, kind in enumerate(("masters", "exp_avg"))
        }


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """The folder of a tiny random model."""
    return make_folder(tmp_path_factory.mktemp("model") / "tiny", RAW_CONFIG)


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """The folder of the runs."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def source(tmp_path):
    """The folder that config and tokenizer come from, beside that of the runs."""
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(RAW_CONFIG))
    (path / "tokenizer.json").write_text("{}")
    return path


def open_run() -> RunFolder:
    return open_run_folder("a", FLAGS).create()


@contextmanager
def saving(keep: int = 2) -> Iterator[tuple[Path, TinyModel, Checkpoints]]:
    """A run's folder, its model and what saves it; the folder is let go of at the end of the block."""
    run, model = open_run(), TinyModel()
    durable.replace_file(run.path / "args.json", json.dumps({"flags": FLAGS}))
    sources = {"policy": run.path.parent.with_name("source")}
    yield run.path, model, Checkpoints(run, {"policy": (model, None)}, sources=sources, keep=keep)
    run.lock.close()  # as the end of the process does


def save_steps(steps, keep: int = 0, scores=(), **remembered) -> Path:
    """A run folder with checkpoints after these steps."""
    with saving(keep) as (path, model, checkpoints):
        for step, score in itertools.zip_longest(steps, scores):
            model.set(step)
            checkpoints.save({"step": step}, score=score, **remembered)
        checkpoints.finish()
    return path


def assert_is_whole(path: Path) -> int:
    """Every tensor tells the step of the manifest, which has the digests of the files that are there, and no others."""
    manifest = read_manifest(path)
    step = manifest["state"]["step"]
    assert path.name == f"{step:06d}"
    tensors = stored_tensors([path / "resume" / "policy-0-of-1.safetensors", path / "model.safetensors"])
    values = {name: set(x[:].tolist()) for name, x in tensors.items()}
    assert values == {"masters.weight": {step}, "exp_avg.weight": {step + 1}, "weight": {step}}
    digests = {}
    for file in path.rglob("*"):
        if file.is_file() and file.name != "manifest.json":
            content = file.read_bytes()
            digest = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            digests[str(file.relative_to(path))] = digest
    assert digests == manifest["files"]
    return step


def newest_step() -> int:
    """Open the run like a new start, and check the step from which it continues; 0 without a checkpoint."""
    run = open_run()
    run.lock.close()
    assert not list((run.path / "checkpoints").glob(".*")), "left-overs of a killed save"
    return assert_is_whole(run.checkpoint) if run.checkpoint else 0


def fork(function) -> ForkProcess:
    """Run a function in a forked process, which ends with it."""
    process = ForkProcess(target=function)
    process.start()
    return process


def die_before_line(n: int) -> None:
    """Kill this process before the n-th line of Python that it runs from here on, in any thread."""
    lines = itertools.count(1)

    def trace(frame, event, arg):
        if event == "line" and next(lines) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [10, 200])
def test_row_02_random_kills_leave_a_checkpoint_that_is_whole_and_never_an_older_one(num_kills):
    """Fast layer: a process that saves back to back is killed at random; the newest checkpoint verifies each time.

    The moment is a number of lines, which no other load on the machine moves. Row 2: at most keep + 1 folders, no
    half-made one after the next start, no step backwards.
    """
    newest, num_inside = 1, 0
    folder = save_steps([newest]) / "checkpoints"  # here, so that no forked process imports for it
    for last_line in random.Random(0).choices(range(1, 12_000), k=num_kills):

        def save_for_ever(first=newest + 1, last_line=last_line):
            with saving() as (_, model, checkpoints):
                die_before_line(last_line)
                for step in itertools.count(first):
                    model.set(step)
                    checkpoints.save({"step": step})

        saver = fork(save_for_ever)
        saver.join()
        assert saver.exitcode == -signal.SIGKILL
        num_inside += any(folder.glob(".tmp-*"))
        step = newest_step()
        assert step >= newest
        newest = step
        assert len(list(folder.iterdir())) <= 3
    assert newest > num_kills // 10, "hardly any save came to its end"
    assert num_inside > num_kills // 4, "hardly any kill met a save"


FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def die_before_operation(k: int) -> list[str]:
    """An audit hook that kills this process before its k-th file operation; the operations so far."""
    seen: list[str] = []

    def hook(event, args):
        is_read = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in FILE_EVENTS and not is_read:
            seen.append(event)
            if len(seen) == k:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return seen


def test_row_02_a_kill_before_each_file_operation_loses_nothing(tmp_path, monkeypatch):
    """Point layer, row 2: the save of step 3 deletes step 1; whichever operation is the last, 2 or 3 is whole."""
    save_steps([1, 2], keep=2)
    newest = []
    operations = tmp_path / "operations"
    for k in itertools.count(1):
        root = tmp_path / f"runs{k}"
        shutil.copytree(tmp_path / "runs", root)
        monkeypatch.setenv("MINIRL_RUNS", str(root))

        def save_third(k=k):
            with saving() as (_, model, checkpoints):
                model.set(3)
                seen = die_before_operation(k)
                checkpoints.save({"step": 3})
                checkpoints.finish()
                operations.write_text(" ".join(seen))

        fork(save_third).join()
        newest.append(newest_step())
        names = [path.name for path in checkpoints_in(root / "a")]
        assert len(names) <= 3
        if operations.exists() and operations.read_text():
            break
    assert k > 10
    assert {"open", "os.rename", "os.mkdir", "os.rmdir"} <= set(operations.read_text().split())
    assert newest == sorted(newest)
    assert set(newest) == {2, 3}
    assert names == ["000002", "000003"]


def sharded_saver(
    folder: Path, run: Path, checkpoint: Path | None, **options
) -> tuple[ShardedModel, torch.optim.Optimizer, Checkpoints]:
    """This rank's part of a model, its optimizer, and what saves both."""
    model = sharded(folder, **options)
    optimizer = adamw(model, 0.1)
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    handle = RunFolder(run, {}, checkpoint, "token", None)
    checkpoints = Checkpoints(handle, {"policy": (model, optimizer)}, sources={"policy": folder}, keep=0)
    return model, optimizer, checkpoints


def rank_state(
    rank: int, folder: Path, run: Path, checkpoint: Path | None, steps: int, options: dict
) -> dict[str, list[float]]:
    """Restore, train a few steps, save; the whole tensors of the model and its optimizer, gathered."""
    model, optimizer, checkpoints = sharded_saver(folder, run, checkpoint, **options)
    state = checkpoints.restore(9) or {"step": 0}
    for step in range(state["step"], state["step"] + steps):
        for i, master in enumerate(model.masters.values()):
            master.grad = torch.full_like(master, 0.1 * (i + 1) + step)
        model.step(optimizer, lr=0.01, max_grad_norm=1.0)
    if steps:
        checkpoints.save({"step": state["step"] + steps})
        checkpoints.finish()
    whole = {f"masters.{name}": master.full_tensor() for name, master in model.masters.items()}
    for name, master in model.masters.items():
        for key, value in optimizer.state[master].items():
            whole[f"{key}.{name}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    whole |= {f"compute.{name}": weight for name, weight in model.compute_weights.items()}
    return {name: x.detach().flatten().tolist() for name, x in whole.items()}


ON_HOST = {"offload_optimizer": True}
OF_A_NODE = {"num_shards": 1}  # as of two nodes, of which one saves


@pytest.mark.parametrize(
    ("first", "second", "options", "restored_with"),
    [
        ("one_rank", "two_ranks", {}, {}),
        slow("two_ranks", "one_rank", OF_A_NODE, {}),
        slow("two_ranks", "one_rank", {}, {}),
        ("two_ranks", "two_ranks", OF_A_NODE, OF_A_NODE),
        ("one_rank", "one_rank", ON_HOST, {}),
        ("two_ranks", "two_ranks", {}, ON_HOST),
    ],
)
def test_a_checkpoint_is_restored_bit_for_bit_on_any_number_of_ranks_wherever_its_optimizer_was(
    request, tmp_path, model_folder, first, second, options, restored_with
):
    """Fault 11: masters, moments, step counts and compute weights. From there, training goes on as if never stopped.

    Pitfall 47.
    """
    ranks = request.getfixturevalue(first)
    saved, *_ = ranks.run(rank_state, model_folder, tmp_path, None, 3, options)
    checkpoint = tmp_path / "checkpoints" / "000003"
    assert any(max(map(abs, values)) > 0 for name, values in saved.items() if name.startswith("exp_avg_sq."))
    others = request.getfixturevalue(second)
    for restored in others.run(rank_state, model_folder, tmp_path, checkpoint, 0, restored_with):
        assert restored == saved
    uninterrupted, *_ = ranks.run(rank_state, model_folder, tmp_path / "whole", None, 5, options)
    if first == second:
        options = restored_with
    resumed, *_ = ranks.run(rank_state, model_folder, tmp_path, checkpoint, 2, options)
    assert resumed == uninterrupted


DAMAGES = [
    ("model.safetensors", "cut"),
    ("config.json", "missing"),
    ("resume/policy-0-of-1.safetensors", "one bit"),
    ("resume/extra.json", "cut"),
    ("resume/extra.safetensors", "one bit"),
    ("resume/records/0-of-1.json", "missing"),
    ("manifest.json", "missing"),
    ("manifest.json", "{"),
    ("manifest.json", "[]"),
    ("manifest.json", '{"format": 3}'),
    ("manifest.json", '{"format": 3, "files": 3, "state": {"step": 2}, "world_size": 1}'),
    ("manifest.json", '{"format": 3, "files": {}, "state": {}, "world_size": 1}'),
    ("manifest.json", '{"format": 3, "files": {}, "state": [], "world_size": 1}'),
    ("manifest.json", '{"format": 3, "files": {}, "state": {"step": 2}, "world_size": null}'),
]


class TestWhatIsGoneOnFrom:
    """Which checkpoint a start takes up."""

    @pytest.mark.parametrize(("name", "damage"), DAMAGES)
    def test_rows_08_and_09_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
        self, capsys, name, damage
    ):
        """The file is named, the folder kept aside under another name. No manifest is guessed at."""
        remembered = {"extra": every_value(), "records": {"replay": [1]}}
        folder = save_steps([1, 2, 3], **remembered) / "checkpoints"
        damage_file(folder / "000003" / name, damage)
        assert newest_step() == 2
        assert f"{folder}/000003: {name}" in capsys.readouterr().out
        assert len(list(folder.glob("000003-damaged-*"))) == 1
        assert newest_step() == 2
        assert "warning" not in capsys.readouterr().out

    def test_row_52_a_checkpoint_of_weights_that_are_not_finite_is_damaged(self, capsys):
        """Its digests are right: it was saved like this."""
        save_steps([2])
        with saving() as (_, model, checkpoints):
            model.compute_weights["weight"][7] = torch.nan
            checkpoints.save({"step": 3})
            checkpoints.finish()
        assert newest_step() == 2
        assert "has values that are not finite in" in capsys.readouterr().out

    def test_row_10_all_damaged_is_an_error_that_lists_each(self):
        """No fresh start, and nothing is renamed or deleted."""
        folder = save_steps([1, 2])
        for step in (1, 2):
            damage_file(folder / "checkpoints" / f"00000{step}" / "model.safetensors", "cut")
        for _ in range(2):
            with pytest.raises(InputError, match=r"000002.*model\.safetensors.*000001.*model\.safetensors"):
                open_run()
            assert len(checkpoints_in(folder)) == 2

    def test_row_11_a_later_format_is_refused(self):
        """Neither read nor taken for damage."""
        path = save_steps([1, 2]) / "checkpoints" / "000002" / "manifest.json"
        path.write_text(path.read_text().replace('"format": 3', '"format": 4'))
        with pytest.raises(InputError, match="has format 4, this version of minirl reads 3; resume"):
            open_run()

    def test_row_13_other_flags_are_listed_and_refused_without_force(self, runs, capsys):
        """Flags that change no number may differ."""
        save_steps([1])
        with pytest.raises(InputError, match=r"--lr 0.2 \(was 0.1\).*--resume force"):
            open_run_folder("a", FLAGS | {"lr": 0.2})
        open_run_folder("a", FLAGS | {"save_every": 5, "reward_workers": 4}).lock.close()
        run = open_run_folder("a", FLAGS | {"lr": 0.2}, resume="force")
        assert run.checkpoint.name == "000001"
        assert "--lr 0.2 (was 0.1)" in capsys.readouterr().out
        run.lock.close()
        with pytest.raises(InputError, match="choose another --run-name"):
            open_run_folder("a", FLAGS, resume="never")
        (runs / "a" / "args.json").unlink()
        with pytest.raises(InputError, match=r"no args\.json to compare the flags with.*--resume force"):
            open_run_folder("a", FLAGS)
        open_run_folder("a", FLAGS, resume="force").lock.close()

    def test_row_14_a_folder_in_use_is_refused_with_its_holder(self):
        """The second start names process and host; when the first is gone, its lock is."""
        held = open_run()
        with pytest.raises(InputError, match=f"in use by process {os.getpid()} on "):
            open_run()
        held.lock.close()
        fork(lambda: (open_run(), os.kill(os.getpid(), signal.SIGKILL))).join()
        open_run().lock.close()

    def test_row_14_of_runs_that_begin_with_one_name_at_once_one_gets_it(self, runs):
        """The others are refused, whether it has written its flags or not."""
        begun = [open_run_folder("now", FLAGS) for _ in range(8)]

        def create(run) -> RunFolder | None:
            with contextlib.suppress(InputError):
                return run.create()

        with ThreadPoolExecutor(8) as pool:
            (created,) = filter(None, pool.map(create, begun))
        (created.path / "args.json").touch()
        created.lock.close()
        with pytest.raises(InputError, match="another run has just taken this name"):
            begun[0].create()

    def test_row_47_a_name_that_is_a_path_is_refused(self, tmp_path, runs, source):
        """Nothing is made outside of the runs' folder, or in it."""
        for name in ("..", ".", "", "../x", "/tmp/x", "a/b", ".hidden", "a\0b", "-x", "a b", "ä/.."):
            with pytest.raises(InputError, match="plain name"):
                open_run_folder(name, FLAGS)
        assert set(tmp_path.iterdir()) == {runs, source}
        assert not list(runs.iterdir())

    def test_row_07_a_folder_that_is_a_file_is_named(self, runs, monkeypatch):
        """So is one that may not be written to."""
        (runs / "a").touch()
        with pytest.raises(InputError, match=f"{runs}/a.*--run-name"):
            open_run_folder("a", FLAGS)
        (runs / "b").mkdir()
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(InputError, match=f"{runs}/b.*cannot be written"):
            open_run_folder("b", FLAGS)

    def test_row_47_a_folder_of_something_else_is_refused(self, runs):
        """Existing files do not change."""
        (runs / "taken").mkdir()
        (runs / "taken" / "metrics.jsonl").touch()
        with pytest.raises(InputError, match="it is not a run"):
            open_run_folder("taken", FLAGS)
        assert [path.name for path in runs.rglob("*")] == ["taken", "metrics.jsonl"]

    def test_a_run_killed_before_its_first_checkpoint_says_that_it_starts_again(self, capsys):
        """Not a silent restart."""
        with saving():
            pass
        assert newest_step() == 0
        assert "no checkpoint yet: starting from the first step" in capsys.readouterr().out


def damage_file(path: Path, damage: str) -> None:
    """damage: "cut", "one bit", "missing", or the text that replaces the file's."""
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "one bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_text(damage)


def fail_to_write(part: str):
    """A `write_file` on a disk that is full when a file with this part in its name comes."""
    write_file = durable.write_file

    def write_or_fail(path, chunks):
        if part in path.name:
            raise OSError(28, "No space left on device", str(path))
        return write_file(path, chunks)

    return write_or_fail


def test_row_06_a_failed_save_is_said_and_the_run_goes_on(monkeypatch, capsys):
    """The message names path and free bytes; the old checkpoint and the next save are good; no left-over stays."""
    with saving(keep=0) as (folder, _, checkpoints):
        checkpoints.save({"step": 1})
        checkpoints._wait()
        monkeypatch.setattr(durable, "write_file", fail_to_write("model.safetensors"))
        checkpoints.save({"step": 2})
        checkpoints._wait()
        printed = capsys.readouterr().out
        assert "000002 was not saved, the run continues without it" in printed
        assert "model.safetensors: No space left" in printed
        assert "bytes are free" in printed
        checkpoints.save({"step": 3})
        with pytest.raises(SaveError, match=r"model\.safetensors"):
            checkpoints.finish()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000001"]


def failing_save(rank: int, folder: Path, run: Path) -> list[str]:
    """A save in which only rank 1 fails, and one after it that is good."""
    *_, checkpoints = sharded_saver(folder, run, None)
    write_file = durable.write_file
    durable.write_file = fail_to_write("-1-of-2")
    checkpoints.save({"step": 1})
    error = checkpoints._wait()
    durable.write_file = write_file
    checkpoints.save({"step": 2})
    return [str(error), str(checkpoints.finish())]


def test_row_06_nodes_that_do_not_share_the_folder_are_told_so(monkeypatch):
    """Rank 0 does not wait for ever for files that it cannot see."""
    monkeypatch.setattr(checkpoint_module, "SHARED_S", 0.1)
    with saving() as (*_, checkpoints):
        monkeypatch.setenv("WORLD_SIZE", "2")
        checkpoints.save({"step": 1})
        monkeypatch.setenv("WORLD_SIZE", "1")
        with pytest.raises(SaveError, match="does not appear here; do all nodes share"):
            checkpoints.finish()


def test_row_06_a_save_that_fails_on_one_rank_fails_on_all(two_ranks, model_folder, tmp_path):
    """Every rank knows why, none waits for the other, and the next save is good."""
    for error, saved in two_ranks.run(failing_save, model_folder, tmp_path):
        assert "policy-1-of-2.safetensors: No space left" in error
        assert saved == str(tmp_path / "checkpoints" / "000002")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000002"]


@pytest.mark.parametrize(
    ("keep", "scores", "left"),
    [
        (0, [None] * 5, [1, 2, 3, 4, 5]),
        (2, [None] * 5, [4, 5]),
        (1, [0.1, 0.9, 0.2, None, 0.3], [2, 5]),
        (2, [0.9, 0.5, None, 0.9, 0.1], [4, 5]),
    ],
)
def test_the_newest_and_the_best_checkpoints_stay(keep, scores, left):
    """By their numbers, also beyond six digits. Of equal scores the later one; 0 keeps all."""
    folder = save_steps(range(999_997, 1_000_002), keep=keep, scores=scores)
    for _ in range(2):
        assert [int(path.name) - 999_996 for path in checkpoints_in(folder)] == left
        prune(folder, keep=keep)
    assert newest_step() == 1_000_001


def test_row_52_what_is_no_checkpoint_is_left_alone(capsys):
    """A damaged older one, the user's files and folders with any name: at a resume, and at saves beside them.

    A save that would have the name of such a folder fails instead.
    """
    checkpoints = save_steps([1, 2]) / "checkpoints"
    (checkpoints / "000001" / "manifest.json").write_text("{")
    for name in ("000003", "notes", "7", "20261122", "٠٠٠٠٠٩", "000003-damaged-ab"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "mine.txt").write_text("mine")
    (checkpoints / "8").write_text("mine")
    mine = [path for path in checkpoints.rglob("*") if path.is_file() and "000002" not in path.parts]
    assert newest_step() == 2
    assert "damaged" not in capsys.readouterr().out
    with pytest.raises(SaveError, match="000003"):
        save_steps([3])
    save_steps([4, 5, 9], keep=1)
    assert newest_step() == 9
    assert all(file.is_file() for file in mine)
    assert not any((checkpoints / f"00000{step}").exists() for step in (2, 4, 5))


def test_row_48_what_a_resume_needs_is_readable_by_its_owner_only(tmp_path):
    """The run's folder, whoever may enter its parent, and resume/ of a checkpoint, also where that is copied to."""
    umask = os.umask(0)
    try:
        folder = save_steps([1])
        (tmp_path / "copies").mkdir()
        subprocess.run(["cp", "-r", folder / "checkpoints" / "000001", tmp_path / "copies"], check=True)
    finally:
        os.umask(umask)
    copied = tmp_path / "copies" / "000001"
    assert (copied / "resume" / "policy-0-of-1.safetensors").is_file()
    modes = [path.stat().st_mode & 0o777 for path in (folder, copied / "resume", copied)]
    assert modes == [0o700, 0o700, 0o777]


def test_row_51_a_save_does_not_need_the_folder_that_the_run_began_with(source):
    """Config and tokenizer were read at the start: that folder may be a checkpoint that another run prunes."""
    with saving() as (_, model, checkpoints):
        shutil.rmtree(source)
        model.set(1)
        checkpoints.save({"step": 1})
        saved = checkpoints.finish()
    assert_is_whole(saved)
    assert json.loads((saved / "tokenizer.json").read_text()) == {}


def every_value() -> dict:
    """Values that a script may remember: JSON's, and tensors of every dtype that is kept."""
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    dtypes += (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    tensors = {str(dtype): torch.tensor([[1, 0, 1]]).to(dtype) for dtype in dtypes}
    strange = [torch.tensor(3), torch.empty(0, 2), torch.arange(6).view(2, 3).T, torch.zeros(1).expand(4)]
    strange.append(torch.tensor([math.nan, math.inf, -0.0]))
    plain = {"": None, "../a/b": [True, 1, 1.0, -0.0, math.inf, 0.1, "text \ud800 ä"], "__metadata__": 2**200}
    return {
        "plain": plain,
        "strange": strange,
        "tensors": tensors,
        'quo"ted\n': [[], {}, [{"x": tensors["torch.bool"]}]],
    }


def as_text(value) -> str:
    """Equal for values that are equal to the bit, of the same types."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, dict):
        return repr({key: as_text(item) for key, item in value.items()})
    return repr([as_text(item) for item in value]) if isinstance(value, list) else repr(value)


class TestWhatAScriptRemembers:
    """Its own values in a checkpoint: as they were at the save, or refused."""

    def test_values_come_back_as_they_were_at_the_save(self, runs):
        """Types, dtypes and bits, NaN included, though the script changes them while they are written."""
        values, records = every_value(), {"replay": [{"x": torch.ones(3)}]}
        with saving() as (_, model, checkpoints):
            model.set(1)
            checkpoints.save({"step": 1}, extra=values, records=records)
            values["strange"][0] += 1
            values["plain"].clear()
            records["replay"].append("later")
            checkpoints.finish()
        assert newest_step() == 1
        folder = runs / "a" / "checkpoints" / "000001" / "resume"
        assert as_text(read_values(folder / "extra")) == as_text(every_value())
        expected = {"replay": [{"x": torch.ones(3)}]}
        assert as_text(read_values(folder / "records/0-of-1")) == as_text(expected)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ((1, 2), "hold a builtins.tuple"),
            (np.float64(1), "hold a numpy.float64"),
            (Path("a"), "hold a pathlib"),
            (torch.nn.Parameter(torch.ones(1)), r"hold a torch\.nn\.parameter\.Parameter"),
            ({3: 1}, "the key 3"),
            (torch.ones(1, dtype=torch.complex64), "hold a tensor of torch.complex64"),
            (torch.ones(1).to_sparse(), "hold a tensor of torch.float32, torch.sparse"),
            (10**5000, "an int of over"),
        ],
        ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
    )
    def test_what_would_come_back_as_something_else_is_refused_by_its_place(self, value, message):
        """At the start and in the first step, not by a resume that goes on with something else."""
        with pytest.raises(InputError, match=rf'^extra\["level"\]\[1\]\["x"\]: .*{message}'):
            copy_remembered({"level": [0, {"x": value}]}, {})

    def test_values_without_end_are_refused(self, monkeypatch):
        """A value that contains itself, records that are not a list, and more tensors than a file's header can name."""
        value: list = []
        value.append(value)
        with pytest.raises(InputError, match=r'extra\["a"\]: is over 100 deep, or contains itself'):
            copy_remembered({"a": value}, {})
        with pytest.raises(InputError, match=r'records\["a"\]: must be a list'):
            copy_remembered({}, {"a": torch.ones(3)})
        monkeypatch.setattr(value_files, "_MAX_HEADER_BYTES", 1000)
        with pytest.raises(InputError, match="records: 20 tensors are too many for one file; stack"):
            copy_remembered({}, {"a": [torch.ones(1)] * 20})

    @pytest.mark.parametrize(
        ("num_saved", "num_ranks", "decode_group", "expected"),
        [
            (2, 2, 1, [[0, 1, 2], [10]]),
            (2, 1, 1, [[0, 10, 1, 2]]),
            (1, 2, 1, [[0, 2], [1]]),
            (3, 2, 1, [[0, 20, 2], [10, 1]]),
            (2, 2, 2, [[0, 10, 1, 2], []]),
            (3, 4, 2, [[0, 20, 2], [], [10, 1], []]),
        ],
    )
    def test_row_11_records_are_dealt_out_to_another_number_of_ranks(
        self, monkeypatch, num_saved, num_ranks, decode_group, expected
    ):
        """None is lost or doubled, old ones stay before new ones, and on as many ranks each has its own.

        Rollouts in flight go to the first rank of each decode group, and the script's own records to all ranks.
        """
        all_records = ([0, 1, 2], [10], [20])[:num_saved]
        saved = [{IN_FLIGHT: records, "own": [i]} for i, records in enumerate(all_records)]
        monkeypatch.setattr(checkpoint_module, "world_size", lambda: num_ranks)
        dealt = []
        for r in range(num_ranks):
            monkeypatch.setattr(checkpoint_module, "rank", lambda r=r: r)
            dealt.append(own_records(saved, decode_group))
        assert [records[IN_FLIGHT] for records in dealt] == expected
        assert sorted(number for records in dealt for number in records["own"]) == list(range(num_saved))


def copy_error(rank: int) -> tuple[str, str]:
    """The errors about values that ranks do not share."""
    errors = []
    for extra, records in (
        ({"same": [1, torch.ones(2)], "mine": torch.tensor(rank)}, {}),
        ({}, {"all": [rank], **({"one": []} if rank else {})}),
    ):
        with pytest.raises(InputError) as caught:
            copy_remembered(extra, records)
        errors.append(str(caught.value))
    copy_remembered({"same": [1, torch.ones(2)]}, {"all": [rank]})
    return tuple(errors)


def test_values_for_all_ranks_that_differ_between_them_are_refused(two_ranks):
    """One rank's would be saved, and the resumed run would be another one."""
    for differs, names in two_ranks.run(copy_error):
        assert differs.startswith('extra["mine"]: differs between the ranks')
        assert names == "records: other names on other ranks: [['all'], ['all', 'one']]"


def test_a_half_written_file_never_has_its_name(tmp_path):
    """replace_file: whoever reads sees the old text or the new one, killed at any moment. Fault 2."""
    path = tmp_path / "a.json"
    durable.replace_file(path, "old")

    def write_for_ever():
        while True:
            durable.replace_file(path, "x" * 100_000)

    writer = fork(write_for_ever)
    lengths = {3}
    while 100_000 not in lengths:
        lengths.add(len(path.read_text()))
    lengths |= {len(path.read_text()) for _ in range(2000)}
    writer.kill()
    writer.join()
    lengths.add(len(path.read_text()))
    assert lengths <= {3, 100_000}
