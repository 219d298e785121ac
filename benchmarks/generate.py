"""Measure the engine's decoding throughput on prompts and completions of uneven length.

    OMP_NUM_THREADS=1 python benchmarks/generate.py MODEL [--dtype bfloat16]

MODEL is a Hugging Face folder. Useful tokens are the sampled tokens, including stop tokens. `computed_tokens` counts
the tokens that pass through the layers, in prefill and decode steps. `steps` counts decode steps.
"""

import torch
from workload import (
    ComputedTokens,
    PhaseClock,
    encode_prompts,
    make_engine,
    make_parser,
    make_requests,
    medians,
    peak_rss_mib,
    print_figures,
    print_result,
)

from minirl.data.tokenizer import Tokenizer
from minirl.model.weights import load_unsharded_model


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed runs, after a warm-up (default: 5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    tokenizer = Tokenizer(args.model)
    model = load_unsharded_model(args.model, dtype=getattr(torch, args.dtype))
    prompts = encode_prompts(tokenizer, args.prompts)
    engine = make_engine(args, model, device)
    computed_tokens = ComputedTokens(model)
    clock = PhaseClock(device)
    runs = []
    for run in range(1 + args.runs):
        requests = make_requests(
            prompts,
            first=run * args.prompts,
            samples=args.samples,
            max_new=args.max_new,
            stop_ids=tokenizer.stop_ids,
        )
        with clock.phase("wall"):
            rollouts = engine.generate(requests)
        stats = engine.take_stats()
        seconds = clock.take()
        useful = sum(len(rollout.completion) for rollout in rollouts)
        figures = {
            "wall_s": seconds["wall"],
            "cpu_s": seconds["wall_cpu"],
            "useful": useful,
            "useful_tok_s": useful / seconds["wall"],
            "useful_tok_cpu_s": useful / seconds["wall_cpu"],
            "steps": stats.decode_steps,
            "mean_len": useful / len(rollouts),
            "computed_tokens": computed_tokens.take(),
            "decode_tokens": stats.decode_tokens,
            "decode_waste": stats.wasted_tokens / stats.computed_tokens,
            "prefill_tokens": stats.prefill_tokens,
            "preemptions": stats.preemptions,
        }
        if run > 0:
            print_figures(figures)
            runs.append(figures)
    print_result(
        what="minirl_generate",
        dtype=args.dtype,
        sequences=args.prompts * args.samples,
        runs=args.runs,
        threads=torch.get_num_threads(),
        peak_rss_mib=peak_rss_mib(),
        **medians(runs),
    )


if __name__ == "__main__":
    main()
