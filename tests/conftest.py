"""Shared by all tests: the data folder, one thread, and the pools of ranks for everything distributed."""

import asyncio
import contextlib
import fcntl
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import support.interpreter  # noqa: F401  before any test imports triton
from minirl.episodes import runner
from minirl.episodes.event_loop import event_loop
from minirl.rewards.reward_workers import WorkerReward
from minirl.run.embedded_model import embedded_model_folder
from support.rank_pool import RankPool, wait_for_replies

torch.set_num_threads(1)
wait_for_replies()


@pytest.fixture(scope="session", autouse=True)
def nothing_in_flight() -> Iterator[None]:
    """End the rollouts that tests left in flight: asyncio warns of each at the end of the process."""
    yield
    for task in asyncio.all_tasks(event_loop()):
        task.cancel()
    event_loop().run_slice()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random weights do not depend on the tests before: a rare draw exceeds tolerances."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder that MINIRL_TEST_DATA names; tests that need it skip without it."""
    if "MINIRL_TEST_DATA" not in os.environ:
        pytest.skip("MINIRL_TEST_DATA is not set")
    return Path(os.environ["MINIRL_TEST_DATA"])


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A process group of one, in a separate process."""
    pool = RankPool(1)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """A process group of two."""
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """A process group of four, among which rows do not divide evenly."""
    pool = RankPool(4)
    yield pool
    pool.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of functions that reply, which stands still until its `monotonic` is another."""
    stopped = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(runner, "time", stopped)
    return stopped


@pytest.fixture
def load_reward(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., WorkerReward]]:
    """`load_reward(name, ...)`: a function of the test file's SOURCE in its processes, which are killed at the end."""
    (tmp_path / "mine.py").write_text(request.module.SOURCE)
    loaded = []

    def load(name: str, **options: Any) -> WorkerReward:
        loaded.append(WorkerReward(f"{tmp_path}/mine.py:{name}", **options))
        return loaded[-1]

    yield load
    for workers in loaded:
        workers.stop()


def _make_embedded_model(rank: int, runs: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        return str(embedded_model_folder(Path(runs)))


@pytest.fixture(scope="session")
def embedded_model(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the embedded model, which takes seconds to make: once for all workers of xdist."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / "embedded.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder,) = one_rank.run(_make_embedded_model, str(root / "embedded"))
    return Path(folder)


@pytest.fixture(scope="module")
def runs(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs for the module, with the embedded model in it."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(embedded_model, folder / embedded_model.name)
    return folder
