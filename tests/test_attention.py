"""The portable kernel against a dense softmax, and decoding from the cache against the packed stream, bit for bit."""

import importlib.util
import math
import sys
import types

import pytest
import torch

from minirl.generation.kv_cache import KVCache
from minirl.model import attention
from minirl.model.attention import PackedLayout, attend, kernel_for
from minirl.model.portable_attention import BLOCK, QUERY_BLOCK_SIZES, min_queries
from support.caches import length_of, poison
from support.engines import cached_model
from support.layouts import FAMILIES, shared_layout

CPU = torch.device("cpu")
RAGGED = (1, 127, 128, 129, 300, 2, 257)
WINDOWS = [None, 1, 5, 128, 130]


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_qkv(num_tokens, heads, kv_heads, dim, dtype=torch.float32, seed=0):
    """Queries wide enough that the softmax is peaked, so that every key's place and mask matter."""
    shapes = (heads, kv_heads, kv_heads)
    q, k, v = (randn(num_tokens, n, dim, seed=seed + i) for i, n in enumerate(shapes))
    return (2 * q).to(dtype), k.to(dtype), v.to(dtype)


def dense_attention(q, k, v, window):
    """One sequence, [L, H, C] and [L, K, C]: the whole score matrix, key heads repeated, a mask, a softmax."""
    length, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q, k) / math.sqrt(dim)
    age = torch.arange(length)[:, None] - torch.arange(length)
    visible = (age >= 0) & (age < (length if window is None else window))
    probs = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khc->qhc", probs, v)


def attend_packed(q, k, v, lengths, window):
    return attend(q, k, v, PackedLayout(tuple(lengths), CPU), layer=0, window=window)


def assert_near(got, expected, tolerance):
    assert got.shape == expected.shape
    assert (got.double() - expected.double()).norm() <= tolerance * expected.double().norm()


def assert_gradients_near(got, expected, leaves, seed):
    upstream = randn(*got.shape, seed=seed, dtype=torch.float64)
    grads = (torch.autograd.grad(x, leaves, upstream) for x in (got, expected))
    for grad, expected_grad in zip(*grads, strict=True):
        assert_near(grad, expected_grad, 1e-13)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_packed_attention_and_its_gradients_equal_dense_softmax(window, groups):
    """Ragged sequences, block borders, windows and shared key heads: exact in fp64, forward and backward."""
    leaves = [x.requires_grad_() for x in random_qkv(sum(RAGGED), 2 * groups, 2, 8, torch.float64)]
    out = attend_packed(*leaves, RAGGED, window)
    parts = zip(*(x.split(RAGGED) for x in leaves), strict=True)
    expected = torch.cat([dense_attention(*part, window) for part in parts])
    assert_near(out, expected, 1e-14)
    assert_gradients_near(out, expected, leaves, seed=9)


@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_narrow_attention_is_within_rounding_of_dense_softmax(window, dtype, tolerance):
    """fp32 and bf16 differ from the exact result of the same inputs by their own rounding only."""
    qkv = random_qkv(sum(RAGGED), 4, 2, 32, dtype)
    parts = zip(*(x.double().split(RAGGED) for x in qkv), strict=True)
    out = attend_packed(*qkv, RAGGED, window)
    assert out.dtype == dtype
    assert_near(out, torch.cat([dense_attention(*part, window) for part in parts]), tolerance)


def test_bf16_attention_rounds_where_it_says_and_nowhere_else():
    """Scores, probabilities and block products are bf16; scaling, softmax and the sum over blocks are fp32."""
    length, dim = 500, 32  # a scale that is no power of two, and four blocks
    q, k, v = random_qkv(length, 1, 1, dim, torch.bfloat16)
    out = attend_packed(q, k, v, [length], None)[:, 0].float()
    q, k, v = (x[:, 0].float() for x in (q, k, v))
    scores = (q @ k.t()).bfloat16().float() / math.sqrt(dim)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    probs = scores.masked_fill(future, -torch.inf).softmax(-1).bfloat16().float()
    parts = [(p @ x).bfloat16().float() for p, x in zip(probs.split(BLOCK, 1), v.split(BLOCK), strict=True)]
    expected = sum(parts).bfloat16().float()
    assert (
        out == expected
    ).float().mean() > 0.97  # a product's own order of summing may turn a rounding over


@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_values_stay_in_their_sequence(window, bad):
    """A broken sequence is not multiplied by zero into its neighbours: their results keep every bit."""
    q, k, v = random_qkv(sum(RAGGED), 4, 2, 8)
    expected = attend_packed(q, k, v, RAGGED, window).split(RAGGED)
    for broken in range(len(RAGGED)):
        k_bad, v_bad = k.clone(), v.clone()
        k_bad.split(RAGGED)[broken].fill_(bad)
        v_bad.split(RAGGED)[broken].fill_(bad)
        got = attend_packed(q, k_bad, v_bad, RAGGED, window).split(RAGGED)
        assert not got[broken].isfinite().any()
        assert all(torch.equal(got[i], expected[i]) for i in range(len(RAGGED)) if i != broken)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 3, 0)], ids=str)
def test_empty_streams_and_sequences_attend_to_nothing(lengths):
    """A rank without rollouts still runs forward and backward: shapes hold and gradients exist."""
    leaves = [x.requires_grad_() for x in random_qkv(sum(lengths), 4, 2, 8, torch.float64)]
    out = attend_packed(*leaves, lengths, None)
    expected = dense_attention(*leaves, None)
    assert out.shape == (sum(lengths), 4, 8)
    torch.testing.assert_close(out, expected)
    for grad, expected_grad in zip(
        *(torch.autograd.grad(x.sum(), leaves) for x in (out, expected)), strict=True
    ):
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("window", [None, 5])
def test_gradients_reach_exactly_the_visible_keys(window):
    """The last token of the middle sequence moves its own window's keys and values, and no other bit of the stream."""
    lengths = (140, 133, 140)
    leaves = [x.requires_grad_() for x in random_qkv(sum(lengths), 4, 2, 8)]
    last = sum(lengths[:2]) - 1
    _, grad_k, grad_v = torch.autograd.grad(attend_packed(*leaves, lengths, window)[last].sum(), leaves)
    reached = torch.zeros(sum(lengths), dtype=torch.bool)
    reached[lengths[0] if window is None else last - window + 1 : last + 1] = True
    assert torch.equal(grad_v.abs().sum((1, 2)) > 0, reached)
    assert torch.equal(grad_k.abs().sum((1, 2)) > 0, reached)


def test_layouts_count_positions_from_zero_in_each_sequence():
    """`positions` and `cu_seqlens` say where the sequences are. Pitfall 3."""
    layout = PackedLayout((3, 1, 2), CPU)
    assert layout.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert layout.positions.dtype == torch.int64
    assert layout.cu_seqlens.dtype == torch.int32
    assert PackedLayout((), CPU).positions.shape == (0,)
    assert PackedLayout((), CPU).cu_seqlens.tolist() == [0]


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float32)], ids=str
)
def test_portable_kernel_serves_the_cpu_and_full_precision(device, dtype):
    """The fused kernels take 16-bit tensors on CUDA only; the rest must not reach them."""
    assert kernel_for(torch.device(device), dtype) == "portable"


# Shared prompts.


def test_a_shared_prompt_is_computed_as_rows_of_the_first_sequence_that_has_it():
    """The third sequence has 2 tokens of the first, the fourth those and one more: 9 rows for 14 tokens."""
    layout = PackedLayout((3, 2, 5, 4), CPU, shared=((0, 0), (1, 0), (0, 2), (2, 3)))
    assert layout.hidden_index.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 0, 1, 5, 8]
    assert layout.computed_tokens.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 13]
    assert layout.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 3]
    assert layout.num_shared == (0, 0, 2, 3)
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 10, 14]
    assert layout.computed_tokens[layout.hidden_index].tolist() != list(range(14)), "nothing is shared"
    assert layout.hidden_index[layout.computed_tokens].tolist() == list(range(9)), (
        "a row is not the token that it was kept for"
    )
    assert {x.dtype for x in (layout.hidden_index, layout.computed_tokens, layout.positions)} == {torch.int64}


def test_without_shared_prompts_every_token_is_a_row():
    """Nothing said of prompts, or each sequence its own parent: the stream as it is."""
    for shared in ((), ((0, 0), (1, 0), (2, 0))):
        layout = PackedLayout((3, 1, 2), CPU, shared=shared)
        assert layout.hidden_index.tolist() == layout.computed_tokens.tolist() == list(range(6))
        assert layout.positions.tolist() == [0, 1, 2, 0, 0, 1]
        assert layout.num_shared == (0, 0, 0)
    assert PackedLayout((), CPU).hidden_index.tolist() == PackedLayout((), CPU).computed_tokens.tolist() == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_shared_prompt_gives_each_row_the_bits_that_it_has_unshared(dtype, window, groups, seed):
    """A row does not know who else begins as it does: attention over shared rows is that over the whole stream."""
    layout = shared_layout(FAMILIES, seed)
    q, k, v = random_qkv(len(layout.computed_tokens), 2 * groups, 2, 16, dtype)
    got = attend(q, k, v, layout, layer=0, window=window)
    assert got.shape == q.shape
    assert len(q) < sum(layout.lengths) - 1000
    expected = attend_packed(*(x[layout.hidden_index] for x in (q, k, v)), layout.lengths, window)
    assert_same(got[layout.hidden_index], expected, min_queries(16, dtype) is not None)


@pytest.mark.parametrize("window", [None, 130])
def test_each_row_asks_once(window):
    """A shared prompt's queries are in its parent's products alone, and every row finds its own among the results."""
    layout = shared_layout(FAMILIES)
    index = layout.portable_index(window, 2)
    asked = torch.cat([blocks.queries for blocks in index.query_blocks])
    num_rows = 2 * len(layout.computed_tokens)  # for each of two key heads
    assert asked[index.output_index].tolist() == list(range(num_rows))
    own = [n - m for n, m in zip(layout.lengths, layout.num_shared, strict=True)]
    size = QUERY_BLOCK_SIZES[-1]
    most = sum(n // size * size + max(16, 2 * (n % size)) for n in own)
    assert len(asked) <= 2 * most, "too many queries that are no token's"


@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_of_shared_rows_are_the_sums_over_those_who_share_them(window):
    """In fp64 the gradient of a shared query, key or value is what autograd sums when each sequence has its copy."""
    layout = shared_layout(FAMILIES)
    leaves = [x.requires_grad_() for x in random_qkv(len(layout.computed_tokens), 4, 2, 8, torch.float64)]
    got = attend(*leaves, layout, layer=0, window=window)[layout.hidden_index]
    expected = attend_packed(*(x[layout.hidden_index] for x in leaves), layout.lengths, window)
    assert_gradients_near(got, expected, leaves, seed=3)


def dense_varlen(q, k, v, cu_q, cu_k, max_q, max_k, window_size):
    """What the fused kernels compute: each sequence's queries are the last of its keys; [left, 0] keys around them."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    own, lengths = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert (sum(own), sum(lengths)) == (len(q), len(k))
    assert (max(own), max(lengths)) == (max_q, max_k)
    assert len(v) == len(k)
    (left, right), out = window_size, []
    assert right == 0
    for q_part, k_part, v_part in zip(q.split(own), k.split(lengths), v.split(lengths), strict=True):
        hidden = q_part.new_zeros(len(k_part) - len(q_part), *q_part.shape[1:])
        window = None if left == -1 else left + 1
        out.append(dense_attention(torch.cat([hidden, q_part]), k_part, v_part, window)[len(hidden) :])
    return torch.cat(out)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernel", ["flash", "varlen", "varlen of torch 2.11"])
def test_what_the_fused_kernels_are_asked_for_is_what_the_portable_one_computes(
    kernel, window, shares, monkeypatch
):
    """Their queries, keys, limits and windows for shared prompts, with a dense softmax in the kernel's place."""

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, causal, window_size):
        assert causal
        assert k.shape[1] == v.shape[1] == 2, "flash-attn shares key heads itself"
        return dense_varlen(q, k, v, cu_q, cu_k, max_q, max_k, window_size)

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
        assert enable_gqa
        assert k.shape[1] == v.shape[1] == 2, "it shares key heads itself"
        return dense_varlen(q, k, v, cu_q, cu_k, max_q, max_k, window_size)

    def old_varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size):
        assert q.shape[1] == k.shape[1] == v.shape[1], "torch 2.11 does not share key heads"
        return dense_varlen(q, k, v, cu_q, cu_k, max_q, max_k, window_size)

    chosen = old_varlen if "2.11" in kernel else varlen
    module = types.SimpleNamespace(flash_attn_varlen_func=flash, varlen_attn=chosen)
    monkeypatch.setitem(
        sys.modules, "flash_attn" if kernel == "flash" else "torch.nn.attention.varlen", module
    )
    layout = shared_layout(FAMILIES) if shares else PackedLayout(RAGGED, CPU)
    qkv = random_qkv(len(layout.computed_tokens), 4, 2, 8, torch.float64)
    got = attention._attend_varlen(*qkv, layout, window, kernel)
    assert_near(got, attend(*qkv, layout, layer=0, window=window), 1e-14)


FLASH_FUNCTIONS = "flash_attn_varlen_func = flash_attn_with_kvcache = print"


@pytest.fixture
def unloaded_flash_attn():
    """It is looked for anew, and what a test has found is forgotten."""
    loaded = sys.modules.pop("flash_attn", None)
    attention.has_flash_attn.cache_clear()
    yield
    attention.has_flash_attn.cache_clear()
    sys.modules.pop("flash_attn", None)
    if loaded is not None:
        sys.modules["flash_attn"] = loaded


@pytest.mark.parametrize(
    ("source", "kernels", "note"),
    [
        (FLASH_FUNCTIONS, ("flash", "flash"), ""),
        ("", ("varlen", "paged"), "cannot import name 'flash_attn_varlen_func'"),
        (None, ("varlen", "paged"), "cannot import name 'flash_attn_varlen_func'"),
        ("raise ImportError('an undefined symbol')", ("varlen", "paged"), "an undefined symbol"),
        ("raise OSError('no such\\nlibrary')", ("varlen", "paged"), "no such library"),
        ("raise RuntimeError('built for another torch')", ("varlen", "paged"), "built for another torch"),
        ("import flash_attn_2_cuda_of_another_torch", ("varlen", "paged"), "No module named"),
    ],
    ids=["whole", "empty", "a folder", "ImportError", "OSError", "RuntimeError", "a missing part"],
)
def test_row_44_a_flash_attn_that_cannot_be_imported_is_not_used_and_said_once(
    source, kernels, note, tmp_path, monkeypatch, capsys, unloaded_flash_attn
):
    """Torch's kernels take its place; a folder of that name is no package."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    if source is not None:
        (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert chosen_kernels() == chosen_kernels() == kernels
    output = capsys.readouterr().out
    assert note in output
    assert output.count("\n") == bool(note)


def test_row_44_without_flash_attn_torchs_kernels_are_used_and_nothing_is_said(capsys, unloaded_flash_attn):
    """It is an extra: that it is absent is no fault."""
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed")
    assert chosen_kernels() == ("varlen", "paged")
    assert capsys.readouterr().out == ""


def chosen_kernels():
    """The kernels for packed streams and for decoding in bf16 on a CUDA device."""
    where = (torch.device("cuda"), torch.bfloat16)
    return kernel_for(*where), attention.decode_kernel_for(*where)


# Decoding.


def make_streams(lengths, num_layers, groups, dim, dtype, seed):
    """For each layer q, k, v of sequences that share their first lengths[0] tokens and differ in the rest."""
    prompt, *rests = lengths
    layers = []
    for layer in range(num_layers):
        shared = random_qkv(prompt, 2 * groups, 2, dim, dtype, seed + 100 * layer)
        own = [
            random_qkv(n, 2 * groups, 2, dim, dtype, seed + 100 * layer + 10 * i + 10)
            for i, n in enumerate(rests)
        ]
        layers.append([tuple(torch.cat(pair) for pair in zip(shared, x, strict=True)) for x in own])
    return [[layer[i] for layer in layers] for i in range(len(rests))]


def gather_rows(streams, layer, spans):
    """q, k, v of the tokens start..end of each stream, end to end."""
    rows = [
        [x[start:end] for x in stream[layer]] for stream, (start, end) in zip(streams, spans, strict=True)
    ]
    return [torch.cat(x) for x in zip(*rows, strict=True)]


def assert_same(got, expected, is_exact):
    """Bitwise where products are batch-invariant; on another BLAS within 1e-5 (fp32) or bf16's rounding."""
    if is_exact:
        assert torch.equal(got, expected)
    else:
        assert_near(got, expected, 1e-5 if got.dtype == torch.float32 else 2e-2)


def packed_rows(streams, windows, lengths):
    """Packed attention over the first lengths[i] tokens of each stream: [stream][layer] -> [L, H, C]."""
    spans = [(0, n) for n in lengths]
    layers = [
        attend_packed(*gather_rows(streams, layer, spans), lengths, window).split(lengths)
        for layer, window in enumerate(windows)
    ]
    return list(zip(*layers, strict=True))


class Decoding:
    """A cache of these layers and what goes through it: rows (stream, number in the cache, packed attention)."""

    def __init__(
        self, windows, groups=2, dim=16, dtype=torch.float32, *, num_tokens=12 * BLOCK, max_sequences=6
    ):
        self.windows, self.shape = windows, (groups, dim, dtype)
        self.is_exact = min_queries(dim, dtype) is not None
        self.cache = KVCache(
            windows,
            num_tokens=num_tokens,
            max_sequences=max_sequences,
            dtype=dtype,
            device=CPU,
            num_kv_heads=2,
            head_dim=dim,
            num_query_groups=groups,
        )

    def start(self, samples, steps):
        """Prefill prompts {length: members}, and fork their members, which have room for this many steps."""
        families, parents = [], []
        for prompt, n in samples.items():
            lengths = (prompt, *([steps] * n))
            streams = make_streams(lengths, len(self.windows), *self.shape, seed=1000 * prompt)
            packed = packed_rows(streams, self.windows, [prompt + steps] * n)
            parents.append((streams[0], self.cache.add(prompt), packed[0]))
            families.append((parents[-1][1], streams, packed))
        self._check_prefill(parents)
        return [
            (stream, parent if i == 0 else self.cache.fork(parent), x)
            for parent, streams, packed in families
            for i, (stream, x) in enumerate(zip(streams, packed, strict=True))
        ]

    def _check_prefill(self, rows):
        """Prefill whole prompts; what comes out must be the first rows of the longer sequences."""
        layout = self.cache.prefill_layout([cached for _, cached, _ in rows])
        spans = [(0, self.length_of(row)) for row in rows]
        self._check(rows, layout, spans)

    def decode(self, rows):
        """Decode one token of each row; what comes out must be its row in the packed attention."""
        for _, cached, _ in rows:
            assert self.cache.extend(cached)
        layout = self.layout_of(rows)
        spans = [(self.length_of(row) - 1, self.length_of(row)) for row in rows]
        assert layout.positions.tolist() == [start for start, _ in spans]
        self._check(rows, layout, spans)

    def _check(self, rows, layout, spans):
        for layer, window in enumerate(self.windows):
            q, k, v = gather_rows([stream for stream, _, _ in rows], layer, spans)
            got = attend(q, k, v, layout, layer=layer, window=window)
            parts = zip(rows, spans, strict=True)
            expected = torch.cat([packed[layer][start:end] for (*_, packed), (start, end) in parts])
            assert_same(got, expected, self.is_exact)

    def layout_of(self, rows):
        return self.cache.decode_layout(torch.tensor([cached for _, cached, _ in rows]))

    def length_of(self, row):
        return length_of(self.cache, row[1])

    def blocks_of(self, rows):
        """For each row the first block and the table of each pool."""
        return [[tables.of_row(cached) for tables in self.cache.tables] for _, cached, _ in rows]


@pytest.mark.parametrize(("groups", "dim"), [(1, 8), (8, 8), (2, 32), (4, 64)])
@pytest.mark.parametrize("windows", [(None, None), (5, None, 5), (128,), (130, 1)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_cached_decode_equals_packed_attention(windows, groups, dim, dtype):
    """Sampling and scoring attend to the same bits: shared prompts, block borders, windows, reused blocks, order."""
    decoding = Decoding(windows, groups, dim, dtype, num_tokens=2560, max_sequences=12)
    cache = decoding.cache
    for pool in cache.pools:  # what an earlier sequence left behind must not be seen
        pool.keys.fill_(77)
        pool.values.fill_(-77)
    steps = 8
    rows = decoding.start({131: 3, 256: 2, 7: 2, 124: 1, 383: 1, 1: 1}, 2 * steps)
    for family_tables in zip(*decoding.blocks_of(rows[:3]), strict=True):
        first, _ = family_tables[0]
        assert first > 0 or len({blocks[0] for _, blocks in family_tables}) == 1, "full blocks are not shared"
    for step in range(steps):
        decoding.decode(rows if step % 2 else rows[::-1])
    for gone in (rows.pop(0), rows.pop(3)):  # the parent of a family that goes on, and a member of another
        cache.free(gone[1])
    rows += decoding.start({150: 1}, steps)
    for _ in range(steps):
        decoding.decode(rows)
    prefixes = packed_rows([stream for stream, _, _ in rows], windows, list(map(decoding.length_of, rows)))
    for prefix, row in zip(prefixes, rows, strict=True):  # a later token moves no earlier row
        for layer in range(len(windows)):
            assert_same(prefix[layer], row[2][layer][: decoding.length_of(row)], decoding.is_exact)


@pytest.mark.parametrize(("groups", "dim"), [(1, 8), (3, 16), (8, 32)])
@pytest.mark.parametrize("windows", [(None,), (300, None), (290,)], ids=str)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
def test_blocks_with_many_users_give_each_the_bits_of_packed_attention(windows, groups, dim, dtype):
    """Groups of nine over three full blocks beside rows that share nothing, some finished and the pool compacted."""
    decoding = Decoding(windows, groups, dim, dtype, num_tokens=60 * BLOCK, max_sequences=30)
    cache = decoding.cache
    poison(cache)
    rows = decoding.start({389: 9, 384: 9, 700: 1, 10: 1, 255: 2}, 10)
    for cached in decoding.layout_of(rows).caches:
        plan = cached.read.index
        assert plan.num_sharing == 9 > plan.num_users
        assert len(plan.shared) >= 4
        assert plan.blocks.shape[1] >= 3
    for _ in range(4):
        decoding.decode(rows)
    for i in (20, 12, 9, 5, 2, 0):  # the parents of both groups among them
        cache.free(rows.pop(i)[1])
    before = decoding.blocks_of(rows)
    cache.compact()
    assert before != decoding.blocks_of(rows), "nothing has moved"
    poison(cache)
    for _ in range(3):
        decoding.decode(rows)
    while len(rows) > 1:  # down to fewer rows than a product must have
        cache.free(rows.pop(-2)[1])
        if len(rows) in (16, 8, 3, 2, 1):
            cache.compact()
            poison(cache)
        if len(rows) in (8, 2, 1):
            decoding.decode(rows)


@pytest.mark.parametrize("windows", [(None,), (130,), (128, None), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_block_held_before_never_reaches_a_result(windows, dtype):
    """Blocks not in use are NaN at every moment: prefills, forks, growth over two borders and newcomers stay exact."""
    steps = 140
    decoding = Decoding(windows, dtype=dtype, num_tokens=60 * BLOCK, max_sequences=20)
    poison(decoding.cache)
    rows = decoding.start({100: 2, 127: 1, 128: 2, 129: 2, 1: 1, 256: 1}, steps)
    for step in range(steps):
        poison(decoding.cache)
        decoding.decode(rows)
        if step in (40, 90):
            decoding.cache.free(rows.pop(-2)[1])
            poison(decoding.cache)
            rows += decoding.start({60 + step: 2}, steps)


def test_a_broken_row_stays_alone_when_decoding():
    """NaN in the pool's first block, which is another row's, reaches no row with fewer blocks than the longest."""
    decoding = Decoding((None,))
    rows = decoding.start({100: 1, 20: 1, 300: 1}, 4)
    decoding.decode(rows)
    for pool in decoding.cache.pools:
        pool.keys[:, 0], pool.values[:, 0] = torch.nan, torch.nan
    decoding.decode(rows[1:])


@pytest.mark.parametrize("window", [None, 128, 1])
def test_a_plan_kept_from_another_step_is_right_for_it(window):
    """A step that changes no block table has the plan of the step before, and its own mask."""
    decoding = Decoding((window,))
    rows = decoding.start({127: 1, 100: 1}, 140)
    plans, tables = [], []
    for _ in range(140):
        decoding.decode(rows)
        plans.append(decoding.layout_of(rows).caches[0].read.index)
        tables.append(decoding.blocks_of(rows))
    for i in range(1, 140):
        assert (plans[i] is plans[i - 1]) == (tables[i] == tables[i - 1])
    assert len({id(plan) for plan in plans}) <= 5, "planned again although no table had changed"


def test_rows_that_hold_the_blocks_of_rows_that_are_gone_read_their_own():
    """Freed and taken again in the same order, the block tables are equal; the tokens are others."""
    decoding = Decoding((None,))
    for step in range(2):
        rows = decoding.start({140 + 3 * step: 2, 20 + 3 * step: 1}, 4)
        decoding.decode(rows)
        assert [blocks for ((_, blocks),) in decoding.blocks_of(rows)] == [[0, 1], [0, 3], [2]]
        for _, cached, _ in rows:
            decoding.cache.free(cached)


@pytest.mark.parametrize("differs_below", [1, 2, 3, 4, 5, 8, 9, 17, 33])
def test_the_probe_finds_the_least_number_of_queries_with_the_bits_of_many(differs_below, monkeypatch):
    """On a library whose products of fewer rows round otherwise it asks for more; where 16 do not do there is none."""

    def bmm(x, y):
        return x @ y * (1 + 1e-6 * (x.shape[1] < differs_below))

    if min_queries.__wrapped__(16, torch.float64) != 1:
        pytest.skip("this machine's fp64 products are not batch-invariant")
    monkeypatch.setattr(torch, "bmm", bmm)
    expected = next((rows for rows in (1, 2, 4, 8, 16) if rows >= differs_below), None)
    assert min_queries.__wrapped__(16, torch.float64) == expected


@pytest.mark.parametrize("varies_with", ["matrices", "layout of keys", "layout of values"])
def test_attention_whose_products_depend_on_how_they_are_called_is_not_batch_invariant(
    varies_with, monkeypatch
):
    """Torch's bf16 products without bf16 instructions do: a run with them does not claim equal logprobs. Pitfall 38."""
    config = cached_model("full", torch.float32).config
    if not config.is_batch_invariant(torch.float32, CPU):
        pytest.skip("this machine's fp32 products are not batch-invariant")

    def bmm(x, y, bmm=torch.bmm):
        is_other = {
            "matrices": len(x) > 1,
            "layout of keys": y.shape[2] >= BLOCK and not y.is_contiguous(),
            "layout of values": y.shape[2] < BLOCK and not y.is_contiguous(),
        }
        return bmm(x.flip(2), y.flip(1)) if is_other[varies_with] else bmm(x, y)

    monkeypatch.setattr(torch, "bmm", bmm)
    min_queries.cache_clear()
    try:
        assert not config.is_batch_invariant(torch.float32, CPU)
    finally:
        min_queries.cache_clear()
