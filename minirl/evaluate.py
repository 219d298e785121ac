"""Evaluate a model on rows of data, on any number of ranks.

    python -m minirl.evaluate --model DIR --task gsm8k --data test.jsonl --samples 8 --temperature 0.8

Prompts, rollouts and rewards are those of a training run with these flags; for `--model RUN` the run's own are the
defaults. The result is one JSON object, on stdout and
in evaluation.json in the folder of --run-name; all other output goes to stderr. Each rank writes the rollouts of a
prompt as soon as they have their rewards, so the same command goes on with the prompts that a killed one left.
"""

import contextlib
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro

from minirl.episodes.episode import one_turn
from minirl.files import durable
from minirl.files.json_files import json_lines, read_json_lines, read_json_object
from minirl.model.weights import load_replica
from minirl.objective.advantages import weighted_scores
from minirl.ranks import launch, process_group
from minirl.ranks.process_group import barrier, broadcast_object, print0, rank, world_size
from minirl.report.evaluation import Record, bootstrap_interval
from minirl.report.logger import write_args
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
from minirl.run.run_folder import newest_checkpoint, run_of
from minirl.run.setup import Setup
from minirl.show import is_rollout

JUDGED_TOGETHER = 64  # prompts of one call of a reward model, which may have to come from the host's memory
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


@dataclass(frozen=True)
class Config(EvaluationFlags, RunConfig):
    """Those of training have their defaults."""

    @property
    def trains(self) -> bool:
        """Nothing is trained."""
        return False


def parsed(arguments: Sequence[str] | None = None) -> Config:
    """The config of the command line (or of `arguments`), with the defaults of the run that --model names."""
    model = early_value("model", arguments)
    run = run_of(model) if model else None
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


def checked(config: Config) -> Config:
    """The config with the rows to evaluate as `eval_data`. Raises InputError for flags that cannot be used."""
    files = config.eval_data or tuple(filter(None, [config.data]))
    # No other rows are read, as nothing is trained on them.
    config = dataclasses.replace(config, data=next(iter(files), None), eval_data=files)
    check_shared(config)
    return config


def finished_records(folder: Path, num_samples: int) -> list[Record]:
    """On rank 0 the records of the prompts that have all their samples, in order of their ids; else none.

    Rank 0 puts them into one file, which replaces the ranks' files, and drops lines that a kill cut off.
    """
    if rank() != 0:
        return []
    records: dict[tuple[int, int], Record] = {}
    paths = sorted(folder.glob("*.jsonl"))
    for path in paths:
        lines, _ = read_json_lines(path, is_rollout)
        records |= {tuple(line["id"]): line for line in lines}
    counts = Counter(prompt_ordinal for prompt_ordinal, _ in records)
    finished = [records[key] for key in sorted(records) if counts[key[0]] == num_samples]
    merged = folder / "000000.jsonl"
    durable.replace_file(merged, json_lines(finished))
    for path in {*paths} - {merged}:
        path.unlink()
    return finished


def evaluate_prompts(setup: Setup, prompt_ordinals: Sequence[int], path: Path) -> None:
    """Make and reward this rank's rollouts of these prompts, and add their records to a file. Not collective."""
    engine = setup.make_engine(load_replica(setup.model_folder, dtype=setup.dtype).to(setup.device))
    collector = setup.make_collector(engine, one_turn).evaluator(setup.held_out)
    own = [ordinal for ordinal in prompt_ordinals if ordinal % world_size() == rank()]
    for rewarded in collector.run(
        (setup.eval_requests(ordinal, 1) for ordinal in own),
        num_requests=len(own) * (setup.config.eval_samples or 1),
        num_open=2 * setup.sizes.max_running_requests,
        num_together=JUDGED_TOGETHER if setup.config.reward_model else 1,
    ):
        scores = weighted_scores(rewarded.rewards, setup.score_weights)
        records = setup.records(rewarded, reward=scores)
        durable.append_whole(path, json_lines(records).encode())


def result_of(setup: Setup, records: Sequence[Record]) -> dict[str, Any]:
    """The JSON of an evaluation. records: those of all prompts, in order of their ids."""
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
        **(config.truncation._asdict() if config.top_k else {}),
        "errors": sum(record["finish_reason"] == "error" for record in records),
        "scores": scores,
    }


def evaluate(config: Config) -> dict[str, Any]:
    """Evaluate the prompts that are not finished yet; returns the JSON on rank 0, else {} (collective)."""
    process_group.start(hang_timeout=config.hang_timeout)
    # On rank 0 alone: meanwhile the run may save another one. An evaluation that goes on must have the same.
    model = newest_checkpoint(config.model, flag="--model") if config.model and rank() == 0 else None
    setup = Setup(dataclasses.replace(config, model=broadcast_object(model)), name="eval")
    folder = setup.folder.path
    rollouts = folder / "rollouts"
    if rank() == 0:
        rollouts.mkdir(exist_ok=True)
        write_args(folder, setup.args())
    setup.print_start()
    num_samples = config.eval_samples or 1
    finished = broadcast_object({record["id"][0] for record in finished_records(rollouts, num_samples)})
    left = [ordinal for ordinal in range(setup.held_out.num_prompts) if ordinal not in finished]
    print0(f"{len(finished)} prompts are finished, {len(left)} are left; rollouts are in {rollouts}")
    if left:
        evaluate_prompts(setup, left, rollouts / f"{rank() + 1:06d}.jsonl")
    barrier()
    records = finished_records(rollouts, num_samples)
    if rank() != 0:
        return {}
    assert len(records) == setup.held_out.num_prompts * num_samples, f"{rollouts} lacks rollouts"
    result = result_of(setup, records)
    durable.replace_file(folder / "evaluation.json", json.dumps(result, indent=2) + "\n")
    return result


def main(config: Config) -> int:
    """Evaluate and print the JSON; returns the exit code. Every rank runs it."""
    config = checked(config)
    with contextlib.redirect_stdout(sys.stderr):
        result = evaluate(config)
    print0(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    launch.run(lambda: main(parsed()))
