"""Growth of peak memory over one loss step: score with gradients and backward, by microbatch. On one rank, Linux only.

    OMP_NUM_THREADS=1 python benchmarks/step_memory.py MODEL --batch 8 --len 1024 --prompt-len 64

MODEL is a Hugging Face folder. The batch is synthetic: random tokens, completions of `len` / 4 to `len` tokens in equal
steps. `step_peak_mib` is the peak of resident memory during the step less the resident memory before it, in a new
process, so that it contains the gradients but not the weights. --whole-step adds the optimizer's first step, which
makes its two moments, and the refresh. `cpu_s` is the time of this first step, with everything that is done only once.
"""

import argparse
import time

import torch
from grpo_step import GrpoLoop, make_parser
from workload import print_result, reset_peak_rss, status_mib

from minirl.ranks import process_group
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import Batch

NUM_SPECIAL = 6  # ids that random tokens leave out


def make_batch(batch: int, length: int, prompt: int, vocab: int) -> Batch:
    """`batch` random sequences with advantages and token-mean weights.

    Prompts have `prompt` tokens, completions `length` / 4 to `length`.
    """
    torch.manual_seed(0)
    completions = [length]
    if batch > 1:
        completions = torch.linspace(length / 4, length, batch).long().tolist()
    lengths = tuple(prompt + completion for completion in completions)
    num_tokens = sum(lengths)
    made = Batch(
        lengths,
        tokens=torch.randint(NUM_SPECIAL, vocab, (num_tokens,)),
        loss_mask=torch.cat([torch.arange(total) >= prompt for total in lengths]),
        sample_logprobs=torch.zeros(num_tokens),
        weight_version=torch.zeros(num_tokens, dtype=torch.int32),
    )
    weights = torch.full((batch,), 1 / sum(completions))
    return made.replace(advantages=made.spread(torch.randn(batch)), loss_weights=made.spread(weights))


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.set_defaults(max_tokens_per_microbatch=2048, cache_tokens=2048)
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--len", type=int, default=1024, help="tokens of the longest completion")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--whole-step", action="store_true", help="with the optimizer's step and the refresh")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    loop = GrpoLoop(args)
    vocab = loop.policy.module.config.vocab_size
    batch = make_batch(args.batch, args.len, args.prompt_len, vocab).to(loop.device)
    limit = args.max_tokens_per_microbatch
    (microbatches,) = plan_microbatches(batch.lengths, num_ranks=1, max_tokens=limit)

    before = status_mib("VmRSS")
    reset_peak_rss()
    wall = time.perf_counter()
    cpu = time.process_time()
    loop.backward(batch, microbatches)
    if args.whole_step:
        loop.step()
    peak = status_mib("VmHWM")
    wall_s = time.perf_counter() - wall
    cpu_s = time.process_time() - cpu
    print_result(
        what="minirl_step_memory",
        whole_step=args.whole_step,
        dtype=args.dtype,
        batch=args.batch,
        len=args.len,
        vocab=vocab,
        real_tokens=int(batch.loss_mask.sum()),
        microbatches=len(microbatches),
        max_tokens_per_microbatch=limit,
        rss_before_mib=before,
        peak_rss_mib=peak,
        step_peak_mib=peak - before,
        wall_s=wall_s,
        cpu_s=cpu_s,
    )


if __name__ == "__main__":
    main()
    process_group.stop()
