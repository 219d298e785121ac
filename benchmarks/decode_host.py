"""The host's part of a decode step: thread CPU milliseconds, with tokens read late and in the buffers of CUDA graphs.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/decode_host.py

The engine is the real one; the device's part (the model, the sampler) is left out. `steady`: no request ends. `ending`:
some end in each step, so that their rollouts are made, their blocks freed and the batch changes. Medians of 80 steps.
"""

import dataclasses
import sys
import time
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import Tensor

from minirl.generation import decode_step, engine

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.scheduling import Load, requests_of, stub_engine

NUM_STEPS = 100
WARMUP = 20
SIZES = ((32, 200), (256, 200), (1024, 200), (256, 4000), (1024, 4000))


def no_decode(model: object, tokens: Tensor, *_: object) -> Tensor:
    return torch.ones(2, len(tokens), dtype=torch.int32)


def no_sample(hidden: Tensor, head: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    tokens, logprobs = torch.ones(len(hidden), dtype=torch.int64), torch.zeros(len(hidden))
    return tokens, logprobs, torch.zeros(len(hidden), 0, dtype=torch.int32)


def step_ms(num_requests: int, context: int, *, num_ending: int) -> list[float]:
    """Thread CPU of each step, with this many requests ending in each."""
    limit = NUM_STEPS + 20
    load = Load(num_requests, num_requests * (context + limit + 300), num_requests, 1, context, 8)
    requests = [dataclasses.replace(request, max_new_tokens=limit) for request in requests_of(load)]
    for step in range(NUM_STEPS if num_ending else 0):
        for i in range(step * num_ending, min(num_requests, (step + 1) * num_ending)):
            requests[i] = dataclasses.replace(requests[i], max_new_tokens=step + 3)
    options = {"async_decoding": True, "cuda_graphs": True, "max_prefill_tokens": 10**9}
    with (
        stub_engine(load, **options) as stub,
        mock.patch.object(engine, "decode", no_decode),
        mock.patch.object(decode_step, "sample", no_sample),
    ):
        stub.submit(requests)
        stub.step()
        times = []
        for _ in range(NUM_STEPS - 1):
            began = time.thread_time()
            stub.step()
            times.append(1000 * (time.thread_time() - began))
    return times[WARMUP:]


def main() -> None:
    print("| requests, context | steady: median, longest | one ends in each step: median, longest |")
    print("|---|---|---|")
    for num_requests, context in SIZES:
        cells = []
        for num_ending in (0, 1):
            if num_ending * NUM_STEPS > num_requests:
                cells.append("")
                continue
            times = step_ms(num_requests, context, num_ending=num_ending)
            cells.append(f"{median(times):.2f}, {max(times):.2f}")
        print(f"| {num_requests}, {context} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
