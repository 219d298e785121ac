"""CPU seconds and host memory of loading a model, against transformers. Linux only.

    OMP_NUM_THREADS=1 python benchmarks/loading.py MODEL [--dtype bfloat16]

MODEL is a Hugging Face folder. Each way runs in its own process. `peak` and `after` are MiB above the start, of which
mapped files are a part; `parameters` is their size in this dtype. transformers maps the file and reads it on use: here
every parameter is read once. `sharded` is the trainable model on one rank, with fp32 masters, and
its refresh.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from workload import print_result, reset_peak_rss, status_mib

WAYS = ("transformers", "replica", "sharded")


def load(way: str, folder: Path, dtype: torch.dtype) -> None:
    """Load once and print the figures."""
    if way == "transformers":
        from transformers import AutoModelForCausalLM as _  # noqa: F401, its import is not loading
    else:
        from minirl.model.families import read_config
        from minirl.model.weights import load_replica
        from minirl.training.sharded_model import ShardedModel
    if way == "sharded":
        rendezvous = tempfile.mktemp()
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    before = status_mib("VmRSS")
    reset_peak_rss()
    began = time.process_time()
    figures = {}
    if way == "transformers":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        for parameter in model.parameters():
            parameter.detach().clone()
        parameters = list(model.parameters())
    elif way == "replica":
        parameters = list(load_replica(folder, dtype=dtype).parameters())
    else:
        sharded = ShardedModel(read_config(folder), folder, dtype=dtype, device=torch.device("cpu"))
        parameters = list(sharded.compute_weights.values())
    figures["cpu_s"] = time.process_time() - began
    figures["peak_mib"] = status_mib("VmHWM") - before
    figures["after_mib"] = status_mib("VmRSS") - before
    if way == "sharded":
        reset_peak_rss()
        now = status_mib("VmRSS")
        began = time.process_time()
        sharded.refresh()
        figures["refresh_cpu_s"] = time.process_time() - began
        figures["refresh_peak_mib"] = status_mib("VmHWM") - now
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    print_result(what=way, parameters_mib=num_bytes / 2**20, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process")
    args = parser.parse_args()
    if args.way:
        load(args.way, args.model, getattr(torch, args.dtype))
        return
    for way in WAYS:
        command = [sys.executable, __file__, str(args.model), "--dtype", args.dtype, "--way", way]
        subprocess.run(command, check=True, env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"})


if __name__ == "__main__":
    main()
