"""Where the CPU seconds of generate and of update go, by kind of work. On one rank, on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/profile_step.py MODEL [--dtype bfloat16]

Steps without torch's profiler give the totals, the same step again under it the seconds inside operators: their self
time, which is wall time, times CPU / wall of that step. What is left of the total is Python, dispatch between operators
and the freeing of memory. In generate the operators of `sample` count as sampling, and those outside both it and the
model as the engine's; the rest is told apart by operator, as in update. The floor is the layers' matrix products alone,
at the same row counts in the same order, back to back; in update with the two products of backward.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import torch
from grpo_step import GrpoLoop, make_parser
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile, record_function
from workload import print_result

import minirl.generation.engine
from minirl.model.transformer import Transformer
from minirl.ranks import process_group
from minirl.training.sharded_model import ShardedModel

REPEATS, TOP = 3, 6
SAMPLE, MODEL, OTHER = "minirl::sample", "minirl::model", "views, allocations, others"
KINDS = {  # by an operator's name, without aten:: and a last underscore
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
FSDP = ("FSDP::", "fsdp::", "c10d::", "gloo:", "Redistribute", "PythonSubclass", "RegisterPostBackward")


class LayerProducts:
    """The row counts that pass the layers, call by call, and the time of the layers' products alone."""

    def __init__(self, policy: ShardedModel):
        self.layers, self.rows = policy.decoder.model.layers, list[int]()
        for layers in (self.layers, policy.module.model.layers):
            layers[0].register_forward_pre_hook(lambda module, args: self.rows.append(len(args[0])))

    @torch.no_grad()
    def floor(self, *, backward: bool) -> float:
        """CPU seconds of the products for the rows so far."""
        weights = [weight for weight in self.layers.parameters() if weight.ndim == 2]
        inputs = {(n, w.shape[1]): w.new_ones(n, w.shape[1]) for n in set(self.rows) for w in weights}
        for counts in (set(self.rows), self.rows):  # a warm-up first
            start = time.process_time()
            for n in counts:
                for weight in weights:
                    x = inputs[n, weight.shape[1]]
                    out = linear(x, weight)
                    if backward:
                        torch.mm(out, weight)
                        torch.mm(out.t(), x)
        return time.process_time() - start


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process in `work`."""
    start = time.process_time()
    work()
    return time.process_time() - start


def kind_of(name: str, region: str | None, outside: str | None) -> str:
    """The kind of an operator in a region; outside both regions it is `outside`, if that is given."""
    if name.startswith(FSDP):
        return "FSDP"
    if region != MODEL and (kind := "sampling" if region == SAMPLE else outside):
        return kind
    if "autograd::" in name or ("Backward" in name and not name.startswith("aten::")):
        return "autograd nodes"
    return KIND_OF.get(name.removeprefix("aten::").removesuffix("_"), OTHER)


def by_kind(work: Callable[[], object], *, outside: str | None) -> tuple[Counter, Counter]:
    """CPU seconds in operators by kind, and by name of those that are of no kind."""
    kinds, others = Counter[str](), Counter[str]()
    with (
        patch.object(
            minirl.generation.engine, "sample", record_function(SAMPLE)(minirl.generation.engine.sample)
        ),
        patch.object(Transformer, "forward", record_function(MODEL)(Transformer.forward)),
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled,
    ):
        wall = time.perf_counter()
        cpu_share = cpu_seconds(work) / (time.perf_counter() - wall)
    for event in profiled.events():
        place = event
        while place is not None and place.name not in (SAMPLE, MODEL):
            place = place.cpu_parent
        if event is not place:
            kind = kind_of(event.name, place and place.name, outside)
            seconds = event.self_cpu_time_total / 1e6 * cpu_share
            kinds[kind] += seconds
            if kind == OTHER:
                others[event.name] += seconds
    del profiled, event, place
    gc.collect()  # a million events in cycles, which would be swept in the next phase
    return kinds, others


def report(
    phase: str, unit: str, count: float, total: float, floor: float, found: tuple[Counter, Counter]
) -> dict:
    """Print a phase's table, in ms per `unit` of which there are `count`; returns its part of the result."""
    kinds, others = found
    kinds["Python, dispatch, freeing"] = total - kinds.total()
    print(f"\n| {phase} | ms per {unit} | share |\n|---|---|---|")
    for name, seconds in [
        *kinds.most_common(),
        ("total", total),
        ("floor: the layers' products alone", floor),
    ]:
        print(f"| {name} | {1e3 * seconds / count:.3f} | {seconds / total:.1%} |")
    print(
        f"{OTHER}:", ", ".join(f"{name} {s / total:.1%}" for name, s in others.most_common(TOP)), flush=True
    )
    names = {kind: kind.lower().replace(",", "").replace(" ", "_") for kind in kinds}
    shares = {f"{phase}_{names[kind]}_frac": seconds / total for kind, seconds in kinds.items()}
    return {f"{phase}_ms": 1e3 * total / count, f"{phase}_floor_ms": 1e3 * floor / count, **shares}


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(lr=0.0)  # so that every run does the same
    args = parser.parse_args()
    loop = GrpoLoop(args)
    products = LayerProducts(loop.policy)
    rollouts = loop.generate(0)
    num_steps = loop.engine.stats.decode_steps
    batch, microbatches = loop.score(rollouts, loop.reward(rollouts))

    def update() -> dict[str, float]:
        loop.backward(batch, microbatches)
        return loop.step()

    update()
    works = {"generate": lambda: loop.generate(0), "update": update}
    units = {"generate": ("decode step", num_steps), "update": ("1000 tokens", len(batch.tokens) / 1e3)}
    times = {}
    for phase, work in works.items():  # all before the profiler, which leaves much behind
        products.rows.clear()
        total = median(cpu_seconds(work) for _ in range(REPEATS))
        times[phase] = (total, products.floor(backward=phase == "update") / REPEATS)
    result: dict[str, float] = {}
    for phase, work in works.items():
        found = by_kind(work, outside="engine" if phase == "generate" else None)
        result |= report(phase, *units[phase], *times[phase], found)
    print_result(what="minirl_profile_step", dtype=args.dtype, decode_steps=num_steps, **result)


if __name__ == "__main__":
    main()
    process_group.stop()
