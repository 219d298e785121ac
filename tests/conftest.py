"""Fixtures for all tests: the data folder, and pools of ranks. Each process computes on one thread."""

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
    """Cancel the rollouts that tests left in flight, because asyncio warns about pending tasks at exit."""
    yield
    for task in asyncio.all_tasks(event_loop()):
        task.cancel()
    event_loop().run_slice()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch before each test, because rare random weights exceed the tolerances of tests."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder named by MINIRL_TEST_DATA; skip the test if the variable is unset."""
    if "MINIRL_TEST_DATA" not in os.environ:
        pytest.skip("MINIRL_TEST_DATA is not set")
    return Path(os.environ["MINIRL_TEST_DATA"])


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A pool with one rank, which runs in a separate process."""
    pool = RankPool(1)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """A pool with two ranks."""
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """A pool with four ranks, over which rows do not divide evenly."""
    pool = RankPool(4)
    yield pool
    pool.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the episode runner's clock; time stands still until a test replaces `monotonic`."""
    stopped = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(runner, "time", stopped)
    return stopped


@pytest.fixture
def load_reward(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., WorkerReward]]:
    """Return a function that loads a reward from the test file's SOURCE; worker processes end with the test."""
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
    """Return the bundled model's folder, made once for all xdist workers because this takes seconds."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / "embedded.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder,) = one_rank.run(_make_embedded_model, str(root / "embedded"))
    return Path(folder)


@pytest.fixture(scope="module")
def runs(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the module's runs, which contains the bundled model."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(embedded_model, folder / embedded_model.name)
    return folder
