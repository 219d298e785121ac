"""Accounting of the block pools: who holds which block, what a fork shares, what a window keeps."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from minirl.generation.kv_cache import KVCache
from minirl.model.attention import DecodeLayout, PackedLayout
from minirl.model.portable_attention import BLOCK, DecodeIndex, index_decode
from support.caches import length_of

FULL = (None, None)
WINDOWED = (200, 200)
MIXED = (None, 100, 300, 100)
ALL_WINDOWS = pytest.mark.parametrize("windows", [FULL, WINDOWED, MIXED, (1,), (128, None), (129,)], ids=str)


def make_cache(windows=FULL, *, num_blocks: int = 12, max_sequences: int = 64) -> KVCache:
    return KVCache(
        windows,
        num_kv_heads=1,
        head_dim=1,
        num_query_groups=2,
        num_tokens=num_blocks * BLOCK,
        max_sequences=max_sequences,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def tables_of(cache: KVCache, row: int) -> list[SimpleNamespace]:
    """The sequence's block table in each pool."""
    in_pools = [tables.of_row(row) for tables in cache.tables]
    return [SimpleNamespace(first=first, blocks=blocks) for first, blocks in in_pools]


def first_visible_block(window: int | None, position: int) -> int:
    return 0 if window is None else max(0, position - window + 1) // BLOCK


def snapshot(cache: KVCache, sequences: list[int]) -> tuple:
    pools = [(sorted(blocks.free), list(blocks.references)) for blocks in cache.free_lists]
    return pools, [
        (length_of(cache, s), [(t.first, list(t.blocks)) for t in tables_of(cache, s)]) for s in sequences
    ]


def check_accounting(cache: KVCache, sequences: list[int]) -> None:
    """Every property that must hold after any operation."""
    for i, (pool, blocks) in enumerate(zip(cache.pools, cache.free_lists, strict=True)):
        held = Counter(block for s in sequences for block in tables_of(cache, s)[i].blocks)
        assert blocks.references == [held[b] for b in range(len(blocks.references))]
        assert sorted(blocks.free) == [b for b in range(len(blocks.references)) if not held[b]]
        places: dict[int, int] = {}
        for sequence in sequences:
            table, length = tables_of(cache, sequence)[i], length_of(cache, sequence)
            assert len(set(table.blocks)) == len(table.blocks)
            assert table.first + len(table.blocks) == (length - 1) // BLOCK + 1, (
                "the last block is the last token's"
            )
            border = (length - 1) // BLOCK * BLOCK
            assert first_visible_block(pool.window, border) <= table.first, (
                "a block is held that the first token of the last block does not see"
            )
            assert table.first <= first_visible_block(pool.window, length), (
                "a block that the next token sees is gone"
            )
            for place, block in enumerate(table.blocks, table.first):
                assert places.setdefault(block, place) == place, "one block stands at two places"
                if held[block] > 1:
                    assert (place + 1) * BLOCK <= length, (
                        "a shared block is not full: two sequences would write it"
                    )


def check_empty(cache: KVCache) -> None:
    check_accounting(cache, [])
    for blocks in cache.free_lists:
        assert len(blocks.free) == len(blocks.references)


@ALL_WINDOWS
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_the_books(windows, seed):
    """No block is both free and held, counts equal holders, nothing is lost or kept, whatever the order of calls."""
    rng = random.Random(seed)
    cache = make_cache(windows, num_blocks=rng.choice([5, 12]), max_sequences=rng.choice([4, 64]))
    live: list[int] = []
    refused: Counter[str] = Counter()
    done: Counter[str] = Counter()
    for _ in range(250):
        kind = rng.choice(["add", "fork", "fork", "extend", "extend", "free"])
        if kind == "add":
            made = cache.add(rng.choice([1, 127, 128, 129, 256, rng.randint(1, 500)]))
            live += [made] if made is not None else []
            refused[kind] += made is None
        elif kind == "fork" and live:
            made = cache.fork(rng.choice(live))
            live += [made] if made is not None else []
            refused[kind] += made is None
        elif kind == "extend" and live:
            sequence = rng.choice(live)
            for _ in range(rng.choice([1, 1, 130])):
                if not cache.extend(sequence):
                    refused[kind] += 1
                    break
        elif kind == "free" and live and rng.random() < 0.7:
            cache.free(live.pop(rng.randrange(len(live))))
        done[kind] += 1
        check_accounting(cache, live)
    assert min(done.values()) > 20
    assert refused["add"] + refused["fork"] + refused["extend"] > 10, (
        "the pool was never full: nothing was tested"
    )
    rng.shuffle(live)
    for sequence in live:
        cache.free(sequence)
    check_empty(cache)


def test_blocks_are_handed_out_lowest_first():
    """The live part of a pool stays dense: decoding reads the pool up to its highest live block."""
    cache = make_cache(num_blocks=6)
    a, b = cache.add(300), cache.add(200)
    assert [t.blocks for s in (a, b) for t in tables_of(cache, s)] == [[0, 1, 2], [3, 4]]
    cache.free(a)
    assert tables_of(cache, cache.add(200))[0].blocks == [0, 1]
    assert tables_of(cache, cache.add(200))[0].blocks == [2, 5]


@pytest.mark.parametrize("length", [100, 129, 300, 511])
def test_a_fork_shares_full_blocks_and_copies_the_partial_one(length):
    """The copy holds the same keys and values in a block of its own; the full ones are the same blocks, held twice."""
    cache = make_cache()
    parent = cache.add(length)
    pool, blocks = cache.pools[0], cache.free_lists[0]
    pool.keys.normal_()
    pool.values.normal_()
    full = length // BLOCK
    num_free = len(blocks.free)
    child = cache.fork(parent)
    ours, theirs = tables_of(cache, parent)[0].blocks, tables_of(cache, child)[0].blocks
    assert theirs[:full] == ours[:full]
    assert len(theirs) == full + 1
    assert theirs[full] != ours[full]
    assert len(blocks.free) == num_free - 1
    assert [blocks.references[b] for b in ours] == [2] * full + [1]
    assert torch.equal(pool.keys[:, theirs[full]], pool.keys[:, ours[full]])
    assert torch.equal(pool.values[:, theirs[full]], pool.values[:, ours[full]])
    before = pool.keys[:, ours].clone()
    assert cache.extend(child)
    write_last(cache, [child], [1e6])
    assert torch.equal(pool.keys[:, ours], before), "a fork's token landed in its parent's block"
    cache.free(parent)
    assert [blocks.references[b] for b in theirs] == [1] * (full + 1)


@pytest.mark.parametrize("windows", [FULL, WINDOWED, MIXED], ids=str)
def test_a_fork_at_a_block_border_shares_everything_and_needs_no_free_block(windows):
    """With all blocks full there is nothing to copy, so a full pool is no reason to refuse."""
    cache = make_cache(windows, num_blocks=2)
    parent = cache.add(2 * BLOCK)
    assert any(not blocks.free for blocks in cache.free_lists)
    child = cache.fork(parent)
    assert child is not None, "refused a fork that takes no block"
    assert [t.blocks for t in tables_of(cache, child)] == [t.blocks for t in tables_of(cache, parent)]
    check_accounting(cache, [parent, child])


def test_a_fork_without_room_is_refused_and_takes_nothing():
    """None, and the books as before."""
    cache = make_cache(num_blocks=2)
    parent = cache.add(BLOCK + 1)
    before = snapshot(cache, [parent])
    assert cache.fork(parent) is None
    assert snapshot(cache, [parent]) == before


@pytest.mark.parametrize("windows", [FULL, WINDOWED, MIXED, (None, 100)], ids=str)
@pytest.mark.parametrize("max_sequences", [2, 64])
def test_add_is_refused_exactly_when_a_pool_lacks_blocks_and_takes_nothing(windows, max_sequences):
    """If and only if each pool has room for what it would keep there is a sequence; a refusal leaves no trace."""
    for occupied in (0, 1, 150, 400, 700):
        for length in (1, 127, 128, 129, 250, 256, 300, 385, 640, 900, 1100):
            cache = make_cache(windows, num_blocks=8, max_sequences=max_sequences)
            live = [cache.add(occupied)] if occupied else []
            assert None not in live, (
                "a sequence alone in the cache was refused, although every pool has room for it"
            )
            room = [
                len(blocks.free) - ((length - 1) // BLOCK + 1 - first_visible_block(pool.window, length))
                for pool, blocks in zip(cache.pools, cache.free_lists, strict=True)
            ]
            before = snapshot(cache, live)
            made = cache.add(length)
            assert (made is not None) == (min(room) >= 0), (
                f"{length} tokens beside {occupied}: spare blocks {room}"
            )
            if made is None:
                assert snapshot(cache, live) == before
            else:
                assert [len(blocks.free) for blocks in cache.free_lists] == room


@ALL_WINDOWS
def test_extend_is_refused_exactly_when_a_needed_block_is_missing(windows):
    """False only at a block border without a free block; then the length stays and a freed block lets it go on."""
    cache = make_cache(windows, num_blocks=4, max_sequences=3)
    growing, other = cache.add(1), cache.add(1)
    blocker = []
    while (made := cache.add(1)) is not None:
        blocker.append(made)
    for expected_length in range(2, 2 * BLOCK + 40):
        length = length_of(cache, growing)
        kept = [
            [
                b
                for place, b in enumerate(t.blocks, t.first)
                if length % BLOCK or place >= first_visible_block(pool.window, length)
            ]
            for t, pool in zip(tables_of(cache, growing), cache.pools, strict=True)
        ]
        released = [len(t.blocks) - len(k) for t, k in zip(tables_of(cache, growing), kept, strict=True)]
        spare = [len(blocks.free) + n for blocks, n in zip(cache.free_lists, released, strict=True)]
        possible = length % BLOCK != 0 or min(spare) > 0
        assert cache.extend(growing) == possible
        check_accounting(cache, [growing, other, *blocker])
        assert [t.blocks[: len(k)] for t, k in zip(tables_of(cache, growing), kept, strict=True)] == kept
        if not possible:
            assert length_of(cache, growing) == length
            assert not cache.extend(growing), "refused once, granted without a block coming free"
            cache.free(blocker.pop())
            assert cache.extend(growing)
        assert length_of(cache, growing) == expected_length
    check_accounting(cache, [growing, other, *blocker])


@pytest.mark.parametrize("window", [1, 2, 100, 128, 129, 130, 300])
def test_a_windowed_pool_keeps_only_the_blocks_its_window_sees(window):
    """However long a sequence grows, its table stays as long as the window needs at the start of a block."""
    cache = make_cache((window, None), num_blocks=20, max_sequences=2)
    windowed, full = (next(i for i, p in enumerate(cache.pools) if p.window == w) for w in (window, None))
    sequence = cache.add(1)
    for length in range(2, 12 * BLOCK):
        assert cache.extend(sequence)
        assert length_of(cache, sequence) == length
        table = tables_of(cache, sequence)[windowed]
        last = (length - 1) // BLOCK
        assert table.first == first_visible_block(window, last * BLOCK)
        assert len(table.blocks) == last - table.first + 1
        assert len(table.blocks) <= -(-(window - 1) // BLOCK) + 1
        assert len(tables_of(cache, sequence)[full].blocks) == (length - 1) // BLOCK + 1
    check_accounting(cache, [sequence])


@pytest.mark.parametrize("window", [1, 100, 128, 129, 300])
def test_a_windowed_pool_has_room_for_its_sequences_at_any_length(window):
    """A pool far smaller than the tokens it serves never refuses `max_sequences` sequences, forks among them."""
    cache = make_cache((window,), num_blocks=1000, max_sequences=3)
    assert len(cache.free_lists[0].references) < 20
    first = cache.add(1000)
    live = [first, cache.fork(first), cache.add(3000)]
    assert None not in live
    for step in range(700):
        for sequence in live:
            assert cache.extend(sequence), (
                f"refused at {length_of(cache, sequence)} tokens after {step} steps"
            )
    check_accounting(cache, live)


def write_last(cache: KVCache, sequences: list[int], values: list[float]) -> DecodeLayout:
    """Store a value as the key, and its negative as the value, of each sequence's last token, in every layer."""
    layout = cache.decode_layout(torch.tensor(sequences))
    store(layout, values)
    return layout


def store(layout: DecodeLayout | PackedLayout, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)[:, None, None]
    for layer, (pool, index) in layout.pool_of_layer.items():
        layout.caches[pool].store(index, x + layer, -(x + layer))


def block_of_slot(plan: DecodeIndex, slot: int) -> int:
    """The block that a slot's queries meet: the live ones come first, then the shared ones."""
    num_own = plan.num_live * plan.num_users
    if slot < num_own:
        return slot // plan.num_users
    return int(plan.shared[(slot - num_own) // plan.num_sharing])


def check_readable(layout: DecodeLayout, histories: list[list[float]]) -> None:
    """Each row reads its own history at every position that it sees, through the block table and through the slots."""
    assert layout.positions.tolist() == [len(h) - 1 for h in histories]
    for layer, (pool, index) in layout.pool_of_layer.items():
        cached = layout.caches[pool]
        read, plan, window = cached.read, cached.read.index, cached.pool.window
        rows, n = plan.blocks.shape
        score, out = plan.score.view(rows, 2, n), plan.out.view(n, -1, 2)
        assert plan.unused.shape[:2] == out.shape[:2]
        for b, history in enumerate(histories):
            first = len(history) - int(read.lengths[b])
            oldest = 0 if window is None else max(0, len(history) - window)
            assert first <= oldest
            visible = [i + first for i, x in enumerate(read.mask[b, 0, 0].tolist()) if x == 0]
            assert visible == list(range(oldest, len(history)))
            num_blocks = (len(history) - 1 - first) // BLOCK + 1
            assert plan.unused[:, b, 0, 0].tolist() == [entry >= num_blocks for entry in range(n)]
            for position in {oldest, len(history) - 1, *range(oldest, len(history), 37)}:
                entry, offset = divmod(position - first, BLOCK)
                block = int(plan.blocks[b, entry])
                for g in range(2):
                    product = int(score[b, g, entry])
                    assert int(out[entry, b, g]) == product
                    assert int(plan.prob[product]) == (b * 2 + g) * n + entry
                    assert product % 2 == g
                    assert int(plan.query[product // 2]) == b
                    assert block_of_slot(plan, product // 2) == block
                assert cached.pool.keys[index, block, 0, 0, offset].item() == history[position] + layer
                assert cached.pool.values[index, block, 0, offset, 0].item() == -history[position] - layer


@pytest.mark.parametrize("windows", [FULL, WINDOWED, MIXED], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_every_sequence_reads_back_its_own_tokens(windows, seed):
    """After prefills, forks, frees and decodes in any order, block tables lead to what each sequence wrote itself."""
    rng = random.Random(seed)
    cache = make_cache(windows, num_blocks=14)
    live: list[tuple[int, list[float]]] = []
    counter, decoded, forked = 0, 0, 0
    for _ in range(40):
        kind = rng.choice(["prefill", "fork", "decode", "decode", "free", "compact"])
        if kind == "compact":
            cache.compact()
            for blocks in cache.free_lists:
                used = [block for block, references in enumerate(blocks.references) if references]
                assert used == list(range(len(used))), "a hole is left below a block in use"
            check_accounting(cache, [s for s, _ in live])
        elif kind == "prefill":
            lengths = [rng.choice([1, 128, 129, rng.randint(1, 400)]) for _ in range(rng.randint(1, 2))]
            made = [s for s in map(cache.add, lengths) if s is not None]
            if made:
                histories = [
                    [float(counter := counter + 1) for _ in range(length_of(cache, s))] for s in made
                ]
                store(cache.prefill_layout(made), [x for h in histories for x in h])
                live += list(zip(made, histories, strict=True))
        elif kind == "fork" and live:
            sequence, history = rng.choice(live)
            child = cache.fork(sequence)
            if child is not None:
                live.append((child, list(history)))
                forked += 1
        elif kind == "free" and len(live) > 2:
            cache.free(live.pop(rng.randrange(len(live)))[0])
        elif kind == "decode" and live:
            for _ in range(rng.choice([1, 20])):
                rows = [pair for pair in rng.sample(live, rng.randint(1, len(live))) if cache.extend(pair[0])]
                if rows:
                    new = [float(counter := counter + 1) for _ in rows]
                    layout = write_last(cache, [s for s, _ in rows], new)
                    for (_, history), x in zip(rows, new, strict=True):
                        history.append(x)
                    check_readable(layout, [h for _, h in rows])
                    decoded += len(rows)
    assert decoded > 100
    assert forked > 3


def test_compact_moves_the_highest_blocks_into_the_lowest_holes():
    """Shared blocks move once for all their holders; blocks that are low enough stay, and nothing moves twice."""
    cache = make_cache(num_blocks=12)
    parent, other = cache.add(300), cache.add(300)
    child = cache.fork(other)
    pool = cache.pools[0]
    pool.keys.copy_(torch.arange(12.0).view(1, 12, 1, 1, 1).expand_as(pool.keys))
    pool.values.copy_(-pool.keys.transpose(-1, -2))
    assert [tables_of(cache, s)[0].blocks for s in (parent, other, child)] == [
        [0, 1, 2],
        [3, 4, 5],
        [3, 4, 6],
    ]
    cache.free(parent)
    cache.compact()
    assert [tables_of(cache, s)[0].blocks for s in (other, child)] == [[3, 0, 1], [3, 0, 2]]
    assert pool.keys[0, :4, 0, 0, 0].tolist() == [4, 5, 6, 3]
    assert pool.values[0, :4, 0, 0, 0].tolist() == [-4, -5, -6, -3]
    check_accounting(cache, [other, child])
    tables = [tables_of(cache, s)[0].blocks for s in (other, child)]
    cache.compact()
    assert [tables_of(cache, s)[0].blocks for s in (other, child)] == tables
    assert tables_of(cache, cache.add(1))[0].blocks == [4]


@pytest.mark.parametrize("windows", [FULL, WINDOWED, MIXED], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_never_that_of_other_tables(windows, seed):
    """After any operations in any order, equal to a plan made now; the same one again where no table has changed."""
    rng = random.Random(seed)
    cache, live = make_cache(windows, num_blocks=16), []
    reused = made_again = 0
    for _ in range(150):
        kind = rng.choice(["add", "fork", "extend", "extend", "free", "compact", "reorder"])
        if kind in ("add", "fork") and (live or kind == "add"):
            made = (
                cache.fork(rng.choice(live))
                if kind == "fork"
                else cache.add(rng.choice([1, 127, 128, 200, 300]))
            )
            live += [made] if made is not None else []
        elif kind == "extend" and live:
            live = [s for s in live if cache.extend(s) or cache.free(s)]
        elif kind == "free" and len(live) > 1:
            cache.free(live.pop(rng.randrange(len(live))))
        elif kind == "compact":
            cache.compact()
        elif kind == "reorder":
            rng.shuffle(live)
        rows = [
            s for s in live if length_of(cache, s) % BLOCK
        ]  # a sequence at a border has no block yet for its next token
        if not rows:
            continue
        before = list(cache._last_index)
        caches = cache.decode_layout(torch.tensor(rows)).caches
        for pool in range(len(cache.pools)):
            plan = caches[pool].read.index
            tables = [list(tables_of(cache, s)[pool].blocks) for s in rows]
            shape = dict(num_kv=1, groups=2, min_users=cache.min_users, num_padded=max(16, len(rows)))
            for name, value in vars(index_decode(tables, **shape)).items():
                same = (
                    torch.equal(getattr(plan, name), value)
                    if torch.is_tensor(value)
                    else getattr(plan, name) == value
                )
                assert same, name
            last = before[pool]
            is_kept = last is not None and last.index is plan
            assert is_kept == (
                last is not None and (last.rows, last.version) == (rows, cache.tables[pool].version)
            )
            reused, made_again = reused + is_kept, made_again + (not is_kept)
    assert min(reused, made_again) > 20
