"""Check that generate, score and update share one copy of the weights: switching between phases moves no weights.

    OMP_NUM_THREADS=1 python benchmarks/weight_sharing.py MODEL [--dtype bfloat16]
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/weight_sharing.py MODEL

Every rank checks a few GRPO steps and the generation after them:

- generate, score and backward leave each compute weight's address, bits and write counter (`Tensor._version`)
unchanged;
- the optimizer's step writes each weight exactly once, at its address, after which the weight is bitwise equal to the
fp32 master rounded to the compute dtype;
- the modules that decode, score and train have these same tensors as parameters.

A failed check stops the program. Afterwards, the refresh, the only copy of weights in a step, is timed.
"""

import statistics
import time

import torch
from grpo_step import GrpoLoop, make_step_parser
from torch import Tensor
from workload import peak_rss_mib, print_result

from minirl.ranks import launch
from minirl.ranks.process_group import print0, rank, world_size
from minirl.training.sharded_model import ShardedModel

NUM_REFRESHES = 10


class WeightWatch:
    """Compares the compute weights with their state at the last `accept`: addresses, write counters and bits."""

    def __init__(self, policy: ShardedModel):
        self.policy = policy
        self.addresses = {name: weight.data_ptr() for name, weight in policy.compute_weights.items()}
        self.checks = 0
        self.bytes_written = 0  # in phases that must not write
        self.accept()

    def accept(self) -> None:
        """Make the current write counters and bits the reference. The reference addresses stay the first ones."""
        weights = self.policy.compute_weights
        self.versions = {name: weight._version for name, weight in weights.items()}
        self.bits = {name: weight.detach().clone() for name, weight in weights.items()}

    def expect_untouched(self, phase: str) -> None:
        """Check that no weight was moved or written."""
        for name, weight in self._check_addresses(phase):
            is_untouched = weight._version == self.versions[name] and torch.equal(weight, self.bits[name])
            if not is_untouched:
                self.bytes_written += weight.nbytes
            self._require(is_untouched, f"{phase} wrote to {name}")

    def expect_refreshed(self) -> float:
        """Check that each weight was written once, in place, with its rounded master (collective).

        Returns the fraction of values that changed.
        """
        changed = 0
        for name, weight in self._check_addresses("refresh"):
            writes = weight._version - self.versions[name]
            # On one rank in fp32, the weights are the masters. torch does not count the fused optimizer's writes.
            master = self.policy.masters[name]
            expected_writes = int(weight is not master)
            self._require(writes == expected_writes, f"refresh wrote {writes} times to {name}")
            master = getattr(master, "full_tensor", master.detach)().to(weight.dtype)
            self._require(torch.equal(weight, master), f"{name} is not its master")
            changed += int((weight != self.bits[name]).sum())
        self.accept()
        return changed / sum(weight.numel() for weight in self.bits.values())

    def _check_addresses(self, phase: str) -> list[tuple[str, Tensor]]:
        """Check that both modules have these tensors at their first addresses, and return the tensors."""
        for module in (self.policy.module, self.policy.decoder):
            weights = dict(module.named_parameters())
            self._require(weights.keys() == self.addresses.keys(), f"{phase}: a module has other parameters")
            for name, weight in self.policy.compute_weights.items():
                self._require(weights[name] is weight, f"{phase}: a module has another tensor for {name}")
        for name, weight in self.policy.compute_weights.items():
            self._require(weight.data_ptr() == self.addresses[name], f"{phase} moved {name}")
        return list(self.policy.compute_weights.items())

    def _require(self, holds: bool, failure: str) -> None:
        self.checks += 1
        if not holds:
            raise AssertionError(f"rank {rank()}: {failure}")


def time_refresh(policy: ShardedModel, device: torch.device) -> float:
    """Return the median seconds of a refresh (collective)."""
    seconds = []
    for _ in range(NUM_REFRESHES):
        start = time.perf_counter()
        policy.refresh_compute_weights()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = make_step_parser(__doc__)
    parser.set_defaults(lr=1e-3, max_new=32, steps=3)
    args = parser.parse_args()
    loop = GrpoLoop(args)
    policy = loop.policy
    watch = WeightWatch(policy)
    for step in range(args.steps):
        rollouts = loop.generate(step)
        watch.expect_untouched("generate")
        batch, microbatches = loop.score(rollouts, loop.reward(rollouts))
        watch.expect_untouched("score")
        loop.backward(batch, microbatches)
        watch.expect_untouched("backward")
        metrics = loop.step()
        changed = watch.expect_refreshed()
        print0(
            f"step {step + 1}: weights written by generate, score, backward: {watch.bytes_written} bytes; "
            f"changed by the refresh: {changed:.1%} of the values; "
            f"sampled logprobs equal to training's: {metrics['policy/logp_equal_frac']:.1%}"
        )
    loop.generate(args.steps)
    watch.expect_untouched("generate")

    refresh_s = time_refresh(policy, loop.device)
    num_bytes = sum(weight.nbytes for weight in policy.compute_weights.values())
    gb_per_s = num_bytes / refresh_s / 1e9
    print0(f"{watch.checks} checks passed on each of {world_size()} ranks")
    print0(f"refresh: {num_bytes} bytes per rank in {refresh_s:.4g} s, {gb_per_s:.3g} GB/s")
    if rank() == 0:
        print_result(
            what="minirl_weight_sharing",
            world=world_size(),
            dtype=args.dtype,
            steps=args.steps,
            tensors=len(watch.addresses),
            checks=watch.checks,
            bytes_written_outside_refresh=watch.bytes_written,
            bytes_refreshed=num_bytes,
            refresh_s=refresh_s,
            refresh_gb_s=gb_per_s,
            logp_equal_frac=metrics["policy/logp_equal_frac"],
            peak_rss_mib=peak_rss_mib(),
        )


if __name__ == "__main__":
    launch.run(main)
