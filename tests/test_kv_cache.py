"""Accounting of the block pool: the blocks of each sequence and of forks."""

import random
from collections import Counter

import numpy as np
import pytest

from minirl.generation.block_pool import BlockPool
from support.marks import slow

BLOCK = 32


def check_accounting(pool: BlockPool, lengths: dict[int, int]) -> None:
    """Every property that must hold after any operation. lengths: of the sequences, by their rows."""
    held = Counter(block for row in lengths for block in pool.sequence_blocks(row))
    num_blocks = len(pool.ref_counts)
    assert pool.ref_counts.tolist() == [held[b] for b in range(num_blocks)]
    assert sorted(pool.free) == [b for b in range(num_blocks) if not held[b]]
    places: dict[int, int] = {}
    for row, length in lengths.items():
        table = pool.sequence_blocks(row)
        assert pool.lengths[row] == length
        assert len(set(table)) == len(table) == (length - 1) // BLOCK + 1
        for place, block in enumerate(table):
            assert places.setdefault(block, place) == place, "one block stands at two places"
            is_full = (place + 1) * BLOCK <= length
            assert is_full or held[block] == 1, "two sequences would write a block"


KINDS = ("add", "add", "fork", "fork", "decode", "decode", "decode", "free")


@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 64), (1, 48), slow(2, 20)])
def test_random_operations_keep_the_books(seed, num_blocks):
    """No block is both free and held, counts equal holders, nothing is lost or kept, whatever the order of calls. Keys
    and values behind the tables are in test_engine.py and test_turns.py."""
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, BLOCK)
    lengths: dict[int, int] = {}
    num_full = 0  # how often the pool lacked blocks
    for _ in range(200):
        kind = rng.choice(KINDS)
        if kind == "free" and len(lengths) > 2:
            row = rng.choice(list(lengths))
            pool.remove(row)
            del lengths[row]
        elif kind == "add":
            length = rng.choice([1, 127, 128, 129, 256, rng.randint(1, 500)])
            num_free_after = len(pool.free) - (length - 1) // BLOCK - 1
            assert pool.num_free_after(length) == num_free_after
            num_full += num_free_after < 0
            if num_free_after >= 0:
                lengths[pool.add(length)] = length
        elif kind == "fork" and lengths and len(pool.free):
            parent = rng.choice(list(lengths))
            lengths[pool.fork(parent)] = lengths[parent]
        elif kind == "decode":
            while not pool.can_extend(np.array(list(lengths), np.int64)):
                row = rng.choice(list(lengths))
                pool.remove(row)
                del lengths[row]
                num_full += 1
            pool.extend(np.array(list(lengths), np.int64))
            lengths = {row: length + 1 for row, length in lengths.items()}
        check_accounting(pool, lengths)
    assert num_full > 10, "the pool was never full: nothing was tested"
    for row in lengths:
        pool.remove(row)
    check_accounting(pool, {})
