"""Measure how many seconds per GB a checkpoint save blocks training, compared with a plain write of the same bytes.

    torchrun --standalone --nproc-per-node 2 benchmarks/saving.py MODEL --folder FOLDER [--dtype bfloat16]

FOLDER is on the disk to measure; the benchmark's files are deleted. The optimizer's state is allocated but zero.
"""

import os
import shutil
import time
from pathlib import Path

import torch
from workload import docstring_parser, print_figures

from minirl.files import durable
from minirl.model.families import read_config
from minirl.ranks import launch, process_group
from minirl.ranks.process_group import barrier, rank
from minirl.run.checkpoint import Checkpoints
from minirl.run.progress import Progress
from minirl.training.sharded_model import ShardedModel


def main() -> None:
    parser = docstring_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    device = process_group.start()
    model = ShardedModel(read_config(args.model), args.model, dtype=getattr(torch, args.dtype), device=device)
    optimizer = model.make_optimizer(betas=(0.9, 0.95), weight_decay=0.0)
    models = {"policy": (model, optimizer)}
    checkpoints = Checkpoints(args.folder, models, keep=1)
    for step in range(1, 4):
        barrier()
        began = time.monotonic()
        checkpoints.save(vars(Progress(step=step)))
        seconds = time.monotonic() - began
        if rank() == 0:
            files = (args.folder / "checkpoints").rglob("*.*")
            gigabytes = sum(path.stat().st_size for path in files) / 1e9
            block = memoryview(os.urandom(10**7))
            began = time.monotonic()
            with durable.open_new_file(args.folder / "plain") as file:
                for _ in range(round(gigabytes * 100)):
                    file.write(block)
            plain = time.monotonic() - began
            print_figures({"GB": gigabytes, "s_per_GB": seconds / gigabytes, "plain": plain / gigabytes})
    barrier()
    if rank() == 0:
        shutil.rmtree(args.folder / "checkpoints")
        (args.folder / "plain").unlink()


if __name__ == "__main__":
    launch.run(main)
