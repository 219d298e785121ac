"""The Triton kernel under its interpreter, on the CPU: what it computes is what the portable kernel computes."""

import pytest
import torch

from minirl.generation import kv_cache
from minirl.kernels import paged_attention
from minirl.model import portable_attention
from support.caches import make_cache, poison
from support.engines import cached_model, make_engine, make_prompt, make_request, run
from support.interpreter import mend_interpreter, needs_interpreter, run_with_compiler
from support.scripts import ROOT

pytestmark = needs_interpreter

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch):
    mend_interpreter(monkeypatch)


FAST_SHAPES = {(1, 1, 16), (100, 3, 80)}
SHAPES = [
    pytest.param(window, groups, dim, marks=[] if (window, groups, dim) in FAST_SHAPES else pytest.mark.slow)
    for window in (None, 1, 100, 200)
    for groups, dim in ((1, 16), (7, 64), (3, 80))
]


@pytest.mark.parametrize(("window", "groups", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_paged_kernel_equals_the_portable_one(window, groups, dim, dtype):
    """Forks, block borders, windows that dropped blocks, shared key heads; what is not seen is not touched."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    cache, rows = make_cache(window, groups, dim, dtype)
    pool, cached = cache.pools[0], cache.decode_layout(torch.tensor(rows)).caches[0]
    read, keys, values = cached.read, pool.keys[0], pool.values[0]
    q = 2 * torch.randn(len(rows), 2 * groups, dim, generator=torch.Generator().manual_seed(1))
    expected = portable_attention.decode(q, keys.float(), values.float(), read.index, read.mask)
    poison(cache, rows)
    wide = torch.full(
        (len(rows), 9), 10**6, dtype=torch.int32
    )  # beyond its blocks a row of the table is not read
    wide[:, : read.blocks.shape[1]] = read.blocks
    for table in (read.blocks, wide[:, : read.blocks.shape[1]]):
        got = paged_attention.decode(q.to(dtype), keys, values, table, read.lengths, window=window)
        assert got.dtype == dtype
        assert (got.float() - expected).norm() <= tolerance * expected.norm()
        assert (got.float() - expected).abs().max() <= 5 * tolerance


@pytest.mark.parametrize("attention", [pytest.param("full", marks=pytest.mark.slow), "mixed"])
def test_padded_steps_read_their_block_tables_with_the_paged_kernel(attention, monkeypatch):
    """The path of CUDA with the kernel interpreted and the graphs called: the portable engine's rollouts, rounded."""
    model = cached_model(attention, torch.float32)
    requests = [
        make_request(make_prompt(length), number=length, member=member, max_new_tokens=2 + 3 * member)
        for length in (5, 126, 150)
        for member in range(2)
    ]
    expected = run(make_engine(model), requests)
    monkeypatch.setattr(kv_cache, "decode_kernel_for", lambda device, dtype: "paged")
    got = {
        r.rollout_id: r
        for r in run(make_engine(model, async_decoding=True, cuda_graphs=True, cache_tokens=640), requests)
    }
    assert len(got) == len(requests)
    for rollout in expected:
        twin = got[rollout.rollout_id]
        assert twin.completion == rollout.completion
        assert (twin.sample_logprobs - rollout.sample_logprobs).abs().max() <= 1e-5


REPRESENTATIVES = ["90 bfloat16 128 7"]
# The hardest of what `paged_resources.py` can be asked for; tensors of float16 are as large as those of bfloat16.
ALL = [
    f"{capability} {dtype} 80,256 8" for capability in (80, 90, 100, 120) for dtype in ("float32", "bfloat16")
]
ALL.append("120 float32 256 1")


@pytest.mark.parametrize(
    "cases", [*REPRESENTATIVES, *(pytest.param(cases, marks=pytest.mark.slow) for cases in ALL)]
)
def test_the_paged_kernel_fits_every_supported_gpu(cases):
    """Compiled without a device, by a process without interpreter: no register is spilled, shared memory suffices."""
    flags = ("--capabilities", "--dtypes", "--dims", "--groups")
    choice = [
        part for flag, values in zip(flags, cases.split(), strict=True) for part in (flag, *values.split(","))
    ]
    done = run_with_compiler(ROOT / "benchmarks" / "paged_resources.py", *choice)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("0 bytes spilled") == (2 if "," in cases else 1)
