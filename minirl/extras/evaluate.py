"""Evaluate a model on rows of data, on any number of ranks.

    python -m minirl.extras.evaluate --model DIR --task gsm8k --data test.jsonl --samples 8 --temperature 0.8

Prompts, rollouts and rewards are those of a training run with these flags; for `--model RUN` the run's own are the
defaults. The result is one JSON object, on stdout and in evaluation.json in the folder of --run-name, beside the
rollouts; all other output goes to stderr.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro

from minirl.episodes.episode import one_turn
from minirl.errors import InputError, refuse
from minirl.files import durable
from minirl.files.json_files import read_json_object
from minirl.model.weights import load_replica
from minirl.ranks import launch, process_group
from minirl.ranks.process_group import broadcast_object, gather_objects, print0, rank
from minirl.report.evaluation import Record, bootstrap_interval
from minirl.report.logger import Logger
from minirl.rollouts import MAX_TOP_K, Truncation
from minirl.run.checkpoint import checkpoints_in
from minirl.run.checks import check_shared
from minirl.run.config import (
    GenerationFlags,
    MachineFlags,
    ModelAndDataFlags,
    RewardFlags,
    RunConfig,
    RunNameFlags,
)
from minirl.run.flags import early_value, parse
from minirl.run.run_folder import find_run
from minirl.run.setup import Setup

# The flags of a run that its evaluation repeats.
OF_RUN = (
    "task eval_data chat chat_template_kwargs max_new_tokens rollout tools environment workers call_timeout reward "
    "reward_model reward_weights overlong_buffer"
).split()


@dataclass(frozen=True)
class EvaluationFlags(MachineFlags, RunNameFlags, RewardFlags, GenerationFlags, ModelAndDataFlags):
    """The flags of an evaluation."""

    model: str | None = None
    """Hugging Face folder, hub id, or a run, for its newest checkpoint; none: a tiny embedded model"""
    data: str | None = None  # JSONL file of prompts, if there is no --eval-data
    eval_rows: int = 10**9  # most rows used from each file
    eval_samples: Annotated[int, tyro.conf.arg(aliases=["--samples"])] = 0
    """completions of each row, sampled at --temperature; 0: one, greedy"""
    top_k: int = 0  # sample among the N likeliest tokens, at most 256; 0: among all
    top_p: float = 1.0  # of the --top-k, sample among the likeliest with this share of their probability

    @property
    def truncation(self) -> Truncation:
        """Which tokens may be sampled."""
        return Truncation(self.top_k, self.top_p)


@dataclass(frozen=True)
class Config(EvaluationFlags, RunConfig):
    """Those of training have their defaults."""

    @property
    def trains(self) -> bool:
        """Nothing is trained."""
        return False


def _is_checkpoint(model: str) -> bool:
    """True for a checkpoint of a run."""
    return os.path.isdir(os.path.join(model, "resume"))


def _run_of(model: str) -> Path | None:
    """The folder of the run with this path or name, or of the run that saved this checkpoint; None: another model."""
    if _is_checkpoint(model):
        return Path(model).resolve().parent.parent
    is_model = os.path.exists(os.path.join(model, "config.json"))
    with contextlib.suppress(InputError):
        return None if is_model else find_run(model, "args.json")
    return None


def _newest_checkpoint(model: str) -> str:
    """The newest checkpoint of a run; any other model unchanged. Raises InputError if the run has none."""
    run = _run_of(model)
    if run is None or _is_checkpoint(model):
        return model
    checkpoints = checkpoints_in(run)
    refuse(not checkpoints, f"--model {model}: the run {run} has no checkpoint")
    return str(checkpoints[-1])


def parsed(arguments: Sequence[str] | None = None) -> Config:
    """The config of the command line (or of `arguments`), with the defaults of the run that --model names."""
    model = early_value("model", arguments)
    run = _run_of(model) if model else None
    args = read_json_object(run / "args.json") if run else {}
    if early_value("data", arguments):
        args["eval_data"] = []
    values = {name: args[name] for name in OF_RUN if name in args}
    flags = parse(
        EvaluationFlags,
        description=__doc__ or "",
        defaults={name: tuple(v) if isinstance(v, list) else v for name, v in values.items()},
        arguments=arguments,
    )
    return Config(**vars(flags))


def evaluate_prompts(setup: Setup) -> Sequence[Record]:
    """Make and reward this rank's rollouts of all prompts; return their records. Not collective."""
    engine = setup.make_engine(load_replica(setup.model_folder, dtype=setup.dtype).to(setup.device))
    collector = setup.make_collector(engine, one_turn).evaluator(setup.held_out)
    return setup.records(collector.run(setup.eval_requests()), setup.score_weights)


def result_of(setup: Setup, records: Sequence[Record]) -> dict[str, Any]:
    """The JSON of an evaluation. records: those of all prompts."""
    config = setup.config
    scores: dict[str, Any] = {}
    for name, of_prompts in setup.eval_values(records).items():
        low, high = bootstrap_interval(of_prompts, seed=config.seed)
        scores[name] = {"mean": fmean(of_prompts), "low": low, "high": high, "prompts": len(of_prompts)}
    return {
        "model": str(setup.model_folder),
        "data": list(setup.task.eval_sets),
        "prompts": setup.held_out.num_prompts,
        "samples": config.eval_samples or 1,
        "temperature": config.temperature if config.eval_samples else 0.0,
        **(config.truncation._asdict() if config.truncation.top_k else {}),
        "scores": scores,
    }


def evaluate(config: Config) -> dict[str, Any]:
    """Evaluate all held-out prompts; returns the JSON on rank 0, else {} (collective)."""
    process_group.start(hang_timeout=config.hang_timeout)
    # On rank 0 alone: meanwhile the run may save another one.
    model = _newest_checkpoint(config.model) if config.model and rank() == 0 else None
    setup = Setup(dataclasses.replace(config, model=broadcast_object(model)), name="eval")
    setup.print_start()
    folder = setup.folder.path
    logger = Logger(folder, setup.args(), wandb_mode="off")
    own = evaluate_prompts(setup)
    logger.log_rollouts(0, own)
    records = itertools.chain(*gather_objects(own))
    if rank() != 0:
        return {}
    result = result_of(setup, list(records))
    durable.replace_file(folder / "evaluation.json", json.dumps(result, indent=2) + "\n")
    return result


def main(config: Config) -> int:
    """Evaluate and print the JSON; returns the exit code. Every rank runs it."""
    files = config.eval_data or tuple(filter(None, [config.data]))
    # No other rows are read, as nothing is trained on them.
    config = dataclasses.replace(config, data=next(iter(files), None), eval_data=files)
    check_shared(config)
    refuse(
        not 0 <= config.top_k <= MAX_TOP_K, f"--top-k {config.top_k}: must be a number from 0 to {MAX_TOP_K}"
    )
    refuse(not 0 < config.top_p <= 1, f"--top-p {config.top_p}: must be greater than 0 and at most 1")
    refuse(
        config.top_p < 1 and not config.top_k,
        f"--top-p {config.top_p}: needs --top-k, which bounds the tokens that are sorted; add --top-k {MAX_TOP_K}, "
        "the most",
    )
    with contextlib.redirect_stdout(sys.stderr):
        result = evaluate(config)
    print0(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    launch.run(lambda: main(parsed()))
