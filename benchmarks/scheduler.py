"""Counts of the scheduler with far more requests than places, at real sizes. Exact on any machine.

    PYTHONPATH=. python benchmarks/scheduler.py

The engine is the real one, its model computes nothing: each token ends a completion with the same chance, 1,024 tokens
at most. `prefilled` is the number of tokens that were prefilled over the tokens of the distinct prompts: 1.00 if each
prompt was computed once and no request thrown out. `tests/test_scheduler.py` holds these counts.
"""

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.scheduling import Load, requests_of, stub_engine

LOADS = (
    Load(256, 65_536, 16, 8, 200, 350),
    Load(256, 65_536, 64, 16, 200, 350),
    Load(256, 300_000, 64, 16, 1000, 300),
    Load(256, 65_536, 64, 16, 1000, 300),
    Load(64, 65_536, 32, 16, 1000, 100),
)


def main() -> None:
    print(
        "| places, cache | prompts x group, tokens | prefilled | thrown out | steps | mean batch | host ms a step |"
    )
    print("|---|---|---|---|---|---|---|")
    for load in LOADS:
        with stub_engine(load) as engine:
            requests = requests_of(load)
            began = time.thread_time()
            engine.generate(requests)
            host_ms = 1000 * (time.thread_time() - began)
        stats = engine.take_stats()
        size = f"{load.num_prompts} x {load.group_size}, {load.prompt_tokens}"
        print(
            f"| {load.max_running_requests} / {load.cache_tokens} | {size} "
            f"| {stats.prefill_tokens / load.unique_prompt_tokens:.2f} "
            f"| {stats.preemptions / load.num_requests:.3f} | {stats.decode_steps} "
            f"| {stats.decode_tokens / stats.decode_steps:.0f} | {host_ms / stats.decode_steps:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
