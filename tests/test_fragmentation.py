"""Steps of real sizes reuse the memory of the step before, by a model of torch's caching allocator."""

from pathlib import Path

import pytest

from minirl.plan import choice, needs

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MB = 2**20


@pytest.fixture(scope="module")
def fragmentation():
    """The benchmark that replays the storages of a run's steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import fragmentation

        yield fragmentation


def test_the_model_of_the_allocator_joins_free_neighbours_and_gives_back_free_segments_only(fragmentation):
    """What stays in use inside a freed segment keeps all of it from a larger block."""
    allocator = fragmentation.CachingAllocator(100 * MB)
    cache = allocator.allocate(60 * MB, "main")
    allocator.free(cache)
    parts = [allocator.allocate(20 * MB, "main") for _ in range(3)]
    assert allocator.reserved == 60 * MB
    for part in parts:
        allocator.free(part)
    other_stream = allocator.allocate(30 * MB, "sums")
    assert (allocator.reserved, allocator.used) == (90 * MB, 30 * MB)
    larger = allocator.allocate(66 * MB, "main")
    assert (allocator.reserved, allocator.num_retries) == (96 * MB, 1)
    allocator.free(larger)
    allocator.free(other_stream)
    allocator.allocate(2 * MB, "main")
    with pytest.raises(fragmentation.OutOfMemory, match=r"largest free block 0\.1"):
        allocator.allocate(67 * MB, "main")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["defaults", "long"])
def test_a_second_step_of_1_5b_finds_its_memory_on_one_card_of_80_gb(fragmentation, run):
    """With a kept cache, and with one made again. Peak use equals the plan. Fault 38."""
    work = fragmentation.make_workload("qwen2.5-1.5b", 1, **fragmentation.RUNS[run])
    sizes = fragmentation.auto_sizes(work)
    keeps_cache = choice.can_keep_cache(work, sizes, fragmentation.FREE)
    assert keeps_cache == (run == "defaults")
    allocator = fragmentation.replay(work, num_steps=2)
    planned = needs.peak_bytes(work, sizes, keeps_cache=keeps_cache)
    assert 0.95 * planned <= allocator.most_used <= planned <= choice.USABLE * fragmentation.FREE
