"""The Triton kernel, run by Triton's interpreter on the CPU, computes the same as the portable kernel."""

import pytest
import torch

from support.caches import decoded_both_ways
from support.interpreter import mend_interpreter, needs_interpreter, run_with_compiler
from support.marks import slow
from support.scripts import ROOT

pytestmark = needs_interpreter


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch):
    mend_interpreter(monkeypatch)


@pytest.mark.parametrize(
    ("window", "groups", "dim"), [(1, 1, 16), (100, 3, 80), slow(None, 7, 64), slow(200, 7, 64)]
)
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=str)
def test_the_paged_kernel_equals_the_portable_one(window, groups, dim, dtype):
    """Covers forks, block borders, windows and shared key heads. The kernel reads no unseen key or table column."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    some = (0, 2, 3, 4, 6, 9)
    got, expected = decoded_both_ways(torch.device("cpu"), window, groups, dim, dtype, some)
    assert got.dtype == dtype
    assert (got.float() - expected).norm() <= tolerance * expected.norm()
    assert (got.float() - expected).abs().max() <= 5 * tolerance


# The hardest cases of `paged_resources.py`, on all devices: other groups take the same registers, float16 takes as many
# as bfloat16, and float32 takes the most at the largest dimension. Dimension 80 is masked.
@pytest.mark.parametrize(
    ("dtype", "dims"), [slow("float32", "256"), slow("bfloat16", "80 256")], ids=["float32", "bfloat16"]
)
def test_the_paged_kernel_fits_every_supported_gpu(dtype, dims):
    """Compiled without a device or the interpreter, the kernel spills no register and fits into shared memory."""
    asked = f"--dtypes {dtype} --groups 8 --dims {dims}"
    done = run_with_compiler(ROOT / "benchmarks" / "paged_resources.py", *asked.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 bytes spilled") == 4 * len(dims.split())
