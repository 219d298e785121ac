"""The portable kernel against a dense softmax, and decoding from the cache against the packed stream, bit for bit."""

import math

import pytest
import torch

from minirl import numerics
from minirl.attention import PackedLayout, attend, kernel_for
from minirl.kv_cache import KVCache
from minirl.portable import BLOCK

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


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_packed_attention_and_its_gradients_equal_dense_softmax(window, groups):
    """Ragged sequences, block borders, windows and shared key heads: exact in fp64, forward and backward."""
    leaves = [x.requires_grad_() for x in random_qkv(sum(RAGGED), 2 * groups, 2, 8, torch.float64)]
    out = attend_packed(*leaves, RAGGED, window)
    parts = zip(*(x.split(RAGGED) for x in leaves), strict=True)
    expected = torch.cat([dense_attention(*part, window) for part in parts])
    assert_near(out, expected, 1e-14)
    upstream = randn(*out.shape, seed=9, dtype=torch.float64)
    grads, expected_grads = (torch.autograd.grad(x, leaves, upstream) for x in (out, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_near(grad, expected_grad, 1e-13)


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
    assert (out == expected).float().mean() > 0.97  # a product's own order of summing may turn a rounding over


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
    for grad, expected_grad in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (out, expected)), strict=True):
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


def make_streams(lengths, num_layers, groups, dim, dtype, seed):
    """For each layer q, k, v of sequences that share their first lengths[0] tokens and differ in the rest."""
    prompt, *rests = lengths
    layers = []
    for layer in range(num_layers):
        shared = random_qkv(prompt, 2 * groups, 2, dim, dtype, seed + 100 * layer)
        own = [random_qkv(n, 2 * groups, 2, dim, dtype, seed + 100 * layer + 10 * i + 10) for i, n in enumerate(rests)]
        layers.append([tuple(torch.cat(pair) for pair in zip(shared, x, strict=True)) for x in own])
    return [[layer[i] for layer in layers] for i in range(len(rests))]


def gather_rows(streams, layer, spans):
    """q, k, v of the tokens start..end of each stream, end to end."""
    rows = [[x[start:end] for x in stream[layer]] for stream, (start, end) in zip(streams, spans, strict=True)]
    return [torch.cat(x) for x in zip(*rows, strict=True)]


def assert_same(got, expected, is_exact):
    """Bitwise where products are row-invariant; on another BLAS within 1e-5 (fp32) or bf16's rounding."""
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


def prefill_and_check(cache, windows, rows, is_exact):
    """Prefill whole prompts; what comes out must be the first rows of the longer sequences."""
    layout = cache.prefill_layout([cached for _, cached, _ in rows])
    spans = [(0, cached.length) for _, cached, _ in rows]
    for layer, window in enumerate(windows):
        q, k, v = gather_rows([stream for stream, _, _ in rows], layer, spans)
        got = attend(q, k, v, layout, layer=layer, window=window)
        assert_same(got, torch.cat([packed[layer][: cached.length] for _, cached, packed in rows]), is_exact)


def decode_and_check(cache, windows, rows, is_exact):
    """Decode one token of each row; what comes out must be its row in the packed attention."""
    for _, cached, _ in rows:
        assert cache.extend(cached)
    layout = cache.decode_layout([cached for _, cached, _ in rows])
    spans = [(cached.length - 1, cached.length) for _, cached, _ in rows]
    assert layout.positions.tolist() == [start for start, _ in spans]
    for layer, window in enumerate(windows):
        q, k, v = gather_rows([stream for stream, _, _ in rows], layer, spans)
        got = attend(q, k, v, layout, layer=layer, window=window)
        assert_same(got, torch.stack([packed[layer][cached.length - 1] for _, cached, packed in rows]), is_exact)


@pytest.mark.parametrize(("groups", "dim"), [(1, 8), (8, 8), (2, 32), (4, 64)])
@pytest.mark.parametrize("windows", [(None, None), (5, None, 5), (128,), (130, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cached_decode_equals_packed_attention(windows, groups, dim, dtype):
    """Sampling and scoring attend to the same bits: shared prompts, block borders, windows, reused blocks, order."""
    is_exact = numerics.rows_are_invariant([(dim, BLOCK), (BLOCK, dim)], dtype, CPU)
    shape = {"num_kv_heads": 2, "head_dim": dim, "num_query_groups": groups}
    cache = KVCache(windows, num_tokens=2560, max_sequences=12, dtype=dtype, device=CPU, **shape)
    for pool in cache.pools:  # what an earlier sequence left behind must not be seen
        pool.keys.fill_(77)
        pool.values.fill_(-77)
    steps, samples = 8, {131: 3, 256: 2, 7: 2, 124: 1, 383: 1, 1: 1}
    families, parents = [], []
    for prompt, n in samples.items():
        streams = make_streams((prompt, *([2 * steps] * n)), len(windows), groups, dim, dtype, seed=1000 * prompt)
        packed = packed_rows(streams, windows, [prompt + 2 * steps] * n)
        parents.append((streams[0], cache.add(prompt), packed[0]))
        families.append([parents[-1], *((stream, None, x) for stream, x in zip(streams[1:], packed[1:], strict=True))])
    prefill_and_check(cache, windows, parents, is_exact)
    rows = [
        (stream, cached or cache.fork(family[0][1]), packed) for family in families for stream, cached, packed in family
    ]
    for tables in zip(*(cached.tables for _, cached, _ in rows[:3]), strict=True):
        assert tables[0].first > 0 or len({table.blocks[0] for table in tables}) == 1, "full blocks are not shared"
    for step in range(steps):
        decode_and_check(cache, windows, rows if step % 2 else rows[::-1], is_exact)
    for gone in (rows.pop(0), rows.pop(3)):  # the parent of a family that goes on, and a member of another
        cache.free(gone[1])
    newcomer = make_streams((150, steps), len(windows), groups, dim, dtype, seed=5)
    late = (newcomer[0], cache.add(150), packed_rows(newcomer, windows, [150 + steps])[0])
    prefill_and_check(cache, windows, [late], is_exact)
    rows.append(late)
    for _ in range(steps):
        decode_and_check(cache, windows, rows, is_exact)
    lengths = [cached.length for _, cached, _ in rows]
    prefixes = packed_rows([stream for stream, _, _ in rows], windows, lengths)
    for prefix, (_, cached, packed) in zip(prefixes, rows, strict=True):  # a later token moves no earlier row
        for layer in range(len(windows)):
            assert_same(prefix[layer], packed[layer][: cached.length], is_exact)
