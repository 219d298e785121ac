"""The gain of partial rollouts: the same completions collected whole and with a bound of staleness, in turns.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/partial_rollouts.py [--lengths skewed|equal] [--max-staleness 8]
    OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --standalone --nproc-per-node 2 benchmarks/partial_rollouts.py
    PYTHONPATH=. python benchmarks/partial_rollouts.py --learn MODEL --data PROMPTS.jsonl

A step takes 8 prompts x 8 completions: of 80 tokens, and 4 of 800 (skewed); or of 260 each (equal). The model is
random, with 1.6M parameters, and is not trained. Steps count once the number in flight is steady. Figures are means
over steps: seconds and CPU seconds of rank 0, and their ratios by the token that a step takes; `prefill_tokens` of all
ranks includes resuming paused rollouts; ages are in steps, of the tokens taken.

--learn trains MODEL, a small Hugging Face folder, by `train_grpo.py` on the prompts of --data: whole rollouts, partial
ones, and partial ones without importance weights. Completions have up to 64 tokens. It prints the mean reward, the
share of the letter e, over the last 10 steps, the step in which it first reaches 0.5, and the mean age, by seed.
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
from workload import PhaseClock, print_figures, print_result, prompt_texts, start_script

from minirl.data.prompts import PromptStream
from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.episodes.collector import Collector
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
STALE = ("--max-staleness", "4")
LEARNERS = {"whole": (), "partial": STALE, "uncorrected": (*STALE, "--correction", "none")}
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
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--round-tokens", type=int, help="of a completion in a round")
    parser.add_argument("--first", type=int, default=8, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=6, help="steps that count")
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
        "taken": taken,
        "decode_steps": stats.decode_steps,
        "prefill_s": reduced.get("time/prefill", 0.0),
        "decode_s": reduced.get("time/decode", 0.0),
        **{name: value for name, value in reduced.items() if not name.startswith("time")},
    }


def generate(args: argparse.Namespace) -> None:
    """Compare the seconds of generation (collective)."""
    device = process_group.start()
    engine = make_engine(device)
    clock = PhaseClock(device)
    time_account.this_process.begin()
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(folder, None)
        tokenizer = Tokenizer(Path(folder))
    rewards = {"length": lambda completion_ids: [float(len(ids)) for ids in completion_ids]}
    collectors = {
        max_staleness: Collector(
            engine,
            Prompts(tokenizer, LENGTHS[args.lengths]),
            rewards,
            group_size=GROUP_SIZE,
            max_staleness=max_staleness,
            round_tokens=args.round_tokens,
        )
        for max_staleness in (0, args.max_staleness)
    }
    steps: dict[int, list[dict[str, float]]] = {max_staleness: [] for max_staleness in collectors}
    for step in range(args.first + args.steps):
        for max_staleness, collector in collectors.items():
            if max_staleness == 0 and step < args.first:
                continue  # nothing is in flight
            figures = measure_step(collector, engine, step, clock)
            if rank() == 0:
                print_figures({"max_staleness": max_staleness, "step": step, **figures})
            if step >= args.first:
                steps[max_staleness].append(figures)
    if rank() == 0:
        whole, partial = (means(figures) for figures in steps.values())
        print_result(
            what=f"partial rollouts, {args.lengths}",
            world=world_size(),
            max_staleness=args.max_staleness,
            faster=per_token(whole, "wall_s") / per_token(partial, "wall_s"),
            less_cpu=per_token(whole, "cpu_s") / per_token(partial, "cpu_s"),
            whole=rounded(whole),
            partial=rounded(partial),
        )
    process_group.stop()


def means(steps: list[dict[str, float]]) -> dict[str, float]:
    """By figure: steps take turns to decode much and little, which medians would hide."""
    return {name: fmean(step[name] for step in steps if name in step) for name in steps[0]}


def per_token(figures: dict[str, float], name: str) -> float:
    """A figure of all steps over the tokens that they take."""
    return figures[name] / figures["taken"]


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """With four digits."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def learn(args: argparse.Namespace) -> None:
    """Compare the rewards that are reached with equally many samples."""
    last: dict[str, list[float]] = {name: [] for name in LEARNERS}
    step_to_half: dict[str, list[int | None]] = {name: [] for name in LEARNERS}
    ages: dict[str, list[float]] = {name: [] for name in LEARNERS}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "reward.py").write_text(REWARD)
        for seed in range(args.seeds):
            for name, flags in LEARNERS.items():
                steps = train(args, root, f"{name}-{seed}", "--seed", str(seed), *flags)
                rewards = [step["reward/mean"] for step in steps]
                last[name].append(fmean(rewards[-10:]))
                step_to_half[name].append(next((i for i, r in enumerate(rewards, 1) if r >= 0.5), None))
                ages[name].append(fmean(step.get("stale/age_mean", 0.0) for step in steps))
                print(
                    f"seed {seed}, {name}: {last[name][-1]:.3f}, 0.5 in {step_to_half[name][-1]}", flush=True
                )
    print_result(what="learning with partial rollouts", last10=last, step_to_half=step_to_half, mean_age=ages)


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
