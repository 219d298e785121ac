"""A task: prompts and the functions that reward completions. Tasks contain text, never tensors.

Each task is a module whose `load...` function returns a `Task`. To add a task, write such a module. A data file with
a reward function also defines a task, without any change to the package (see `jsonl`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirl.data.messages import Messages

# A function that rewards completions; `rewards.functions` describes the arguments and the return value.
RewardFunction = Callable[..., Any]
# Arguments that every reward function can take, in addition to EPISODE_ARGUMENTS and the names of data columns.
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
# Arguments passed only to reward functions that name them. Data columns must not use the names of standard or episode
# arguments.
EPISODE_ARGUMENTS = ("episodes", "environments", "rollouts")


def exact_match_reward(extract_answer: Callable[[str], Any]) -> RewardFunction:
    """Return a reward function that gives 1 if the completion's answer equals the column `answer`, else 0."""

    def score(completions: Sequence[str | Messages], answer: Sequence[Any]) -> list[float]:
        # For a chat prompt, a completion is a list of one message.
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        return [float(extract_answer(text) == expected) for text, expected in zip(texts, answer, strict=True)]

    return score


@dataclass(frozen=True)
class Row:
    """One example in the dataset."""

    prompt: str | Messages
    # The example's other fields, which reward functions may take as arguments.
    columns: Mapping[str, Any]
    # Source of the row, "file:line" or "source row N", for error messages and logs.
    origin: str
    # JSON schemas of the tools that a chat prompt includes; None means the run's tools.
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Task:
    """Training rows, held-out rows and named reward functions."""

    name: str
    train_rows: Sequence[Row]
    # Held-out rows, keyed by file; may be empty.
    eval_sets: Mapping[str, Sequence[Row]]
    rewards: Mapping[str, RewardFunction]
    # Default for --max-new-tokens: long enough for an answer.
    max_new_tokens: int
    # Scores that are logged but not trained on.
    extra_scores: Mapping[str, RewardFunction] = field(default_factory=dict)
    # Extracts a completion's answer for majority voting; returns None if there is no answer. Equal answers get equal
    # rewards.
    extract_answer: Callable[[str], Any] | None = None
    # Rows with an "answer" column, used for the bundled model's warm start (default: the training rows).
    warm_start_rows: Sequence[Row] = ()
