"""Does each step of a real size find its memory among the blocks that the previous step left? Counted without a GPU.

    python benchmarks/fragmentation.py [--shape qwen2.5-1.5b]

Meta tensors go through the model's own code at the sizes that `auto` chooses for cards of 80 GB, and each storage is
taken from a model of torch's caching allocator: it cuts blocks out of segments, merges free neighbours, and gives back
to the card only segments in which nothing is used. Segments here have fixed sizes, the harder case; runs ask for
expandable ones, whose unused parts can all be given back. The memory of FSDP and CUDA graphs is written down here.
"""

import argparse
import bisect
import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from launches import COMMON, META, SHAPES, counting, tensors_in
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workload import print_result

from minirl.generation.engine import Engine
from minirl.model.attention import PackedLayout
from minirl.model.families import config_from_dict
from minirl.model.rotation import rope_table
from minirl.model.transformer import Transformer
from minirl.plan import choice, needs
from minirl.plan.workload import Sizes, Workload, enough_tokens
from minirl.training.batch import Batch
from minirl.training.scoring import score_batch
from minirl.training.sharded_model import ShardedModel

MB = 2**20
FREE = 79.1 * 2**30 * 0.985  # bytes of a card of 80 GB once CUDA has started
PREFILLED = 512  # tokens of each prompt
SEQUENCE = 256  # tokens of each sequence of a microbatch
MICROBATCHES = (1.0, 0.93, 0.98)  # of an update, as parts of the largest
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": COMMON | SHAPES["qwen2.5-0.5b"],
    "qwen2.5-1.5b": COMMON | SHAPES["qwen2.5-1.5b"] | {"num_hidden_layers": 28},
    "qwen2.5-7b": COMMON | SHAPES["qwen2.5-7b"] | {"num_hidden_layers": 28},
    "qwen2.5-14b": COMMON
    | SHAPES["qwen2.5-7b"]
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}
# Models and the ranks that they are sharded over.
RANKS = (("qwen2.5-0.5b", 1), ("qwen2.5-1.5b", 1), ("qwen2.5-1.5b", 8), ("qwen2.5-7b", 8), ("qwen2.5-14b", 8))
RUNS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "reference": {"has_reference": True},
    "long": {"num_prompts": 256, "group_size": 16, "max_new_tokens": 8192},
}


class OutOfMemory(Exception):
    """No segment has room for a block, and the card has none for a further segment."""


@dataclass(eq=False)
class Block:
    """A part of a segment, with its neighbours there. pool: stream, and whether it is one of small blocks."""

    size: int
    pool: tuple[str, bool]
    number: int
    before: "Block | None" = None
    after: "Block | None" = None
    is_free: bool = False


class CachingAllocator:
    """torch's `CUDACachingAllocator` with its default settings, on a card with `capacity` free bytes."""

    def __init__(self, capacity: float):
        self.capacity = capacity
        self.reserved = self.most_reserved = self.used = self.most_used = self.num_retries = 0
        self._num_blocks = 0
        # Free blocks by pool, as (size, number, block), the smallest first.
        self._free: dict[tuple[str, bool], list[tuple[int, int, Block]]] = {}

    def allocate(self, num_bytes: int, stream: str) -> Block:
        """Return a block of at least this many bytes, from the smallest free one that fits or a new segment."""
        size = max(512, math.ceil(num_bytes / 512) * 512)
        is_small = size <= MB
        pool = (stream, is_small)
        free = self._free.setdefault(pool, [])
        place = bisect.bisect_left(free, (size, 0))
        block = free.pop(place)[2] if place < len(free) else self._new_segment(size, pool)
        rest = block.size - size
        if rest >= 512 if is_small else rest > MB:
            left = self._block(rest, pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = left
            block.after, block.size = left, size
            self._insert(left)
        block.is_free = False
        self.used += block.size
        self.most_used = max(self.most_used, self.used)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its segment, merged with the free neighbours."""
        self.used -= block.size
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._remove(before)
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            self._remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self._insert(block)

    def _new_segment(self, size: int, pool: tuple[str, bool]) -> Block:
        segment = 2 * MB if pool[1] else 20 * MB if size < 10 * MB else math.ceil(size / (2 * MB)) * 2 * MB
        if self.reserved + segment > self.capacity:
            self.num_retries += 1
            self._release_segments()
        if self.reserved + segment > self.capacity:
            largest = max((free[-1][0] for free in self._free.values() if free), default=0)
            raise OutOfMemory(
                f"{size / 1e9:.1f} GB asked, {self.used / 1e9:.1f} used and {self.reserved / 1e9:.1f} reserved of "
                f"{self.capacity / 1e9:.1f}, largest free block {largest / 1e9:.1f}"
            )
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        return self._block(segment, pool)

    def _release_segments(self) -> None:
        """Give segments in which nothing is used back to the card."""
        for free in self._free.values():
            self.reserved -= sum(size for size, _, block in free if block.before is block.after is None)
            free[:] = [entry for entry in free if entry[2].before or entry[2].after]

    def _block(self, size: int, pool: tuple[str, bool], **neighbours: Block | None) -> Block:
        self._num_blocks += 1
        return Block(size, pool, self._num_blocks, **neighbours)

    def _insert(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.pool], (block.size, block.number, block))

    def _remove(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect.bisect_left(free, (block.size, block.number)))


class StorageTracker(TorchDispatchMode):
    """Takes the storage of each meta tensor that is made from the allocator, until the storage is gone."""

    def __init__(self, allocator: CachingAllocator):
        super().__init__()
        self.allocator = allocator
        self.stream = "main"
        self._blocks: dict[int, Block] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.track(tensor)
        return result

    def track(self, tensor: Tensor) -> None:
        """Take a tensor's storage from the allocator, unless it was taken already."""
        storage = tensor.untyped_storage()
        if tensor.is_meta and storage.nbytes() and id(storage) not in self._blocks:
            self._blocks[id(storage)] = self.allocator.allocate(storage.nbytes(), self.stream)
            weakref.finalize(storage, self._free, id(storage))

    def _free(self, key: int) -> None:
        self.allocator.free(self._blocks.pop(key))

    @contextlib.contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        """Memory is taken from another stream's pool, which shares no segment with the main stream's."""
        self.stream = stream
        yield
        self.stream = "main"


class Replay:
    """A rank's tensors in a run of GRPO, on the meta device. Made and used while the tracker is active."""

    def __init__(self, work: Workload, sizes: Sizes, tracker: StorageTracker, *, keeps_cache: bool):
        self.work, self.sizes, self.tracker = work, sizes, tracker
        with META:
            self.model = Transformer(work.policy, recompute_layers=sizes.recompute_layers).to(work.dtype)
        self.parameters = list(self.model.parameters())
        # FSDP's units: each layer, and the root with all other parameters.
        of_layers = [list(layer.parameters()) for layer in self.model.model.layers]
        in_layers = {parameter for unit in of_layers for parameter in unit}
        self.units = [*of_layers, [p for p in self.parameters if p not in in_layers]]
        self.masters = {p: torch.nn.Parameter(empty(*self._shard(p))) for p in self.parameters}
        for parameter in self.parameters:
            tracker.track(parameter.detach())
        named = SimpleNamespace(masters={str(i): master for i, master in enumerate(self.masters.values())})
        self.optimizer = ShardedModel.make_optimizer(named, betas=(0.9, 0.95), weight_decay=0.0)
        self.engine = Engine(
            self.model,
            max_running_requests=sizes.max_running_requests,
            cache_tokens=sizes.cache_tokens,
            dtype=work.dtype,
            device=META,
            cuda_graphs=True,
            keeps_cache=keeps_cache,
        )
        self.graphs: Tensor | None = None
        self.summed: dict[
            Tensor, Tensor
        ] = {}  # fp32 gradients of several microbatches, if they are not sharded
        self.sums_always = sizes.shard_gradients and work.can_shard_gradients

    def step(self) -> None:
        """Generate, score, update and refresh."""
        self.generate()
        self.score()
        for i, part in enumerate(MICROBATCHES):
            self.backward(part, is_last=i == len(MICROBATCHES) - 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        largest = max(self.parameters, key=Tensor.numel)
        empty(*largest.shape, dtype=largest.dtype)  # gathered to refresh it

    @torch.no_grad()
    def generate(self) -> None:
        """Allocate the cache, prefill and capture graphs."""
        if self.engine._cache is None:
            self.engine._allocate()
        layout = PackedLayout((PREFILLED,) * (needs.PREFILL_TOKENS // PREFILLED), META)
        self.model(empty(needs.PREFILL_TOKENS, dtype=torch.int64), layout.positions, layout)
        if self.graphs is None:
            logits = needs.phase_bytes(self.work, self.sizes)["generate"]["decode logits"]
            with self.tracker.on_stream("graphs"):
                self.graphs = empty(int(logits / 4))
        self.engine._end_phase()
        if not self.engine.keeps_cache:
            self.graphs = None

    @torch.no_grad()
    def score(self) -> None:
        """Bring a reference to the device and run it over a microbatch; without one do nothing."""
        for _ in self.work.frozen:
            parked = [empty(*p.shape, dtype=p.dtype) for p in self.parameters]
            score_batch(self.model, self._microbatch(1.0))
            del parked

    def backward(self, part: float, *, is_last: bool) -> None:
        """Run a microbatch; FSDP reduces a unit's gradients once it has them all."""
        unit_of = {parameter: i for i, unit in enumerate(self.units) for parameter in unit}
        missing = [len(unit) for unit in self.units]
        sent: list[Tensor] = []

        def on_gradient(parameter: Tensor) -> None:
            if not self.sums_always:
                if parameter not in self.summed:
                    self.summed[parameter] = parameter.grad.float()
                parameter.grad = None
            missing[unit_of[parameter]] -= 1
            if missing[unit_of[parameter]] == 0 and (is_last or self.sums_always):
                # A unit's send buffer is kept until the next unit has sent.
                sent[:] = [*sent, self._sum_over_ranks(self.units[unit_of[parameter]])][-1:]

        hooks = [
            p.requires_grad_(True).register_post_accumulate_grad_hook(on_gradient) for p in self.parameters
        ]
        logprobs, entropies = score_batch(self.model, self._microbatch(part))
        (logprobs.sum() + 0 * entropies.sum()).backward()
        for parameter, hook in zip(self.parameters, hooks, strict=True):
            hook.remove()
            parameter.requires_grad_(False)

    def _sum_over_ranks(self, unit: Sequence[Tensor]) -> Tensor:
        """Make the gradients of a unit's masters, on a stream of FSDP's; returns the tensors sent for them."""
        shapes = [self._shard(parameter) for parameter in unit]
        sizes = [math.prod(shape) for shape in shapes]
        sent = empty(sum(sizes) * self.work.num_shards)
        for parameter in unit:
            self.summed.pop(parameter, None)
            parameter.grad = None
        with self.tracker.on_stream("sums"):
            received = empty(sum(sizes))
            if self.work.num_shards == 1:
                empty(len(sent))  # divided by 1
        for parameter, shape, gradient in zip(unit, shapes, received.split(sizes), strict=True):
            if self.masters[parameter].grad is None:  # else it is added
                self.masters[parameter].grad = gradient.view(shape)
        return sent

    def _shard(self, parameter: Tensor) -> tuple[int, ...]:
        return (math.ceil(len(parameter) / self.work.num_shards), *parameter.shape[1:])

    def _microbatch(self, part: float) -> Batch:
        """A microbatch with this share of the most tokens, selected from a batch of twice as many."""
        num_sequences = int(part * self.sizes.max_tokens_per_microbatch) // SEQUENCE
        lengths = (SEQUENCE,) * (2 * num_sequences)
        stream = empty(sum(lengths))
        streams = {"weight_version": stream.int(), "advantages": stream, "loss_weights": stream}
        streams["table_index"] = empty(len(lengths), dtype=torch.int64)
        return Batch(lengths, stream.long(), stream.bool(), stream, **streams).select(range(num_sequences))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device=META)


def make_workload(
    model: str,
    num_ranks: int,
    *,
    num_prompts: int = 128,
    group_size: int = 8,
    max_new_tokens: int = 2048,
    has_reference: bool = False,
) -> Workload:
    """GRPO in bf16 with prompts of up to 512 tokens, and a greedy rollout of each."""
    config = config_from_dict(MODELS[model])
    longest = PREFILLED + max_new_tokens
    return Workload(
        trained=(config,),
        frozen={"reference": config} if has_reference else {},
        dtype=torch.bfloat16,
        device_type="cuda",
        num_ranks=num_ranks,
        num_shards=num_ranks,
        parks_frozen=True,
        offloads_optimizer=False,
        longest_prompt=PREFILLED,
        longest=longest,
        requests=math.ceil(num_prompts * (group_size + 1) / num_ranks),
        update_tokens=math.ceil(num_prompts * group_size / num_ranks) * longest,
        enough_tokens=enough_tokens(max_new_tokens),
    )


def auto_sizes(work: Workload) -> Sizes:
    """Return the sizes that a card of 80 GB gets."""
    return choice.choose_sizes(work, FREE, dict.fromkeys(Sizes.__dataclass_fields__, "auto"))


def replay(work: Workload, *, num_steps: int = 3) -> CachingAllocator:
    """Some steps on a card of 80 GB. Raises OutOfMemory."""
    sizes = auto_sizes(work)
    tracker = StorageTracker(CachingAllocator(FREE))
    rope_table(work.policy, META)  # made once in a process
    with counting(), tracker:
        run = Replay(work, sizes, tracker, keeps_cache=choice.can_keep_cache(work, sizes, FREE))
        for _ in range(num_steps):
            run.step()
    return tracker.allocator


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=MODELS, help="only this one")
    args = parser.parse_args()
    for model, num_ranks in RANKS:
        for name, options in RUNS.items():
            if args.shape in (None, model):
                work = make_workload(model, num_ranks, **options)
                sizes = auto_sizes(work)
                keeps_cache = choice.can_keep_cache(work, sizes, FREE)
                planned = needs.peak_bytes(work, sizes, keeps_cache=keeps_cache)
                figures = {"model": model, "ranks": num_ranks, "run": name, "keeps_cache": keeps_cache}
                figures |= {"fits": choice.too_large(work, sizes, FREE) is None}
                figures |= {"card_gb": round(FREE / 1e9, 1), "planned_gb": round(planned / 1e9, 1)}
                try:
                    allocator = replay(work)
                except OutOfMemory as error:
                    print_result(**figures, out_of_memory=str(error))
                    continue
                print_result(
                    **figures,
                    most_used_gb=round(allocator.most_used / 1e9, 1),
                    most_reserved_gb=round(allocator.most_reserved / 1e9, 1),
                    retries=allocator.num_retries,
                )


if __name__ == "__main__":
    main()
