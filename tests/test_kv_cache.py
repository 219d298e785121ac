"""Accounting of the block pools: the blocks of each sequence, of forks and of windows."""

import itertools
import random
from collections import Counter

import pytest
import torch

from minirl.generation.kv_cache import KVCache
from minirl.model.attention import DecodeLayout, PackedLayout
from minirl.model.portable_attention import BLOCK
from support.caches import length_of
from support.marks import slow

FULL = (None, None)
WINDOWED = (200, 200)
MIXED = (None, 100, 300, 100)


def make_cache(windows=FULL, *, num_blocks: int = 12, max_sequences: int = 64) -> KVCache:
    return KVCache(
        dict(enumerate(windows)),
        num_kv_heads=1,
        head_dim=1,
        num_query_groups=2,
        num_tokens=num_blocks * BLOCK,
        max_sequences=max_sequences,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def tables_of(cache: KVCache, row: int) -> list[tuple[int, list[int]]]:
    """In each pool the number of the sequence's first block, and its blocks."""
    return [blocks.of_row(row) for blocks in cache.blocks]


def first_visible_block(window: int | None, position: int) -> int:
    return 0 if window is None else max(0, position - window + 1) // BLOCK


def check_accounting(cache: KVCache, sequences: list[int]) -> None:
    """Every property that must hold after any operation."""
    for i, (pool, blocks) in enumerate(zip(cache.pools, cache.blocks, strict=True)):
        held = Counter(block for s in sequences for block in tables_of(cache, s)[i][1])
        assert blocks.references == [held[b] for b in range(len(blocks.references))]
        assert sorted(blocks.free) == [b for b in range(len(blocks.references)) if not held[b]]
        places: dict[int, int] = {}
        for sequence in sequences:
            (first, table), length = tables_of(cache, sequence)[i], length_of(cache, sequence)
            assert len(set(table)) == len(table)
            assert first + len(table) == (length - 1) // BLOCK + 1, "the last block is not the last token's"
            border = (length - 1) // BLOCK * BLOCK
            assert first_visible_block(pool.window, border) <= first, "a block that nobody sees is held"
            assert first <= first_visible_block(pool.window, length), "a block that is seen next is gone"
            for place, block in enumerate(table, first):
                assert places.setdefault(block, place) == place, "one block stands at two places"
                is_full = (place + 1) * BLOCK <= length
                assert is_full or held[block] == 1, "two sequences would write a block"


def can_hold(cache: KVCache, length: int) -> bool:
    """Each pool has room for the blocks that it would keep of a new sequence."""
    end = (length - 1) // BLOCK + 1
    needed = [end - first_visible_block(pool.window, length) for pool in cache.pools]
    return all(len(blocks.free) >= n for blocks, n in zip(cache.blocks, needed, strict=True))


@pytest.mark.parametrize("window", [1, 100, 128, 129, 300])
def test_a_windowed_pool_has_room_for_its_sequences_at_any_length(window):
    """A pool far smaller than the tokens it serves never refuses `max_sequences` sequences, forks among them."""
    cache = make_cache((window,), num_blocks=1000, max_sequences=3)
    assert len(cache.blocks[0].references) * BLOCK < 3000
    first = cache.add(1000)
    live = [first, cache.fork(first), cache.add(3000)]
    for _ in range(700):
        assert all(cache.extend(sequence) for sequence in live)
    check_accounting(cache, live)


def store(layout: DecodeLayout | PackedLayout, values: list[float]) -> None:
    """Store a value as the key, and its negative as the value, of each token, in every layer."""
    x = torch.tensor(values, dtype=torch.float32)[:, None, None]
    for layer, (pool, index) in layout.pool_of_layer.items():
        layout.caches[pool].store(index, x + layer, -(x + layer))


def check_readable(layout: DecodeLayout, histories: list[list[float]]) -> None:
    """Each row reads its own history through its block table, at every position that it sees and at no other."""
    assert layout.positions.tolist() == [len(h) - 1 for h in histories]
    for layer, (pool, index) in layout.pool_of_layer.items():
        cached = layout.caches[pool]
        read, window = cached.read, cached.pool.window
        for b, history in enumerate(histories):
            first = len(history) - int(read.lengths[b])
            oldest = 0 if window is None else max(0, len(history) - window)
            visible = [i + first for i, x in enumerate(read.mask[b, 0, 0].tolist()) if x == 0]
            assert visible == list(range(oldest, len(history)))
            for position in {oldest, len(history) - 1, *range(oldest, len(history), 37)}:
                entry, offset = divmod(position - first, BLOCK)
                block = int(read.blocks[b, entry])
                assert cached.pool.keys[index, block, 0, 0, offset].item() == history[position] + layer
                assert cached.pool.values[index, block, 0, offset, 0].item() == -history[position] - layer


ALL_WINDOWS = [FULL, MIXED, (1,), slow((200, 200)), slow((128, None)), slow((129,))]
KINDS = ("add", "add", "fork", "fork", "decode", "decode", "decode", "free", "compact")


@pytest.mark.parametrize("windows", ALL_WINDOWS, ids=str)
@pytest.mark.parametrize(("seed", "num_blocks", "max_sequences"), [(0, 16, 64), (1, 12, 4), slow(2, 5, 64)])
def test_random_operations_keep_the_books_and_every_sequence_reads_back_its_own_tokens(
    windows, seed, num_blocks, max_sequences
):
    """No block is both free and held, counts equal holders, nothing is lost or kept, whatever the order of calls; and a
    call is refused only when a pool lacks blocks, and then takes nothing. Block tables lead to a sequence's own keys.
    """
    rng, numbers = random.Random(seed), map(float, itertools.count(1))
    cache = make_cache(windows, num_blocks=num_blocks, max_sequences=max_sequences)
    histories: dict[int, list[float]] = {}
    num_refused = 0
    for _ in range(200):
        kind = rng.choice(KINDS)
        has_free = all(blocks.free for blocks in cache.blocks)
        if kind == "compact":
            cache.compact()
            for blocks in cache.blocks:
                used = [block for block, references in enumerate(blocks.references) if references]
                assert used == list(range(len(used))), "a hole is left below a block in use"
        elif kind == "free" and len(histories) > 2:
            row = rng.choice(list(histories))
            cache.free(row)
            del histories[row]
        elif kind == "add":
            length = rng.choice([1, 127, 128, 129, 256, rng.randint(1, 500)])
            is_possible = can_hold(cache, length)
            row = cache.add(length)
            assert (row is not None) == is_possible
            num_refused += not is_possible
            if row is not None:
                histories[row] = list(itertools.islice(numbers, length))
                store(cache.prefill_layout([row]), histories[row])
        elif kind == "fork" and histories:
            parent = rng.choice(list(histories))
            row = cache.fork(parent)
            assert (row is not None) == (has_free or length_of(cache, parent) % BLOCK == 0)
            if row is not None:
                histories[row] = list(histories[parent])
        elif kind == "decode":
            for row in rng.sample(list(histories), len(histories)):
                is_possible = length_of(cache, row) % BLOCK != 0 or all(
                    blocks.free for blocks in cache.blocks
                )
                if cache.extend(row):
                    histories[row].append(next(numbers))
                else:
                    assert not is_possible
                    num_refused += 1
                    cache.free(row)
                    del histories[row]
            if histories:
                layout = cache.decode_layout(torch.tensor(list(histories)))
                store(layout, [history[-1] for history in histories.values()])
                check_readable(layout, list(histories.values()))
        check_accounting(cache, list(histories))
    assert num_refused > 10 or num_blocks == 16, "the pool was never full: nothing was tested"
    for row in histories:
        cache.free(row)
    check_accounting(cache, [])
