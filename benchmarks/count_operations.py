"""Count the ATen operations of a default step of train_grpo.py per source file, independently of machine load.

OMP_NUM_THREADS=1 python benchmarks/count_operations.py
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode
from workload import ROOT, print_result

from minirl.ranks import launch
from minirl.run.run import Run

STEPS = (6, 7, 8)


class OperationCounter(TorchDispatchMode):
    """Counts operations per calling file of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation for the calling file, and run the operation."""
        frame = sys._getframe(1)
        while frame.f_back is not None and not frame.f_code.co_filename.startswith(str(ROOT)):
            frame = frame.f_back
        self.counts[os.path.relpath(frame.f_code.co_filename, ROOT)] += 1
        return function(*args, **(kwargs or {}))


def main() -> None:
    counter = OperationCounter()

    def counted_steps(run: Run, steps: Any = Run.steps) -> Iterator[int]:
        for step in steps(run):
            if step in STEPS:
                with counter:
                    yield step
            else:
                yield step

    import train_grpo

    with tempfile.TemporaryDirectory() as runs, patch.object(Run, "steps", counted_steps):
        os.environ["MINIRL_RUNS"] = runs
        train_grpo.main(train_grpo.Config(num_steps=STEPS[-1] + 1, eval_every=0, save_every=0))
    for file, count in counter.counts.most_common():
        print(f"{count / len(STEPS):8,.0f}  {file}")
    print_result(what="minirl_operations", operations=counter.counts.total() / len(STEPS))


if __name__ == "__main__":
    launch.run(main)
