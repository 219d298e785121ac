"""The gain of partial rollouts: the same completions collected with and without a decode budget, in turns.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/partial_rollouts.py [--lengths skewed|equal]
    OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --standalone --nproc-per-node 2 benchmarks/partial_rollouts.py
    PYTHONPATH=. python benchmarks/partial_rollouts.py --learn MODEL --data PROMPTS.jsonl

A step takes 8 prompts x 8 completions: of 80 tokens, and 4 of 800 (skewed); or of 260 each (equal). The model is
random, with 1.6M parameters, and is not trained. Steps count once the number in flight is steady. Figures are medians
over steps: seconds and CPU seconds of rank 0, each also over the tokens that the step takes; `prefill_tokens` of all
ranks includes resuming paused rollouts; ages are in steps, of the tokens taken.

--learn trains MODEL, a small Hugging Face folder, by `train_grpo.py` on the prompts of --data: without a budget, with
one, and with importance weights besides. Completions have 64 tokens and a budget of 16, so that each is sampled by the
weights of four steps. It prints the mean reward, the share of the letter e, over the last 10 steps, and the step in
which it first reaches 0.5, by seed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from real_step import REWARD
from workload import PhaseClock, medians, print_figures, print_result, prompt_texts, start_script

from minirl.collect.collector import Collector
from minirl.data.prompts import PromptStream
from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.generation.engine import Engine
from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer
from minirl.ranks import process_group, time_account
from minirl.ranks.process_group import rank, world_size
from minirl.report.metrics import StepMetrics, add_staleness
from minirl.rollouts import Request, RolloutId

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.texts import save_tokenizer

NUM_PROMPTS = 8  # per step
GROUP_SIZE = 8
BUDGET = ("--decode-budget", "16")
LEARNERS = {"whole": (), "partial": BUDGET, "uncorrected": (*BUDGET, "--correction", "none")}
SHORT, MIDDLE, LONG = 80, 260, 800  # tokens
SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def skewed(rollout_id: RolloutId) -> int:
    """4 of a step's 64 completions are ten times as long."""
    is_long = rollout_id.prompt_ordinal % 2 == 0 and rollout_id.sample == 3
    return LONG if is_long else SHORT


def equal(rollout_id: RolloutId) -> int:
    """All completions are equally long."""
    return MIDDLE


LENGTHS: dict[str, Callable[[RolloutId], int]] = {"skewed": skewed, "equal": equal}


class Prompts(PromptStream):
    """Prompts whose completions end at given lengths."""

    def __init__(self, tokenizer: Tokenizer, length_of: Callable[[RolloutId], int]):
        rows = [Row(text, {}, f"prompt {i}") for i, text in enumerate(prompt_texts(64))]
        super().__init__(rows, tokenizer, purpose="train", max_tokens=1024, max_new_tokens=LONG)
        self._length_of = length_of

    def request(self, rollout_id: RolloutId, prompt_ids: tuple[int, ...], temperature: float) -> Request:
        """The request of `PromptStream.request`, with the given length."""
        request = super().request(rollout_id, prompt_ids, temperature)
        return replace(request, max_new_tokens=self._length_of(rollout_id), stop_ids=frozenset())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", choices=list(LENGTHS), default="skewed")
    parser.add_argument("--budget", type=int, default=130, help="tokens of a completion in a step")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--learn", type=Path, metavar="MODEL", help="compare learning curves instead")
    parser.add_argument("--data", type=Path, help="of --learn: JSONL file with prompts")
    parser.add_argument("--seeds", type=int, default=3, help="of --learn")
    parser.add_argument("--num-steps", type=int, default=45, help="of --learn")
    return parser.parse_args()


def make_engine(device: torch.device) -> Engine:
    """An engine with a place for every rollout in flight, over a random model."""
    torch.manual_seed(0)
    model = Transformer(config_from_dict(SHAPE))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    return Engine(model, max_running_requests=512, cache_tokens=1 << 18, dtype=torch.float32, device=device)


def measure_step(collector: Collector, engine: Engine, step: int, clock: PhaseClock) -> dict[str, float]:
    """Collect the groups of one step; returns its figures (collective)."""
    metrics = StepMetrics(step)
    metrics.begin("generate")
    with clock.phase("wall"):
        groups = collector.collect(NUM_PROMPTS, weight_version=step)
    metrics.end()
    seconds = clock.take()
    stats = engine.take_stats()
    taken = int(groups.table.num_loss_tokens.sum())
    add_staleness(metrics, groups.rewarded.rollouts, step, updates_per_step=1)
    metrics.add_total("prefill_tokens", stats.prefill_tokens)
    metrics.add_total("sampled", collector.take_count("sampled_tokens"))
    metrics.add("mean_running", stats.decode_tokens, stats.decode_steps)
    reduced = metrics.reduce()
    return {
        "wall_s": seconds["wall"],
        "cpu_s": seconds["wall_cpu"],
        "us_per_token": 1e6 * seconds["wall"] / taken,
        "cpu_us_per_token": 1e6 * seconds["wall_cpu"] / taken,
        "taken": taken,
        "decode_steps": stats.decode_steps,
        "prefill_s": reduced["time/prefill"],
        "decode_s": reduced["time/decode"],
        **{name: value for name, value in reduced.items() if not name.startswith("time")},
    }


def generate(args: argparse.Namespace) -> None:
    """Compare the seconds of generation (collective)."""
    device = process_group.start(device="cpu")
    engine = make_engine(device)
    clock = PhaseClock(device)
    time_account.this_process.begin()
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(folder, None)
        tokenizer = Tokenizer(Path(folder))
    rewards = {"length": lambda completion_ids: [float(len(ids)) for ids in completion_ids]}
    collectors = {
        budget: Collector(
            engine,
            Prompts(tokenizer, LENGTHS[args.lengths]),
            rewards,
            group_size=GROUP_SIZE,
            decode_budget=budget,
            max_staleness=8,
        )
        for budget in (None, args.budget)
    }
    # The number in flight grows in the first steps, which decode in several rounds, then ever less.
    longest = max(map(LENGTHS[args.lengths], (RolloutId(0, sample) for sample in range(GROUP_SIZE))))
    num_before = 4 * (longest // args.budget)
    steps: dict[int | None, list[dict[str, float]]] = {budget: [] for budget in collectors}
    for step in range(num_before + args.steps):
        for budget, collector in collectors.items():
            if budget is None and step < num_before:
                continue  # nothing is in flight
            figures = measure_step(collector, engine, step, clock)
            if rank() == 0:
                print_figures({"budget": budget or 0, "step": step, **figures})
            if step >= num_before:
                steps[budget].append(figures)
    if rank() == 0:
        whole, partial = (medians(figures) for figures in steps.values())
        print_result(
            what=f"partial rollouts, {args.lengths}",
            world=world_size(),
            budget=args.budget,
            faster=whole["us_per_token"] / partial["us_per_token"],
            less_cpu=whole["cpu_us_per_token"] / partial["cpu_us_per_token"],
            whole=rounded(whole),
            partial=rounded(partial),
        )
    process_group.stop()


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """With four digits."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def learn(args: argparse.Namespace) -> None:
    """Compare the rewards that are reached with equally many samples."""
    last: dict[str, list[float]] = {name: [] for name in LEARNERS}
    step_to_half: dict[str, list[int | None]] = {name: [] for name in LEARNERS}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "reward.py").write_text(REWARD)
        for seed in range(args.seeds):
            for name, flags in LEARNERS.items():
                steps = train(args, root, f"{name}-{seed}", "--seed", str(seed), *flags)
                rewards = [step["reward/mean"] for step in steps]
                last[name].append(fmean(rewards[-10:]))
                step_to_half[name].append(next((i for i, r in enumerate(rewards, 1) if r >= 0.5), None))
                print(
                    f"seed {seed}, {name}: {last[name][-1]:.3f}, 0.5 in {step_to_half[name][-1]}", flush=True
                )
    print_result(what="learning with partial rollouts", last10=last, step_to_half=step_to_half)


def train(args: argparse.Namespace, root: Path, name: str, *flags: str) -> list[dict[str, float]]:
    """Train in the folder `root / name`; returns the metrics of the steps."""
    job = start_script(
        "train_grpo.py",
        *("--run-name", name),
        *("--model", str(args.learn)),
        *("--data", str(args.data)),
        *("--reward", f"{root / 'reward.py'}:letters"),
        *("--prompts-per-step", str(NUM_PROMPTS)),
        *("--group-size", str(GROUP_SIZE)),
        *("--max-new-tokens", "64"),
        *("--num-steps", str(args.num_steps)),
        *("--lr", "3e-4"),
        *("--lr-schedule", "constant"),
        *("--warmup-updates", "1"),
        *("--eval-every", "0"),
        *("--save-every", "0"),
        *flags,
        runs=root,
        ranks=1,
        stdout=subprocess.DEVNULL,
    )
    assert job.wait() == 0, "the run failed"
    return [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if args.learn:
        learn(args)
    else:
        generate(args)


if __name__ == "__main__":
    main()
