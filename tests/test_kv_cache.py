"""Accounting of the block pools: the blocks of each sequence, of forks and of windows."""

import itertools
import random
from collections import Counter

import pytest
import torch

from minirl.generation.kv_cache import KVCache
from minirl.model.attention import DecodeLayout, PackedLayout
from minirl.model.portable_attention import BLOCK, index_decode
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


def blocks_of(cache: KVCache, row: int) -> list[int]:
    """The sequence's blocks in the first pool."""
    return tables_of(cache, row)[0][1]


def first_visible_block(window: int | None, position: int) -> int:
    return 0 if window is None else max(0, position - window + 1) // BLOCK


def snapshot(cache: KVCache, sequences: list[int]) -> tuple:
    pools = [(sorted(blocks.free), list(blocks.references)) for blocks in cache.blocks]
    return pools, [(length_of(cache, s), tables_of(cache, s)) for s in sequences]


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


def can_add(cache: KVCache, length: int) -> bool:
    """Each pool has room for the blocks that it would keep."""
    end = (length - 1) // BLOCK + 1
    needed = [end - first_visible_block(pool.window, length) for pool in cache.pools]
    return all(len(blocks.free) >= n for blocks, n in zip(cache.blocks, needed, strict=True))


def can_fork(cache: KVCache, sequence: int) -> bool:
    return length_of(cache, sequence) % BLOCK == 0 or all(blocks.free for blocks in cache.blocks)


def can_extend(cache: KVCache, sequence: int) -> bool:
    """Not at the border of a block, or each pool has a free one, counting blocks that have left the window."""
    length = length_of(cache, sequence)
    parts = zip(cache.pools, cache.blocks, tables_of(cache, sequence), strict=True)
    spare = []
    for pool, blocks, (first, table) in parts:
        left = table[: first_visible_block(pool.window, length) - first]
        spare.append(len(blocks.free) + sum(blocks.references[block] == 1 for block in left))
    return length % BLOCK != 0 or min(spare) > 0


def test_blocks_are_handed_out_lowest_first():
    """The live part of a pool stays dense: decoding reads the pool up to its highest live block."""
    cache = make_cache(num_blocks=6)
    a, b = cache.add(3 * BLOCK - 10), cache.add(2 * BLOCK - 10)
    assert (blocks_of(cache, a), blocks_of(cache, b)) == ([0, 1, 2], [3, 4])
    cache.free(a)
    assert [blocks_of(cache, cache.add(2 * BLOCK - 10)) for _ in range(2)] == [[0, 1], [2, 5]]


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


ALL_WINDOWS = [FULL, WINDOWED, MIXED, (1,), (128, None), (129,)]
KINDS = ("add", "add", "fork", "fork", "decode", "decode", "decode", "free", "compact", "reorder")


@pytest.mark.parametrize("windows", ALL_WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("seed", "num_blocks", "max_sequences"), [(0, 16, 64), slow(1, 12, 4), slow(2, 5, 64), slow(3, 16, 64)]
)
def test_random_operations_keep_the_books_and_every_sequence_reads_back_its_own_tokens(
    windows, seed, num_blocks, max_sequences
):
    """No block is both free and held, counts equal holders, nothing is lost or kept, whatever the order of calls; and a
    call is refused exactly when a pool lacks blocks, and then takes nothing.

    Block tables lead to each sequence's own keys, by a plan that equals one made now, and is made again only if a table
    has changed.
    """
    rng, numbers = random.Random(seed), map(float, itertools.count(1))
    cache = make_cache(windows, num_blocks=num_blocks, max_sequences=max_sequences)
    histories: dict[int, list[float]] = {}
    counts = Counter()
    for _ in range(200):
        kind = rng.choice(KINDS)
        before = snapshot(cache, list(histories))
        if kind == "compact":
            cache.compact()
            for blocks in cache.blocks:
                used = [block for block, references in enumerate(blocks.references) if references]
                assert used == list(range(len(used))), "a hole is left below a block in use"
        elif kind == "reorder":
            histories = dict(rng.sample(list(histories.items()), len(histories)))
        elif kind == "free" and len(histories) > 2:
            row = rng.choice(list(histories))
            cache.free(row)
            del histories[row]
        elif kind == "add" or (kind == "fork" and histories):
            length = rng.choice([1, 127, 128, 129, 256, rng.randint(1, 500)])
            parent = rng.choice(list(histories) or [0])
            is_possible = can_add(cache, length) if kind == "add" else can_fork(cache, parent)
            made = cache.add(length) if kind == "add" else cache.fork(parent)
            assert (made is not None) == is_possible
            if made is None:
                counts["refused"] += 1
                assert snapshot(cache, list(histories)) == before
            elif kind == "add":
                histories[made] = list(itertools.islice(numbers, length))
                store(cache.prefill_layout([made]), histories[made])
            else:
                histories[made] = list(histories[parent])
        elif kind == "decode":
            for row in list(histories):
                is_possible = can_extend(cache, row)
                assert cache.extend(row) == is_possible
                if is_possible:
                    histories[row].append(next(numbers))
                else:
                    counts["refused"] += 1
                    cache.free(row)
                    del histories[row]
            if histories:
                counts += check_decoding(cache, histories)
        check_accounting(cache, list(histories))
    assert min(counts["kept"], counts["made again"]) > 10
    assert counts["refused"] > 10 or num_blocks == 16, "the pool was never full: nothing was tested"
    for row in histories:
        cache.free(row)
    check_accounting(cache, [])


def check_decoding(cache: KVCache, histories: dict[int, list[float]]) -> Counter[str]:
    """Store each sequence's newest token and read all; returns how many pools' plans were kept, and made again."""
    rows, before = list(histories), list(cache._last_index)
    layout = cache.decode_layout(torch.tensor(rows))
    store(layout, [history[-1] for history in histories.values()])
    check_readable(layout, list(histories.values()))
    counts = Counter()
    for i, (last, cached) in enumerate(zip(before, layout.caches, strict=True)):
        plan = cached.read.index
        tables = [tables_of(cache, row)[i][1] for row in rows]
        shape = dict(num_kv=1, groups=2, min_users=cache.min_users, num_padded=max(16, len(tables)))
        for name, value in vars(index_decode(tables, **shape)).items():
            assert torch.equal(torch.as_tensor(getattr(plan, name)), torch.as_tensor(value)), name
        is_kept = last is not None and last.index is plan
        is_same = last is not None and (last.rows, last.version) == (rows, cache.blocks[i].version)
        assert is_kept == is_same
        counts["kept" if is_kept else "made again"] += 1
    return counts


def test_compact_moves_the_highest_blocks_into_the_lowest_holes():
    """Shared blocks move once for all their holders; blocks that are low enough stay, and nothing moves twice."""
    cache = make_cache(num_blocks=12)
    parent, other = cache.add(3 * BLOCK - 10), cache.add(3 * BLOCK - 10)
    child = cache.fork(other)
    pool = cache.pools[0]
    pool.keys.copy_(torch.arange(12.0).view(1, 12, 1, 1, 1).expand_as(pool.keys))
    pool.values.copy_(-pool.keys.transpose(-1, -2))
    assert [blocks_of(cache, s) for s in (parent, other, child)] == [[0, 1, 2], [3, 4, 5], [3, 4, 6]]
    cache.free(parent)
    for _ in range(2):
        cache.compact()
        assert [blocks_of(cache, s) for s in (other, child)] == [[3, 0, 1], [3, 0, 2]]
        assert pool.keys[0, :4, 0, 0, 0].tolist() == [4, 5, 6, 3]
        assert pool.values[0, :4, 0, 0, 0].tolist() == [-4, -5, -6, -3]
    check_accounting(cache, [other, child])
    assert blocks_of(cache, cache.add(1)) == [4]
