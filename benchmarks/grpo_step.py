"""One whole GRPO step (generate, reward, score, update) as `train_grpo.py` does it, and where its seconds go.

    OMP_NUM_THREADS=1 python benchmarks/grpo_step.py MODEL
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/grpo_step.py MODEL

MODEL is a Hugging Face folder; the reward is the share of the letter e. The first step does not count. Phases and CPU
seconds are rank 0's, `useful_tok_cpu_s` is per rank. `train_waste` is the share of padding in the rows that pass the
layers in an update, counted there; `shared_frac` the share of the tokens that are not computed again, since they are of
a prompt that the microbatch has already.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from workload import (
    LayerRows,
    PhaseClock,
    encode_prompts,
    make_requests,
    medians,
    peak_rss_mib,
    print_result,
    print_row,
)

from minirl import distributed
from minirl.advantages import group_advantages, loss_weights
from minirl.batch import Batch, Rollout, exchange, gather_table
from minirl.data import Tokenizer
from minirl.distributed import all_reduce_sum, rank, world_size
from minirl.engine import Engine
from minirl.losses import clipped_policy_loss, importance_ratio, kl_penalty
from minirl.metrics import StepMetrics, add_gap, add_tokens
from minirl.parallel import ShardedModel
from minirl.plan import plan_updates
from minirl.scoring import score, score_frozen
from minirl.weights import load_replica, read_config

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


class GrpoLoop:
    """The phases of a step of `train_grpo.py` with one update, as methods. All ranks call them in order."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device, self.dtype = args, distributed.start(device=args.device), getattr(torch, args.dtype)
        self.tokenizer = Tokenizer(args.model)
        self.prompts = encode_prompts(self.tokenizer, args.prompts)
        self.policy = ShardedModel(read_config(args.model), args.model, dtype=self.dtype, device=self.device)
        self.optimizer = self.policy.make_optimizer(betas=(0.9, 0.95), weight_decay=0.0)
        self.reference = load_replica(args.model, dtype=self.dtype) if args.kl_coef else None
        self.engine = Engine(
            self.policy.decoder,
            max_rows=args.max_rows,
            cache_tokens=args.cache_tokens,
            dtype=self.dtype,
            device=self.device,
        )
        self.metrics = StepMetrics()

    def generate(self, step: int) -> list[Rollout]:
        """This rank's share of the step's rollouts. Not collective."""
        requests = make_requests(
            self.prompts,
            first=step * len(self.prompts),
            samples=self.args.samples,
            max_new=self.args.max_new,
            stop_ids=self.tokenizer.stop_ids,
        )
        share = slice(len(requests) * rank() // world_size(), len(requests) * (rank() + 1) // world_size())
        return self.engine.generate(requests[share], weight_version=step)

    def reward(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The share of the letter e in each completion. Not collective."""
        texts = [self.tokenizer.decode(rollout.completion) for rollout in rollouts]
        return [text.count("e") / max(1, len(text)) for text in texts]

    def score(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> tuple[Batch, list[list[int]]]:
        """This rank's batch, ready for the update, and its microbatches (collective)."""
        table = gather_table(rollouts, torch.tensor(rewards, dtype=torch.float64).view(-1, 1))
        grouped = table.rewards.view(self.args.prompts, self.args.samples)
        advantages = group_advantages(grouped, baseline="mean", norm="group_std").flatten()
        plan = plan_updates(
            table.num_tokens.tolist(),
            table.prompts,
            num_minibatches=1,
            num_ranks=world_size(),
            max_tokens=self.args.max_tokens_per_microbatch,
        )
        weights = loss_weights(table.num_loss_tokens, norm="token_mean", constant=self.args.max_new)
        batch = exchange(rollouts, table, plan.rank_of)
        batch = batch.replace(
            advantages=batch.spread(advantages[batch.row].float()),
            loss_weights=batch.spread(weights[batch.row].float()),
        ).to(self.device)
        (microbatches,) = plan.of_rank(rank())
        if self.reference is not None:
            self.reference.to(self.device)
            batch = batch.replace(ref_logprobs=score_frozen(self.reference, batch, microbatches, 1.0))
            self.reference.to("cpu")
        return batch, microbatches

    def backward(self, batch: Batch, microbatches: Sequence[Sequence[int]]) -> None:
        """Forward and backward of every microbatch (collective)."""
        for i, sequences in enumerate(microbatches):
            micro = batch.select(sequences)
            lengths, mask = micro.lengths, micro.loss_mask
            new, entropy = score(self.policy.module, micro.tokens, micro.layout(), select=mask, temperature=1.0)
            old = new.detach()
            ratio = importance_ratio(new, old, level="token", lengths=lengths, loss_mask=mask)
            loss: Tensor = clipped_policy_loss(ratio, micro.advantages, **CLIP)
            if self.reference is not None:
                loss = loss + self.args.kl_coef * kl_penalty(new, micro.ref_logprobs, "k3")
            self.policy.backward((micro.loss_weights * loss).sum(), is_last=i == len(microbatches) - 1)
            add_tokens(self.metrics, micro, new, old, ratio, entropy, **CLIP)
            add_gap(self.metrics, micro, new)

    def step(self) -> dict[str, float]:
        """The optimizer's step and the refresh; returns the metrics of the update (collective)."""
        norm = self.policy.step(self.optimizer, lr=self.args.lr, max_grad_norm=1.0)
        self.metrics.add("optim/grad_norm", norm)
        values, self.metrics = self.metrics.reduce(), StepMetrics()
        return values


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of `GrpoLoop`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of compute")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompts", type=int, default=8, help="per step, over all ranks")
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--max-new", type=int, default=256, help="limit of a completion")
    parser.add_argument("--max-rows", type=int, default=64, help="sequences that a rank decodes at a time")
    parser.add_argument("--cache-tokens", type=int, default=24576, help="64 x 3 blocks of 128: all of the default work")
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=2048)
    parser.add_argument("--kl-coef", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=2, help="steps that count")
    return parser


def main() -> None:
    args = make_parser(__doc__).parse_args()
    loop = GrpoLoop(args)
    layer_rows, clock, steps = LayerRows(loop.policy.module), PhaseClock(loop.device), []
    for step in range(1 + args.steps):
        with clock.phase("step"):
            with clock.phase("generate"):
                rollouts = loop.generate(step)
            with clock.phase("reward"):
                rewards = loop.reward(rollouts)
            with clock.phase("score"):
                batch, microbatches = loop.score(rollouts, rewards)
            layer_rows.take()
            with clock.phase("update"):
                loop.backward(batch, microbatches)
                metrics = loop.step()
        computed = sum(len(batch.select(sequences).layout().kept) for sequences in microbatches)
        counts = [sum(len(r.completion) for r in rollouts), len(batch.tokens), computed, layer_rows.take()]
        useful, tokens, computed, rows = all_reduce_sum(torch.tensor(counts)).tolist()
        seconds = clock.take()
        row = {"step_s": seconds.pop("step"), "step_cpu_s": seconds.pop("step_cpu"), **seconds, "useful": useful}
        row |= {
            "train_waste": 1 - computed / rows,
            "shared_frac": 1 - computed / tokens,
            "microbatches": len(microbatches),
        }
        row |= {"logp_equal_frac": metrics["policy/logp_equal_frac"], "grad_norm": metrics["optim/grad_norm"]}
        if step > 0:
            steps.append(row)
            if rank() == 0:
                print_row(row)
    useful = sum(row["useful"] for row in steps)
    if rank() == 0:
        print_result(
            what="minirl_grpo_step",
            world=world_size(),
            dtype=args.dtype,
            kl_coef=args.kl_coef,
            max_tokens_per_microbatch=args.max_tokens_per_microbatch,
            steps=args.steps,
            threads=torch.get_num_threads(),
            peak_rss_mib=peak_rss_mib(),
            useful_tok_s=useful / sum(row["step_s"] for row in steps),
            useful_tok_cpu_s=useful / world_size() / sum(row["step_cpu_s"] for row in steps),
            **medians(steps),
        )


if __name__ == "__main__":
    main()
    distributed.stop()
