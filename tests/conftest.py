"""Shared by all tests: the data folder, one thread, and one pool of two ranks for everything distributed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.rank_pool import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder that MINIRL_TEST_DATA names; tests that need it skip without it."""
    if "MINIRL_TEST_DATA" not in os.environ:
        pytest.skip("MINIRL_TEST_DATA is not set")
    return Path(os.environ["MINIRL_TEST_DATA"])


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A process group of one, in a process of its own."""
    pool = RankPool(1)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """A process group of two."""
    pool = RankPool(2)
    yield pool
    pool.stop()
