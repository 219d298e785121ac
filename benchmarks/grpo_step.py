"""Time each phase of a complete GRPO step (generate, reward, score, update), as in `train_grpo.py`.

    OMP_NUM_THREADS=1 python benchmarks/grpo_step.py MODEL
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/grpo_step.py MODEL

MODEL is a Hugging Face folder; the reward is the fraction of the letter e. The first step is a warm-up. Phases and CPU
seconds are rank 0's; `useful_tok_cpu_s` is per rank. `train_waste` is the fraction of padding among the tokens that
pass through the layers in an update. `shared_frac` is the fraction of the update's tokens that need no computation,
because their prompt is already in the microbatch.
"""

import argparse
from collections.abc import Sequence

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

import train_grpo  # importable because workload extends sys.path
from minirl.data.tokenizer import Tokenizer
from minirl.episodes.step_groups import select_step_groups
from minirl.model.families import read_config
from minirl.model.weights import load_unsharded_model
from minirl.ranks import launch, process_group
from minirl.ranks.process_group import all_reduce_sum, rank, world_size
from minirl.report.metrics import StepMetrics, add_clip_metrics, add_token_metrics
from minirl.rollouts import RewardedRollout, Rollout
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import Batch, Microbatch, exchange_rollouts
from minirl.training.frozen_models import FrozenModel
from minirl.training.scoring import score_batch
from minirl.training.sharded_model import ShardedModel


class GrpoLoop:
    """The phases of a `train_grpo.py` step with one update, as methods. All ranks call the methods in order."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = process_group.start()
        self.dtype = getattr(torch, args.dtype)
        self.config = train_grpo.Config(kl_coef=args.kl_coef, num_minibatches=1)
        self.tokenizer = Tokenizer(args.model)
        self.prompts = encode_prompts(self.tokenizer, args.prompts)
        self.policy = ShardedModel(read_config(args.model), args.model, dtype=self.dtype, device=self.device)
        self.optimizer = self.policy.make_optimizer(betas=(0.9, 0.95), weight_decay=0.0)
        self.reference = None
        if args.kl_coef:
            self.reference = FrozenModel(
                load_unsharded_model(args.model, dtype=self.dtype),
                score_batch,
                names=["ref_logprobs"],
                device=self.device,
            )
        self.engine = make_engine(args, self.policy.decoder, self.device)
        self.metrics = StepMetrics()

    def generate(self, step: int) -> list[Rollout]:
        """Generate this rank's part of the step's rollouts. Not collective."""
        self.weight_version = step
        requests = make_requests(
            self.prompts,
            first=step * len(self.prompts),
            samples=self.args.samples,
            max_new=self.args.max_new,
            stop_ids=self.tokenizer.stop_ids,
        )
        first = len(requests) * rank() // world_size()
        end = len(requests) * (rank() + 1) // world_size()
        return [
            Rollout((sequence,), sequence.finish_reason)
            for sequence in self.engine.generate(requests[first:end], weight_version=step)
        ]

    def reward(self, rollouts: list[Rollout]) -> list[float]:
        """Return the fraction of the letter e in each completion. Not collective."""
        rewards = []
        for rollout in rollouts:
            text = self.tokenizer.decode(rollout.completion)
            rewards.append(text.count("e") / max(1, len(text)))
        return rewards

    def score(self, rollouts: list[Rollout], rewards: list[float]) -> tuple[Batch, list[Microbatch]]:
        """Return this rank's batch, ready for the update, and its microbatches (collective)."""
        args = self.args
        rewarded = [
            RewardedRollout(rollout, "", [reward]) for rollout, reward in zip(rollouts, rewards, strict=True)
        ]
        weight = torch.ones(1, dtype=torch.float64)
        groups = select_step_groups(rewarded, args.prompts, args.samples, reward_weights=weight).groups
        per_rank = plan_microbatches(
            groups.sequences,
            num_ranks=world_size(),
            max_tokens=args.max_tokens_per_microbatch,
        )
        microbatches = per_rank[rank()]
        batch = exchange_rollouts(groups.rollouts, [per_rank])
        weights = train_grpo.rollout_loss_weights(self.config, groups, args.max_new)
        batch = batch.replace(
            advantages=train_grpo.token_advantages(self.config, groups, batch).float(),
            loss_weights=batch.rollouts_to_tokens(weights).float(),
        ).to(self.device)
        if self.reference is not None:
            batch = self.reference.add_outputs(batch, microbatches)
        return batch, microbatches

    def backward(self, batch: Batch, microbatches: Sequence[Microbatch]) -> None:
        """Run forward and backward of every microbatch (collective)."""
        config = self.config
        for i, sequences in enumerate(microbatches):
            micro = batch.select(sequences)
            new, entropy = score_batch(self.policy.module, micro)
            micro = micro.replace(old_logprobs=new.detach())
            loss, ratio = train_grpo.token_loss(config, micro, new, entropy)
            objective = (micro.loss_weights * loss).sum()
            self.policy.backward(objective, is_last=i == len(microbatches) - 1)
            add_token_metrics(self.metrics, micro, new, ratio, entropy, weight_version=self.weight_version)
            add_clip_metrics(self.metrics, micro, ratio, clip_low=config.clip_low, clip_high=config.clip_high)

    def step(self) -> dict[str, float]:
        """Step the optimizer, refresh the weights, and return the update's metrics (collective)."""
        norm = self.policy.step(self.optimizer, lr=self.args.lr, max_grad_norm=1.0)
        self.metrics.add("optim/grad_norm", norm)
        values = self.metrics.reduce()
        self.metrics = StepMetrics()
        return values


def make_step_parser(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of `GrpoLoop`."""
    parser = make_parser(doc)
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=2048)
    parser.add_argument("--kl-coef", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after a warm-up (default: 2)")
    return parser


def measure_step(
    loop: GrpoLoop, step: int, clock: PhaseClock, computed_tokens: ComputedTokens
) -> dict[str, float]:
    """Run one step and return its figures (collective)."""
    with clock.phase("step"):
        with clock.phase("generate"):
            rollouts = loop.generate(step)
        with clock.phase("reward"):
            rewards = loop.reward(rollouts)
        with clock.phase("score"):
            batch, microbatches = loop.score(rollouts, rewards)
        computed_tokens.take()  # discard the tokens of generate and score
        with clock.phase("update"):
            loop.backward(batch, microbatches)
            metrics = loop.step()
    num_sampled = sum(len(rollout.completion) for rollout in rollouts)
    num_unshared = 0
    for sequences in microbatches:
        num_unshared += len(batch.select(sequences).layout().computed_tokens)
    counts = torch.tensor([num_sampled, len(batch.tokens), num_unshared, computed_tokens.take()])
    useful, tokens, unshared, computed = all_reduce_sum(counts).tolist()
    seconds = clock.take()
    return {
        "step_s": seconds.pop("step"),
        "step_cpu_s": seconds.pop("step_cpu"),
        **seconds,
        "useful": useful,
        "train_waste": 1 - unshared / computed,
        "shared_frac": 1 - unshared / tokens,
        "microbatches": len(microbatches),
        "logp_equal_frac": metrics["policy/logp_equal_frac"],
        "grad_norm": metrics["optim/grad_norm"],
    }


def main() -> None:
    args = make_step_parser(__doc__).parse_args()
    loop = GrpoLoop(args)
    computed_tokens = ComputedTokens(loop.policy.module)
    clock = PhaseClock(loop.device)
    steps = []
    for step in range(1 + args.steps):
        figures = measure_step(loop, step, clock, computed_tokens)
        if step > 0:
            steps.append(figures)
            if rank() == 0:
                print_figures(figures)
    useful = sum(figures["useful"] for figures in steps)
    wall_s = sum(figures["step_s"] for figures in steps)
    cpu_s = sum(figures["step_cpu_s"] for figures in steps)
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
            useful_tok_s=useful / wall_s,
            useful_tok_cpu_s=useful / world_size() / cpu_s,
            **medians(steps),
        )


if __name__ == "__main__":
    launch.run(main)
