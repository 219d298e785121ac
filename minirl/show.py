"""A step's rollouts in the terminal: `python -m minirl.show RUN [STEP]`.

RUN is a run's folder, or its name in ./runs or $MINIRL_RUNS; STEP is by default the last one that is kept. Sampled and
appended text have different colours, unless NO_COLOR is set or the output is not a terminal.
"""

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minirl.errors import InputError, escaped, refuse
from minirl.files.json_files import read_json_lines
from minirl.run.run_folder import find_run

# Codes of a terminal's colours, by kind of text.
COLORS = {"title": "1", "label": "2", "sampled": "32", "environment": "36"}
Rollout = Mapping[str, Any]
Paint = Callable[[str, str], str]


def step_file(run: str, step: int | None) -> Path:
    """The file of a step's rollouts, by default the last step's. Raises InputError if it is missing."""
    folder = find_run(run, "rollouts") / "rollouts"
    files = {int(path.stem): path for path in folder.glob("*.jsonl") if path.stem.isdecimal()}
    refuse(not files, f"{folder}: has no rollouts yet")
    number = max(files) if step is None else step
    refuse(
        number not in files,
        f"{folder}: has none of step {number}; there are steps {min(files)} to {max(files)}",
    )
    return files[number]


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts of a step, in the order of their ids. Any other line is named on stderr and left out.

    Raises InputError if no rollout is left.
    """
    try:
        rollouts, damaged = read_json_lines(path, is_rollout)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    for number in damaged:
        print(f"note: {path}:{number} is not a rollout and is left out", file=sys.stderr)
    refuse(not rollouts, f"{path}: has no rollouts")
    return rollouts


def is_rollout(line: Any) -> bool:
    """Return whether a line has what is shown of a rollout."""
    try:
        return bool("".join(paragraphs(line, painter(has_colors=False))))
    except Exception:  # a field may be missing, or anything else
        return False


def name_of(rollout: Rollout) -> str:
    """The numbers of its prompt and sample: 3.1."""
    return ".".join(map(str, rollout["id"]))


def chosen(rollouts: Sequence[Rollout], *, name: str | None, order: str | None, num: int) -> list[Rollout]:
    """The rollout of this name, or the first `num`, by "best" or "worst" reward. Raises InputError."""
    if name is not None:
        found = [rollout for rollout in rollouts if name_of(rollout) == name]
        refuse(
            not found,
            f"--rollout {name}: this step has those from {name_of(rollouts[0])} to {name_of(rollouts[-1])}",
        )
        return found
    if order is None:
        return list(rollouts[:num])
    sign = -1 if order == "best" else 1
    return sorted(rollouts, key=lambda rollout: _rank(rollout.get("reward"), sign))[:num]


def _rank(reward: Any, sign: int) -> float:
    """The key to sort by; rollouts without a reward come last."""
    return sign * reward if isinstance(reward, int | float) else math.inf


def paragraphs(rollout: Rollout, paint: Paint) -> Iterator[str]:
    """A rollout as text, part by part."""
    numbers = [f"{key} {shown(rollout[key])}" for key in ("reward", "advantage") if key in rollout]
    facts = [*numbers, f"{rollout['num_tokens']} tokens sampled", rollout["finish_reason"]]
    yield paint("title", f"{name_of(rollout)}  {rollout['row']}  {', '.join(facts)}")
    if len(rollout["rewards"]) > 1:
        yield paint("label", f"rewards: {listed(rollout['rewards'])}")
    yield paint("label", "prompt:")
    yield escaped(prompt_text(rollout["prompt"]))
    segments = rollout.get("segments", [])
    if not segments:
        yield paint("label", "sampled:")
        yield paint("sampled", rollout["completion"])
        return
    turns = iter(enumerate(rollout.get("turns", []), 1))
    for segment in segments:
        count = f"{segment['num_tokens']} tokens"
        if segment["kind"] == "sampled":
            yield paint("label", turn_label(*next(turns), count))
            yield paint("sampled", str(segment["text"]))
            continue
        is_prompt = segment["kind"] == "prompt"
        what = f"branch {segment.get('branch')}, which begins with" if is_prompt else "environment,"
        yield paint("label", f"{what} {count}:")
        yield paint("environment", str(segment["text"]))


def turn_label(number: int, turn: Mapping[str, Any], count: str) -> str:
    """The description of a turn, without its text."""
    facts = [f"turn {number}", count, str(turn["finish_reason"])]
    if turn["rewards"]:
        facts.append(listed(turn["rewards"]))
    if turn.get("parse_error"):
        facts.append(f"cannot be read: {turn['parse_error']}")
    return f"{', '.join(facts)}:"


def prompt_text(prompt: Any) -> str:
    """A prompt as it is in the data: text, or messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    lines = []
    for message in prompt:
        is_plain = isinstance(message, dict) and isinstance(message.get("content"), str)
        lines.append(f"{message.get('role')}: {message['content']}" if is_plain else json.dumps(message))
    return "\n".join(lines)


def listed(rewards: Any) -> str:
    """Rewards by name."""
    if not isinstance(rewards, dict):
        return str(rewards)
    return ", ".join(f"{name} {shown(value)}" for name, value in rewards.items())


def shown(number: Any) -> str:
    """A number in short, or "none" without a reward."""
    if isinstance(number, float):
        return f"{number:.4g}"
    return "none" if number is None else str(number)


def painter(*, has_colors: bool) -> Paint:
    """Return text for the terminal: in a colour, and without its control characters."""

    def paint(kind: str, text: str) -> str:
        return f"\033[{COLORS[kind]}m{escaped(text)}\033[0m" if has_colors else escaped(text)

    return paint


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m minirl.show", description="Show rollouts of a step.")
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name in ./runs or $MINIRL_RUNS")
    parser.add_argument("step", metavar="STEP", nargs="?", type=int, help="its number (default: the last)")
    parser.add_argument("--rollout", metavar="ID", help="the one of this id, as 3.1: prompt 3, sample 1")
    parser.add_argument("--num", metavar="N", type=int, default=4, help="how many, at most (default: 4)")
    order = parser.add_mutually_exclusive_group()
    for name in ("best", "worst"):
        order.add_argument(
            f"--{name}", dest="order", action="store_const", const=name, help=f"the {name} first"
        )
    return parser.parse_args()


def main() -> int:
    """The command."""
    given = arguments()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not have all characters
        sys.stdout.reconfigure(errors="backslashreplace")
    paint = painter(has_colors=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    try:
        refuse(given.num < 1, f"--num {given.num}: must be at least 1")
        path = step_file(given.run, given.step)
        rollouts = read_rollouts(path)
        for rollout in chosen(rollouts, name=given.rollout, order=given.order, num=given.num):
            print("\n".join(paragraphs(rollout, paint)), end="\n\n")
        print(f"{len(rollouts)} rollouts in {path}", flush=True)
    except InputError as error:
        print(f"error: {escaped(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader, for example `head`, has stopped; without this the exit would send the rest, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
