"""Portable attention equals a dense softmax, and decoding from the cache equals packed attention bit for bit."""

import importlib.util
import itertools
import math
import sys
import types
from unittest import mock

import pytest
import torch

from minirl.model import attention, batch_invariance, portable_attention
from minirl.model.attention import PackedLayout, Sequence, attend, kernel_for
from minirl.model.portable_attention import BLOCK, min_invariant_queries
from minirl.model.transformer import is_batch_invariant
from support.caches import decode_layout, length_of, make_cache, poison
from support.engines import CPU, cached_model
from support.layouts import shared_layout
from support.marks import slow
from support.tensors import randn

RAGGED = (1, 127, 128, 129, 300, 2, 257)
WINDOWS = [None, 1, 5, 128, 130]


def random_qkv(num_tokens, heads, dim, dtype=torch.float32):
    """Return random queries, keys and values. Large queries make the softmax peaked, so every mask matters."""
    shapes = (heads, 2, 2)
    q, k, v = (randn(num_tokens, n, dim, seed=i) for i, n in enumerate(shapes))
    return (2 * q).to(dtype), k.to(dtype), v.to(dtype)


def dense_attention(q, k, v, window):
    """Attend within one sequence, q [L, H, C] and k, v [L, K, C], with the full score matrix and repeated heads."""
    length, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q, k) / math.sqrt(dim)
    age = torch.arange(length)[:, None] - torch.arange(length)
    visible = (age >= 0) & (age < (length if window is None else window))
    probs = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khc->qhc", probs, v)


def attend_packed(q, k, v, lengths, window):
    return attend(q, k, v, PackedLayout(tuple(map(Sequence, lengths)), CPU), layer=0, window=window)


def assert_near(got, expected, tolerance):
    assert got.shape == expected.shape
    assert (got.double() - expected.double()).norm() <= tolerance * expected.double().norm()


def assert_gradients_near(got, expected, leaves, seed):
    upstream = randn(*got.shape, seed=seed, dtype=torch.float64)
    grads = (torch.autograd.grad(x, leaves, upstream) for x in (got, expected))
    for grad, expected_grad in zip(*grads, strict=True):
        assert_near(grad, expected_grad, 1e-13)


ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 7e-3}


@pytest.mark.parametrize(
    ("dtype", "lengths", "window", "groups"),
    [
        *itertools.product([torch.float64], [RAGGED], WINDOWS, [1, 2, 8]),
        *itertools.product([torch.float64], [(0,), (0, 3, 0)], [None], [2]),
        *itertools.product([torch.float32, torch.bfloat16], [RAGGED], [None, 130], [2]),
    ],
    ids=str,
)
def test_packed_attention_and_its_gradients_equal_dense_softmax(dtype, lengths, window, groups):
    """Covers ragged sequences, block borders, windows, shared key heads and no tokens. fp64 gradients are exact too.

    fp32 and bf16 outputs differ from the exact result for the same inputs only by rounding.
    """
    dim = 8 if dtype == torch.float64 else 32
    leaves = [x.requires_grad_() for x in random_qkv(sum(lengths), 2 * groups, dim, dtype)]
    out = attend_packed(*leaves, lengths, window)
    parts = zip(*(x.double().split(lengths) for x in leaves), strict=True)
    expected = torch.cat([dense_attention(*part, window) for part in parts])
    assert out.dtype == dtype
    assert_near(out, expected, ROUNDING[dtype])
    if dtype == torch.float64:
        assert_gradients_near(out, expected, leaves, seed=9)


@pytest.mark.parametrize("window", [None, 130])
def test_non_finite_values_stay_in_their_sequence(window):
    """NaN in one sequence never reaches other sequences, whose results keep every bit. Pitfall 2."""
    q, k, v = random_qkv(sum(RAGGED), 4, 8)
    expected = attend_packed(q, k, v, RAGGED, window).split(RAGGED)
    for broken in range(len(RAGGED)):
        k_bad, v_bad = k.clone(), v.clone()
        k_bad.split(RAGGED)[broken].fill_(torch.nan)
        v_bad.split(RAGGED)[broken].fill_(torch.nan)
        got = attend_packed(q, k_bad, v_bad, RAGGED, window).split(RAGGED)
        assert not got[broken].isfinite().any()
        assert all(torch.equal(got[i], expected[i]) for i in range(len(RAGGED)) if i != broken)


# Fused kernels.


def dense_varlen(q, k, v, cu_q, cu_k, max_q, max_k, window_size):
    """Return the fused kernels' result: queries belong to a sequence's last keys, and the window is [left, 0]."""
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
    """Covers queries, keys, limits and windows for shared prompts; a dense softmax replaces each fused kernel."""

    def flash(q, k, *others, causal, window_size):
        assert causal
        assert k.shape[1] == 2, "flash-attn shares key heads itself"
        return dense_varlen(q, k, *others, window_size)

    def varlen(q, k, *others, window_size, enable_gqa=False):
        assert enable_gqa
        assert k.shape[1] == 2, "it shares key heads itself"
        return dense_varlen(q, k, *others, window_size)

    def old_varlen(q, k, *others, window_size):
        assert k.shape[1] == q.shape[1], "torch 2.11 does not share key heads"
        return dense_varlen(q, k, *others, window_size)

    module = types.SimpleNamespace(
        flash_attn_varlen_func=flash, varlen_attn=old_varlen if "2.11" in kernel else varlen
    )
    name = "flash_attn" if kernel == "flash" else "torch.nn.attention.varlen"
    monkeypatch.setitem(sys.modules, name, module)
    layout = shared_layout() if shares else PackedLayout(tuple(map(Sequence, RAGGED)), CPU)
    qkv = random_qkv(len(layout.computed_tokens), 4, 8, torch.float64)
    got = attention._attend_varlen(*qkv, layout, window, kernel)
    assert_near(got, attend(*qkv, layout, layer=0, window=window), 1e-14)


@pytest.mark.parametrize(
    ("source", "kernel", "note"),
    [
        ("flash_attn_varlen_func = print", "flash", ""),
        ("", "varlen", "cannot import name 'flash_attn_varlen_func'"),
        (None, "varlen", "cannot import name 'flash_attn_varlen_func'"),
        ("raise OSError('no such\\nlibrary')", "varlen", "no such library"),
        ("import flash_attn_2_cuda_of_another_torch", "varlen", "No module named"),
        ("absent", "varlen", ""),
    ],
    ids=["whole", "empty", "a folder", "OSError", "a missing part", "absent"],
)
def test_row_44_a_flash_attn_that_cannot_be_imported_is_not_used_and_said_once(
    source, kernel, note, tmp_path, monkeypatch, capsys
):
    """Torch's kernel replaces flash-attn. A folder without code is no package; an absent package prints nothing.

    Fused kernels run only 16-bit dtypes on CUDA, and not all head sizes.
    """
    cuda = torch.device("cuda")
    if source == "absent" and importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed")
    if source != "absent":
        package = tmp_path / "flash_attn"
        package.mkdir()
        if source is not None:
            (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    attention.has_flash_attn.cache_clear()
    with mock.patch.dict(sys.modules):
        sys.modules.pop("flash_attn", None)
        for _ in range(2):
            assert kernel_for(cuda, torch.bfloat16, 256) == kernel
        others = [(cuda, torch.float32, 64), (CPU, torch.bfloat16, 64)]
        others += [(cuda, torch.bfloat16, head_dim) for head_dim in (60, 264)]
        assert {kernel_for(*other) for other in others} == {"portable"}
    attention.has_flash_attn.cache_clear()
    output = capsys.readouterr().out
    assert note in output
    assert output.count("\n") == bool(note)


# Decoding.


def assert_same(got, expected, is_exact):
    """Assert bitwise equality if matmuls are batch-invariant, else equality within 1e-5 (fp32) or bf16's rounding."""
    if is_exact:
        assert torch.equal(got, expected)
    else:
        assert_near(got, expected, 1e-5 if got.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("window", "groups", "dim"), [(None, 1, 8), (5, 8, 8), (100, 2, 16), slow(1, 4, 64), slow(None, 3, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_from_the_cache_has_the_bits_of_packed_attention(window, groups, dim, dtype):
    """Covers groups of 17 that share full blocks, rows that share nothing, any order, single rows and moved blocks.

    Free blocks hold NaN, and later another row's keys; neither reaches a result.
    """
    cache, rows = make_cache(window, groups, dim, dtype)
    keys, values = cache.pool.layers[0]
    poison(cache)

    def check(chosen):
        index, mask = decode_layout(cache, chosen).metadata[window]
        q = randn(len(chosen), 2 * groups, dim, seed=len(chosen), dtype=dtype)
        got = portable_attention.decode(q, keys, values, index, mask)
        for i, row in enumerate(chosen):
            blocks, num_keys = cache.blocks.sequence_blocks(row), length_of(cache, row)
            k = keys[blocks].permute(0, 3, 1, 2).flatten(0, 1)[:num_keys]
            v = values[blocks].transpose(1, 2).flatten(0, 1)[:num_keys]
            expected = attend_packed(q[i].expand(num_keys, -1, -1), k, v, [num_keys], window)[-1]
            assert_same(got[i], expected, min_invariant_queries(dim, dtype) is not None)
        return len(index.block_sets)

    for chosen in (rows, rows[::-1], rows[3:6], rows[-1:]):
        num_sets = check(chosen)
        assert num_sets == 1 + (window != 1) or len(chosen) < 17
    for row in rows[1:8:3]:
        cache.blocks.remove(row)
    left = [row for row in rows if row not in rows[1:8:3]]
    poison(cache)
    check(left)
    keys[0], values[0] = torch.nan, torch.nan  # the block of the first row
    check(left[1:])


FAULTS = {
    "below 3 queries": (lambda x, y: x.shape[1] < 3, 4),
    "below 16 queries": (lambda x, y: x.shape[1] < 16, 16),
    "below 17 queries": (lambda x, y: x.shape[1] < 17, None),
    "matrices": (lambda x, y: len(x) > 1, None),
    "layout of keys": (lambda x, y: y.shape[2] >= BLOCK and not y.is_contiguous(), None),
    "layout of values": (lambda x, y: y.shape[2] < BLOCK and not y.is_contiguous(), None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_probe_finds_the_least_number_of_queries_with_the_bits_of_many(name, monkeypatch):
    """In each case, the matrix library rounds some matmuls differently. None means that 16 queries are too few.

    Without bf16 instructions, torch's bf16 matmuls differ too, and a run does not claim equal logprobs. Pitfall 38.
    """
    has_fault, expected = FAULTS[name]
    config = cached_model("full", torch.float32).config
    if not is_batch_invariant(config, torch.float32, CPU):
        pytest.skip("this machine's fp32 matmuls are not batch-invariant")

    least = min_invariant_queries(config.head_dim, torch.float32)

    def bmm(x, y, bmm=torch.bmm):
        return bmm(x.flip(2), y.flip(1)) if has_fault(x, y) else bmm(x, y)

    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(batch_invariance, "_measurements", {})
    assert min_invariant_queries(config.head_dim, torch.float32) == (expected and max(expected, least))
    assert is_batch_invariant(config, torch.float32, CPU) == (expected is not None)
