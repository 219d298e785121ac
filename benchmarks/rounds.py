"""A simulation of `--max-staleness`: the speed of steps and the age of tokens, for your lengths and costs.

    PYTHONPATH=. python benchmarks/rounds.py [--costs 1.5B|7B|cpu|A,B,C,D,E,F] [--ranks 8] [--prompts 64] [--group 8]
        [--lengths lognormal:MEAN:MOST:SIGMA|equal:1024|RUN] [--turns 6 --reply-seconds 2.7]
        [--reward-seconds 5 --reward-workers 8]

RUN is the folder of a run, whose completions give the lengths. Costs are seconds: A of a decode step, and B for each of
its rows, and C for each token of their contexts; D of a prefilled token; E of a token's scoring and update on one rank;
F of the switch between generation and update. The ranks decode in rounds as `minirl.episodes.collector` has them. Not
in it: the host's time, a cache that is too small, evaluations, lengths that change while the policy learns.
"""

import argparse
import heapq
import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from minirl.episodes.collector import default_round_tokens

# By a roofline model of an H100 in bf16 with a reference model; and of the small model of `partial_rollouts.py`.
COSTS = {
    "1.5B": (2.3e-3, 3e-6, 9.6e-9, 6.9e-6, 3.0e-5, 1.0),
    "7B": (5.6e-3, 1.2e-5, 1.9e-8, 3.2e-5, 1.4e-4, 1.0),
    "cpu": (4.2e-3, 1.93e-4, 0.0, 9.4e-5, 0.0, 0.0),
}
PROMPT_TOKENS = 300
WAIT_S = 0.05  # of a round for replies
NO_BUDGET = 1 << 40


@dataclass
class Row:
    """A rollout. turns: the tokens left of each, and the seconds of the reply to it. sampled_in: tokens by step."""

    prompt: int
    turns: list[list[float]]
    context: int = PROMPT_TOKENS
    budget: int = 0
    is_cached: bool = False
    sampled_in: Counter[int] = field(default_factory=Counter)


@dataclass
class Rank:
    """Its clock, its rows between their turns, and rows that wait for a reply until a time."""

    costs: tuple[float, ...]
    now: float = 0.0
    rows: list[Row] = field(default_factory=list)
    replies: list[tuple[float, int, Row]] = field(default_factory=list)
    workers: list[float] = field(default_factory=list)
    decode_steps: int = 0
    prefilled: int = 0

    def run(self, budget: int, step: int) -> list[Row]:
        """Run a round; return the rows that ended."""
        step_s, row_s, token_s, prefill_s, *_ = self.costs
        for row in self.rows + [row for _, _, row in self.replies]:
            row.budget = budget
        spent: list[Row] = []
        ended: list[Row] = []
        running: list[tuple[int, int, Row]] = []
        num_steps = 0
        begun, self.rows = self.rows, []
        while True:
            while self.replies and self.replies[0][0] <= self.now:
                begun.append(heapq.heappop(self.replies)[2])
            for row in begun:
                if row.budget == 0:
                    spent.append(row)
                    continue
                num_prefilled = 1 if row.is_cached else row.context
                self.now += prefill_s * num_prefilled
                self.prefilled += num_prefilled
                row.is_cached = True
                # The prefill samples the first token.
                heapq.heappush(running, (num_steps + int(min(row.budget, row.turns[0][0])) - 1, id(row), row))
            begun = []
            if not running:
                if not self.replies or (budget < NO_BUDGET and self.replies[0][0] > self.now + WAIT_S):
                    break
                self.now = max(self.now, self.replies[0][0])
                continue
            contexts = sum(row.context for _, _, row in running)
            one_s = step_s + row_s * len(running) + token_s * contexts
            until_end = running[0][0] - num_steps
            until_reply = math.ceil((self.replies[0][0] - self.now) / one_s) if self.replies else until_end
            num_new = min(until_end, max(1, until_reply))
            num_steps += num_new
            self.now += num_new * one_s
            for _, _, row in running:
                row.context += num_new
            while running and running[0][0] <= num_steps:
                row = heapq.heappop(running)[2]
                self._end_part(row, step, spent, ended)
        self.decode_steps += num_steps
        self.rows = spent
        return ended

    def _end_part(self, row: Row, step: int, spent: list[Row], ended: list[Row]) -> None:
        """Count a row's part of a turn; it has spent its budget, waits for a reply, or ends."""
        num_tokens = int(min(row.budget, row.turns[0][0]))
        row.sampled_in[step] += num_tokens
        row.budget -= num_tokens
        row.turns[0][0] -= num_tokens
        if row.turns[0][0] > 0:
            spent.append(row)
            return
        _, reply_s = row.turns.pop(0)
        if row.turns:
            heapq.heappush(self.replies, (self.now + reply_s, id(row), row))
        else:
            ended.append(row)


class Workload:
    """The turns of each prompt's rollouts, the same for every setting. Half of the spread is the prompt's."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        kind, *numbers = args.lengths.split(":")
        self._lengths: list[list[int]] = []
        self._sigma = 0.0
        if kind == "equal":
            self.mean = self.longest = int(numbers[0])
        elif kind == "lognormal":
            self.mean, self.longest = map(int, numbers[:2])
            self._sigma = float(numbers[2]) if len(numbers) > 2 else 0.8
        else:
            self._lengths = lengths_of_run(Path(args.lengths))
            self.mean, self.longest = 0, max(map(max, self._lengths))

    def rows(self, prompt: int) -> list[Row]:
        """The rollouts of a prompt."""
        rng = random.Random(prompt)
        shared = rng.gauss(0, 1)
        rows = []
        for sample in range(self._args.group):
            num_turns = (
                1 if self._args.turns == 1 else min(20, 1 + int(rng.expovariate(1 / self._args.turns)))
            )
            turns = [
                [self._length(rng, shared, prompt, sample), self._reply_s(rng)] for _ in range(num_turns)
            ]
            rows.append(Row(prompt, turns, is_cached=sample > 0))
        return rows

    def _length(self, rng: random.Random, shared: float, prompt: int, sample: int) -> int:
        if self._lengths:
            group = self._lengths[prompt % len(self._lengths)]
            return group[sample % len(group)]
        spread = self._sigma * (shared + rng.gauss(0, 1)) / math.sqrt(2) - self._sigma**2 / 2
        return max(1, min(self.longest, round(self.mean * math.exp(spread))))

    def _reply_s(self, rng: random.Random) -> float:
        """Lognormal, most of them shorter than their mean."""
        mean = self._args.reply_seconds
        return rng.lognormvariate(math.log(mean) - 0.5, 1.0) if mean else 0.0


def lengths_of_run(folder: Path) -> list[list[int]]:
    """The tokens of each completion of a run, by prompt."""
    groups: dict[str, list[int]] = {}
    for path in sorted(folder.glob("rollouts/*.jsonl")):
        for line in path.read_text().splitlines():
            rollout = json.loads(line)
            groups.setdefault(f"{path.name} {rollout['id'][0]}", []).append(rollout["num_tokens"])
    return list(groups.values())


class Simulation:
    """Steps of one setting. max_staleness, round_tokens: as of `Collector`."""

    def __init__(
        self,
        args: argparse.Namespace,
        costs: tuple[float, ...],
        max_staleness: int,
        workload: Workload,
        round_tokens: int | None = None,
    ):
        self._args = args
        self._costs = costs
        self._max_staleness = max_staleness
        self._workload = workload
        self._budget = round_tokens or default_round_tokens(workload.longest) if max_staleness else NO_BUDGET
        self._ranks = [Rank(costs, workers=[0.0] * args.reward_workers) for _ in range(args.ranks)]
        self._num_served = 0
        self._step = 0
        self._begun_in: dict[int, int] = {}
        self._ended: dict[int, list[Row]] = {}
        self._ready_at: dict[int, float] = {}

    def run_step(self) -> dict[str, float]:
        """Simulate a step; return its figures."""
        self._step += 1
        began = self._ranks[0].now
        steps_before = sum(rank.decode_steps for rank in self._ranks)
        prefilled_before = sum(rank.prefilled for rank in self._ranks)
        due = self._due()
        num_prompts = self._args.prompts
        while not (len(ready := self._ready()) >= num_prompts and due <= set(ready)):
            num_open = len(self._begun_in) - len(ready)
            num_allowed = num_prompts * (1 + self._max_staleness) - len(self._begun_in)
            num_new = max(0, min(2 * num_prompts - num_open, num_allowed))
            self._serve(num_new)
            self._run_round(is_idle=num_new == 0)
        rows = [row for prompt in ready[:num_prompts] for row in self._take(prompt)]
        ages = [(self._step - step, count) for row in rows for step, count in row.sampled_in.items()]
        tokens = sum(count for _, count in ages)
        num_trained = tokens + PROMPT_TOKENS * len(rows)
        *_, train_s, switch_s = self._costs
        for rank in self._ranks:
            rank.now += train_s * num_trained / len(self._ranks) + switch_s
            for row in rank.rows + [row for _, _, row in rank.replies]:
                row.is_cached = False
        return {
            "seconds": self._ranks[0].now - began,
            "tokens": tokens,
            "decode_steps": (sum(rank.decode_steps for rank in self._ranks) - steps_before)
            / len(self._ranks),
            "prefilled": sum(rank.prefilled for rank in self._ranks) - prefilled_before,
            "age": sum(age * count for age, count in ages) / tokens,
            "max_age": max(age for age, _ in ages),
        }

    def _due(self) -> set[int]:
        """Return the prompts that this step has to finish, by the rule of `Collector._prompts_due`."""
        prompts = sorted(self._begun_in)
        later = [self._begun_in[prompt] + self._max_staleness - self._step for prompt in prompts]
        num_due = max((i + 1 - self._args.prompts * steps for i, steps in enumerate(later)), default=0)
        return set(prompts[: max(0, num_due)])

    def _ready(self) -> list[int]:
        now = self._ranks[0].now
        return [prompt for prompt, at in sorted(self._ready_at.items()) if at <= now]

    def _serve(self, num_prompts: int) -> None:
        for prompt in range(self._num_served, self._num_served + num_prompts):
            self._begun_in[prompt] = self._step
            rank = self._ranks[prompt % len(self._ranks)]
            rank.rows += self._workload.rows(prompt)
        self._num_served += num_prompts

    def _run_round(self, *, is_idle: bool) -> None:
        """Let all ranks decode a round, and meet at its end; groups that ended are rewarded meanwhile."""
        began = self._ranks[0].now
        for rank in self._ranks:
            for row in rank.run(self._budget, self._step):
                group = self._ended.setdefault(row.prompt, [])
                group.append(row)
                if len(group) == self._args.group:
                    starts = max(rank.now, heapq.heappop(rank.workers))
                    heapq.heappush(rank.workers, starts + self._args.reward_seconds)
                    self._ready_at[row.prompt] = starts + self._args.reward_seconds
        now = max(rank.now for rank in self._ranks)
        if self._max_staleness == 0:
            now = max(now, *self._ready_at.values())
        if now == began and is_idle:
            now += WAIT_S
        for rank in self._ranks:
            rank.now = now

    def _take(self, prompt: int) -> list[Row]:
        del self._begun_in[prompt], self._ready_at[prompt]
        return self._ended.pop(prompt)


def measure(args: argparse.Namespace, costs: tuple[float, ...], max_staleness: int) -> dict[str, float]:
    """Means of the steps after the number of rollouts in flight has become steady."""
    simulation = Simulation(args, costs, max_staleness, Workload(args))
    steps = [simulation.run_step() for _ in range(args.first + args.steps)][args.first :]
    figures = {name: fmean(step[name] for step in steps) for name in steps[0]}
    return figures | {"rate": sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--costs", default="1.5B")
    parser.add_argument("--lengths", default="lognormal:1000:4096")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=float, default=1, help="on average, of a completion")
    parser.add_argument("--reply-seconds", type=float, default=0.0, help="on average, between two turns")
    parser.add_argument(
        "--reward-seconds", type=float, default=0.0, help="of a call for a prompt's completions"
    )
    parser.add_argument("--reward-workers", type=int, default=1, help="of each rank")
    parser.add_argument("--first", type=int, default=10, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    costs = COSTS.get(args.costs) or tuple(map(float, args.costs.split(",")))
    whole = measure(args, costs, 0)
    print("max_staleness  tokens an hour  mean age  largest  seconds a step  decode steps  prefilled tokens")
    for max_staleness in (0, 1, 2, 4, 8):
        found = measure(args, costs, max_staleness)
        print(
            f"{max_staleness:13}  {found['rate'] / whole['rate']:13.2f}x  {found['age']:8.2f}  {found['max_age']:7.1f}"
            f"  {found['seconds']:14.2f}  {found['decode_steps']:12.0f}  {found['prefilled']:16.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
