"""Evaluate a model on a data set, on any number of ranks.

    python -m minirl.extras.evaluate --model DIR --task gsm8k --data test.jsonl --samples 8 --temperature 0.8

Prompts, rollouts and rewards are the same as in a training run with these flags. With `--model RUN`, the flags default
to that run's values. The result is one JSON object, printed to stdout and saved as evaluation.json in the run folder
(--run-name), along with the rollouts. All other output goes to stderr.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, multimode, quantiles
from typing import Annotated, Any

import tyro

from minirl.data.task import Task
from minirl.episodes.episode import one_turn
from minirl.errors import InputError, refuse
from minirl.files import durable
from minirl.files.json_files import read_json_object
from minirl.model.weights import load_unsharded_model
from minirl.ranks import launch
from minirl.ranks.process_group import gather_objects, print0, rank
from minirl.report.logger import Logger
from minirl.report.records import Record, mean_rewards
from minirl.rollouts import MAX_TOP_K, TRUNCATED_REASONS, Truncation
from minirl.run.checkpoint import checkpoints_in
from minirl.run.checks import check_shared_flags
from minirl.run.config import RunConfig
from minirl.run.flags import parse, read_flag
from minirl.run.run_folder import find_run
from minirl.run.setup import Setup

# RUN_FLAGS: flags whose defaults come from the evaluated run. FLAGS: all flags of an evaluation.
RUN_FLAGS = (
    "task eval_data chat chat_template_kwargs max_new_tokens rollout tools environment workers call_timeout reward "
    "reward_model reward_weights overlong_buffer"
).split()
FLAGS = (
    *RUN_FLAGS,
    *"model data eval_rows eval_samples temperature top_k top_p max_turns cache_tokens".split(),
    *"run_name seed dtype hang_timeout".split(),
)
NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Config(RunConfig):
    """Evaluation flags; training flags keep their defaults."""

    model: str | None = None
    """[Model and data] Hugging Face model folder or Hub id, or a run, to evaluate the run's newest checkpoint (default:
    a tiny bundled model)"""
    data: str | None = None
    """file or dataset with the prompts to evaluate; --eval-data takes precedence"""
    eval_rows: int = 10**9  # [Evaluation] maximum number of rows per file
    eval_samples: Annotated[int, tyro.conf.arg(aliases=["--samples"])] = 0
    """number of sampled completions per row, at --temperature (0: one greedy completion)"""
    top_k: int = 0  # sample only from the top_k most likely tokens (at most 256); 0 disables
    top_p: float = 1.0  # nucleus sampling: cumulative probability to keep among the --top-k tokens

    trains = False


def find_model(model: str) -> tuple[str, dict[str, Any]]:
    """Return the model folder for --model, and the args.json content of its run ({} for a folder outside a run).

    If --model names a run, the folder is its newest checkpoint. Raises InputError if the run has no checkpoint.
    """
    folder = Path(model).resolve()
    args = folder.parent.parent / "args.json"
    # A checkpoint that was copied elsewhere belongs to no run.
    if args.is_file() and folder in checkpoints_in(args.parent):
        return model, read_json_object(args)
    if os.path.isfile(folder / "config.json"):
        return model, {}
    try:
        run = find_run(model, "args.json")
    except InputError:  # a Hub id
        return model, {}
    checkpoints = checkpoints_in(run)
    refuse(not checkpoints, f"--model {model}: the run {run} has no checkpoint yet")
    return str(checkpoints[-1]), read_json_object(run / "args.json")


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    """Parse the command line (or `arguments`), with defaults from the run that --model names, if any."""
    model = read_flag("model", arguments)
    folder, args = find_model(model) if model else (None, {})
    if read_flag("data", arguments):
        args["eval_data"] = []
    defaults = {name: tuple(v) if isinstance(v, list) else v for name, v in args.items() if name in RUN_FLAGS}
    config = parse(Config, description=__doc__ or "", defaults=defaults, names=FLAGS, arguments=arguments)
    return dataclasses.replace(config, model=folder)


@functools.cache
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that at least one of k samples, drawn without replacement, is correct.

    This is equation 1 of arXiv:2107.03374.
    """
    # The binomials are exact integers, which do not overflow; only their quotient is rounded.
    num_subsets = math.comb(num_samples, k)
    return (num_subsets - math.comb(num_samples - num_correct, k)) / num_subsets


def majority(answers: Sequence[Any], is_correct: Sequence[bool]) -> float:
    """Return the fraction of correct samples among samples with the most frequent answer(s). None means no answer."""
    winners = multimode(answer for answer in answers if answer is not None)
    votes = [right for answer, right in zip(answers, is_correct, strict=True) if answer in winners]
    return fmean(votes) if votes else 0.0


def values_by_prompt(
    records: Iterable[Record], task: Task, weights: Mapping[str, float]
) -> dict[str, list[float]]:
    """Return each metric's values, one per prompt. Prompts without the metric are left out. Not collective.

    records: records of all ranks' completions. weights: reward weights, keyed by name. If all rewards with a positive
    weight are 0 or 1, these rewards tell `prompt_metrics` which completions are correct.
    """
    values = defaultdict(list)
    in_order = sorted(records, key=lambda record: record["id"])
    correctness_rewards = [name for name, weight in weights.items() if weight > 0]
    if any(
        record["rewards"][name] not in (0, 1, None) for record in in_order for name in correctness_rewards
    ):
        correctness_rewards = []
    for _, group in itertools.groupby(in_order, key=lambda record: record["id"][0]):
        samples = list(group)
        numbers = mean_rewards(samples, task) | prompt_metrics(samples, task, correctness_rewards)
        for name, value in numbers.items():
            values[name].append(value)
    return values


def prompt_metrics(
    samples: Sequence[Record], task: Task, correctness_rewards: Sequence[str]
) -> dict[str, float]:
    """Return the mean length and truncated fraction of a prompt's samples, and, if defined, pass@k and majority vote.

    correctness_rewards: names of rewards that are 0 or 1; without such rewards, only lengths are measured. A completion
    is correct if all its applicable correctness rewards are 1.
    """
    numbers = {
        "eval/len_mean": fmean([sample["num_tokens"] for sample in samples]),
        "eval/truncated": fmean([sample["finish_reason"] in TRUNCATED_REASONS for sample in samples]),
    }
    scored = [sample for sample in samples if correctness_rewards and sample["reward"] is not None]
    is_correct = [
        all(sample["rewards"][name] in (1, None) for name in correctness_rewards) for sample in scored
    ]
    for k in range(1, len(scored) + 1):
        numbers[f"eval/pass@{k}"] = pass_at_k(len(scored), sum(is_correct), k)
    if task.extract_answer is not None and len(scored) > 1:
        answers = [task.extract_answer(sample["completion"]) for sample in scored]
        numbers["eval/majority"] = majority(answers, is_correct)
    return numbers


def bootstrap_interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the 95% bootstrap confidence interval of the mean: percentiles of the means of resampled values."""
    generator = random.Random(seed)
    means = [fmean(generator.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)]
    low, *_, high = quantiles(means, n=40, method="inclusive")
    return low, high


def evaluation_result(setup: Setup, records: Iterable[Record], truncation: Truncation) -> dict[str, Any]:
    """Return the JSON result.

    records: the records of all prompts. truncation: the top-k and top-p used for sampling.
    """
    config = setup.config
    weights = dict(zip(setup.reward_functions, setup.eval_reward_weights.tolist(), strict=True))
    scores: dict[str, Any] = {}
    for name, prompt_values in values_by_prompt(records, setup.task, weights).items():
        low, high = bootstrap_interval(prompt_values, seed=config.seed)
        scores[name] = {"mean": fmean(prompt_values), "low": low, "high": high, "prompts": len(prompt_values)}
    return {
        "model": str(setup.model_folder),
        "data": list(setup.task.eval_sets),
        "prompts": setup.held_out.num_prompts,
        "samples": config.eval_samples or 1,
        "temperature": config.temperature if config.eval_samples else 0.0,
        **(truncation._asdict() if truncation.top_k else {}),
        "scores": scores,
    }


def evaluate(config: Config) -> str:
    """Evaluate all held-out prompts; return the JSON result on rank 0 and "" on other ranks (collective)."""
    setup = Setup(config, name="eval")
    setup.print_start()
    folder = setup.folder.path
    logger = Logger(folder, setup.args())
    policy = load_unsharded_model(setup.model_folder, dtype=setup.dtype).to(setup.device)
    evaluator = setup.make_collector(policy, one_turn).evaluator(setup.held_out)
    truncation = Truncation(config.top_k, config.top_p)
    own = setup.evaluate(evaluator, truncation=truncation)
    logger.log_rollouts(0, own)
    records = itertools.chain(*gather_objects(own))
    if rank() != 0:
        return ""
    result = json.dumps(evaluation_result(setup, records, truncation), indent=2)
    durable.replace_file(folder / "evaluation.json", f"{result}\n")
    return result


def main(config: Config) -> int:
    """Evaluate, print the JSON result and return the exit code. Every rank calls this function."""
    files = config.eval_data or tuple(filter(None, [config.data]))
    # An evaluation needs no training rows, so `data` is just one of the evaluated files.
    config = dataclasses.replace(config, data=next(iter(files), None), eval_data=files)
    check_shared_flags(config)
    refuse(not 0 <= config.top_k <= MAX_TOP_K, f"--top-k {config.top_k}: must be between 0 and {MAX_TOP_K}")
    refuse(
        not (0 < config.top_p < 1 and config.top_k) and config.top_p != 1,
        f"--top-p {config.top_p}: must be greater than 0 and at most 1; values below 1 require --top-k, to limit how "
        f"many tokens are sorted: add --top-k {MAX_TOP_K} (the maximum)",
    )
    with contextlib.redirect_stdout(sys.stderr):
        result = evaluate(config)
    print0(result)
    return 0


if __name__ == "__main__":
    launch.run(lambda: main(parse_config()))
