"""Break down the CPU seconds of generate and update by kind of work, on one CPU rank.

    OMP_NUM_THREADS=1 python benchmarks/profile_step.py MODEL [--dtype bfloat16]

Totals come from steps without torch's profiler. Seconds inside operators come from the same step under the profiler:
the operators' self time, which is wall time, scaled by that step's CPU / wall ratio. The rest of the total is Python,
dispatch between operators and freeing memory. In generate, operators inside `sample` count as sampling, and operators
outside both `sample` and the model count as the engine's; all others are grouped by operator, as in update.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

from grpo_step import GrpoLoop, make_step_parser
from torch.profiler import ProfilerActivity, profile, record_function
from workload import print_result

import minirl.generation.engine
from minirl.generation.sampling import sample
from minirl.model.transformer import Transformer
from minirl.ranks import launch

REPEATS = 3  # steps without the profiler
NUM_LISTED = 6  # unclassified operators to list by name
SAMPLE = "minirl::sample"
MODEL = "minirl::model"
OTHER = "views, allocations, others"
# Operators per kind of work, without "aten::" and the trailing underscore of in-place operators.
KINDS = {
    "matrix products": "mm addmm",
    "attention products": "bmm baddbmm",
    "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
    "copies and gathers": "copy index_select index _index_put_impl cat gather scatter scatter_add index_add "
    "masked_fill fill zero embedding_dense_backward",
    "pointwise and sums": "mul add sub div silu silu_backward rsqrt pow exp neg mean sum where maximum clamp gt lt le "
    "ge eq ne logical_and bitwise_and bitwise_or abs expm1 any amax cumsum",
    "optimizer": "_fused_adamw linalg_vector_norm Optimizer.step#AdamW.step",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
FSDP_PREFIXES = (
    "FSDP::",
    "fsdp::",
    "c10d::",
    "gloo:",
    "Redistribute",
    "PythonSubclass",
    "RegisterPostBackward",
)


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds that this process spends in `work`."""
    start = time.process_time()
    work()
    return time.process_time() - start


def kind_of(name: str, region: str | None, outside: str | None) -> str:
    """Return the kind of an operator. region: SAMPLE or MODEL if the operator ran inside such a region.

    outside: the kind of operators outside both regions, or None to group such operators by name.
    """
    if name.startswith(FSDP_PREFIXES):
        return "FSDP"
    if region == SAMPLE:
        return "sampling"
    if region is None and outside is not None:
        return outside
    if "autograd::" in name or ("Backward" in name and not name.startswith("aten::")):
        return "autograd nodes"
    return KIND_OF.get(name.removeprefix("aten::").removesuffix("_"), OTHER)


def region_of(event: Any) -> Any:
    """Return the innermost SAMPLE or MODEL event that is or contains a profiler event, or None."""
    while event is not None and event.name not in (SAMPLE, MODEL):
        event = event.cpu_parent
    return event


def by_kind(work: Callable[[], object], *, outside: str | None) -> tuple[Counter, Counter]:
    """Return the CPU seconds per kind of operator, and per name for unclassified operators."""
    kinds: Counter[str] = Counter()
    others: Counter[str] = Counter()
    marked_sample = record_function(SAMPLE)(sample)
    marked_forward = record_function(MODEL)(Transformer.forward)
    with (
        patch.object(minirl.generation.engine, "sample", marked_sample),
        patch.object(Transformer, "forward", marked_forward),
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled,
    ):
        wall = time.perf_counter()
        cpu_s = cpu_seconds(work)
        cpu_share = cpu_s / (time.perf_counter() - wall)
    for event in profiled.events():
        region = region_of(event)
        if event is region:  # the region itself, not an operator
            continue
        kind = kind_of(event.name, None if region is None else region.name, outside)
        seconds = event.self_cpu_time_total / 1e6 * cpu_share
        kinds[kind] += seconds
        if kind == OTHER:
            others[event.name] += seconds
    # Collect the million events in reference cycles now, or the next phase would pay for it.
    del profiled, event, region
    gc.collect()
    return kinds, others


def report(
    phase: str, unit: str, count: float, total: float, found: tuple[Counter, Counter]
) -> dict[str, float]:
    """Print a phase's table in ms per `unit` (`count` units in all), and return its part of the result.

    total: CPU seconds of the phase. found: the result of `by_kind`.
    """
    kinds, others = found
    kinds["Python, dispatch, freeing"] = total - kinds.total()
    result = {f"{phase}_ms": 1e3 * total / count}
    print(f"\n| {phase} | ms per {unit} | share |\n|---|---|---|")
    for name, seconds in [*kinds.most_common(), ("total", total)]:
        print(f"| {name} | {1e3 * seconds / count:.3f} | {seconds / total:.1%} |")
    listed = [f"{name} {seconds / total:.1%}" for name, seconds in others.most_common(NUM_LISTED)]
    print(f"{OTHER}:", ", ".join(listed), flush=True)
    for kind, seconds in kinds.items():
        name = kind.lower().replace(",", "").replace(" ", "_")
        result[f"{phase}_{name}_frac"] = seconds / total
    return result


def main() -> None:
    parser = make_step_parser(__doc__)
    parser.set_defaults(lr=0.0)  # so that all runs are identical
    args = parser.parse_args()
    loop = GrpoLoop(args)
    rollouts = loop.generate(0)
    num_steps = loop.engine.stats.decode_steps
    batch, microbatches = loop.score(rollouts, loop.reward(rollouts))

    def update() -> dict[str, float]:
        loop.backward(batch, microbatches)
        return loop.step()

    def generate() -> object:
        return loop.generate(0)

    update()  # warm-up
    # Take all timings before profiling, which leaves much memory allocated.
    generate_s = median(cpu_seconds(generate) for _ in range(REPEATS))
    update_s = median(cpu_seconds(update) for _ in range(REPEATS))
    found = by_kind(generate, outside="engine")
    result = report("generate", "decode step", num_steps, generate_s, found)
    found = by_kind(update, outside=None)
    result |= report("update", "1000 tokens", len(batch.tokens) / 1e3, update_s, found)
    print_result(what="minirl_profile_step", dtype=args.dtype, decode_steps=num_steps, **result)


if __name__ == "__main__":
    launch.run(main)
