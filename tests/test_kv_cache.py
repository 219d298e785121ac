"""Accounting of the block pool: the blocks of each sequence and of forks."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch

from minirl.generation.kv_cache import KVCache
from minirl.model.attention import DecodeLayout, PackedLayout
from minirl.model.portable_attention import BLOCK
from support.caches import cache_config, decode_layout, length_of
from support.marks import slow

WINDOWS = {0: None, 2: 100, 3: None}  # of the layers with attention


def make_cache(num_blocks: int) -> KVCache:
    return KVCache(
        cache_config(WINDOWS, num_kv_heads=1, groups=2, head_dim=1),
        num_tokens=num_blocks * BLOCK,
        max_sequences=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def check_accounting(cache: KVCache, sequences: list[int]) -> None:
    """Every property that must hold after any operation."""
    held = Counter(block for s in sequences for block in cache.blocks.blocks_of(s))
    num_blocks = len(cache.blocks.references)
    assert cache.blocks.references.tolist() == [held[b] for b in range(num_blocks)]
    assert sorted(cache.blocks.free) == [b for b in range(num_blocks) if not held[b]]
    places: dict[int, int] = {}
    for sequence in sequences:
        table, length = cache.blocks.blocks_of(sequence), length_of(cache, sequence)
        assert len(set(table)) == len(table) == (length - 1) // BLOCK + 1
        for place, block in enumerate(table):
            assert places.setdefault(block, place) == place, "one block stands at two places"
            is_full = (place + 1) * BLOCK <= length
            assert is_full or held[block] == 1, "two sequences would write a block"


def store(layout: DecodeLayout | PackedLayout, values: list[float]) -> None:
    """Store a value as the key, and its negative as the value, of each token, in every layer."""
    x = torch.tensor(values, dtype=torch.float32)[:, None, None]
    for layer in WINDOWS:
        layout.cached.store(layer, x + layer, -(x + layer))


def check_readable(layout: DecodeLayout, histories: list[list[float]]) -> None:
    """Each row reads its own history through its block table, at every position that it sees and at no other."""
    assert layout.positions.tolist() == [len(h) - 1 for h in histories]
    for layer, window in WINDOWS.items():
        keys, values = layout.cached.pool.layers[layer]
        index, mask = layout.read[window]
        for b, history in enumerate(histories):
            seen = history if window is None else history[-window:]
            columns = (mask[b, 0, 0] == 0).nonzero()[:, 0]
            block, offset = index.blocks[b, columns // BLOCK].long(), columns % BLOCK
            assert keys[block, 0, 0, offset].tolist() == [x + layer for x in seen]
            assert values[block, 0, offset, 0].tolist() == [-x - layer for x in seen]


KINDS = ("add", "add", "fork", "fork", "decode", "decode", "decode", "free", "compact")


@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 16), (1, 12), slow(2, 5)])
def test_random_operations_keep_the_books_and_every_sequence_reads_back_its_own_tokens(seed, num_blocks):
    """No block is both free and held, counts equal holders, nothing is lost or kept, whatever the order of calls. Block
    tables lead to a sequence's own keys."""
    rng, numbers = random.Random(seed), map(float, itertools.count(1))
    cache = make_cache(num_blocks)
    histories: dict[int, list[float]] = {}
    num_full = 0  # how often the pool lacked blocks
    for _ in range(200):
        kind = rng.choice(KINDS)
        if kind == "compact":
            cache.compact()
            used = cache.blocks.references.nonzero()[0].tolist()
            assert used == list(range(len(used))), "a hole is left below a block in use"
        elif kind == "free" and len(histories) > 2:
            row = rng.choice(list(histories))
            cache.blocks.remove(row)
            del histories[row]
        elif kind == "add":
            length = rng.choice([1, 127, 128, 129, 256, rng.randint(1, 500)])
            num_spare = len(cache.blocks.free) - (length - 1) // BLOCK - 1
            assert cache.blocks.num_spare(length) == num_spare
            num_full += num_spare < 0
            if num_spare >= 0:
                row = cache.blocks.add(length)
                histories[row] = list(itertools.islice(numbers, length))
                store(cache.prefill_layout([row]), histories[row])
        elif kind == "fork" and histories:
            parent = rng.choice(list(histories))
            for row in cache.fork(parent, min(rng.randint(1, 3), len(cache.blocks.free))):
                histories[row] = list(histories[parent])
        elif kind == "decode":
            while not cache.blocks.can_extend(np.array(list(histories), np.int64)):
                row = rng.choice(list(histories))
                cache.blocks.remove(row)
                del histories[row]
                num_full += 1
            if histories:
                cache.blocks.extend(np.array(list(histories)))
                for history in histories.values():
                    history.append(next(numbers))
                layout = decode_layout(cache, list(histories))
                store(layout, [history[-1] for history in histories.values()])
                check_readable(layout, list(histories.values()))
        check_accounting(cache, list(histories))
    assert num_full > 10 or num_blocks == 16, "the pool was never full: nothing was tested"
    for row in histories:
        cache.blocks.remove(row)
    check_accounting(cache, [])
