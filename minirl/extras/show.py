"""Show a step's rollouts in the terminal: `python -m minirl.extras.show RUN [STEP]`.

RUN is a run's folder, or its name in ./runs or $MINIRL_RUNS. STEP defaults to the last step with saved rollouts.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional

from minirl.errors import escape_control_chars, refuse
from minirl.files.json_files import read_json_lines
from minirl.ranks import launch
from minirl.ranks.process_group import print0
from minirl.run.run_folder import find_run


def step_file(run: str, step: int | None) -> Path:
    """Return the file with a step's rollouts (None: the last step). Raises InputError if the file is missing."""
    folder = find_run(run, "rollouts") / "rollouts"
    files = {int(path.stem): path for path in folder.glob("*.jsonl") if path.stem.isdecimal()}
    refuse(not files, f"{folder} has no rollouts yet")
    number = max(files) if step is None else step
    refuse(
        number not in files,
        f"{folder} has no rollouts for step {number}; choose a step from {min(files)} to {max(files)}",
    )
    return files[number]


def format_rollout(rollout: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of text that display a rollout."""
    ordinal, sample = rollout["id"]
    numbers = [f"{key} {format_number(rollout[key])}" for key in ("reward", "advantage") if key in rollout]
    facts = [*numbers, f"{rollout['num_tokens']} tokens sampled", rollout["finish_reason"]]
    yield f"{ordinal}.{sample}  {rollout['row']}  {', '.join(facts)}"
    rewards = [f"{name} {format_number(value)}" for name, value in rollout["rewards"].items()]
    yield f"rewards: {', '.join(rewards)}"
    yield "prompt:"
    # The prompt as it appears in the data: text, or messages as JSON.
    prompt = rollout["prompt"]
    yield prompt if isinstance(prompt, str) else "\n".join(map(json.dumps, prompt))
    # A single-turn rollout has no segments.
    answer = {"kind": "sampled", "text": rollout["completion"], "num_tokens": rollout["num_tokens"]}
    for segment in rollout.get("segments", [answer]):
        yield f"{segment['kind']}, {segment['num_tokens']} tokens:"
        yield segment["text"]


def format_number(number: Any) -> str:
    """Format a number with four significant digits, and None as "none"."""
    return "none" if number is None else f"{number:.4g}"


def main(run: Positional[str], step: Positional[int | None] = None, num: int = 4) -> None:
    """Show a step's rollouts. Raises InputError for a step without rollouts.

    Args:
        run: a run's folder, or its name in ./runs or $MINIRL_RUNS
        step: step number (None: the last step with saved rollouts)
        num: maximum number of rollouts to show
    """
    path = step_file(run, step)
    # Rollouts may contain control characters, which must not reach the terminal.
    texts = [escape_control_chars("\n".join(format_rollout(rollout))) for rollout in read_json_lines(path)]
    print0("\n\n".join([*texts[:num], f"{len(texts)} rollouts in {path}"]))


if __name__ == "__main__":
    launch.run(lambda: tyro.cli(main, prog="python -m minirl.extras.show"))
