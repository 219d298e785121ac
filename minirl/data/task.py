"""A task: prompts and the functions that reward completions. Tasks hold text, never tensors.

Each task is a module with a `load...` function that returns a `Task`. A new task is a new module, or, without
changing the package, rows of data and a reward function (`jsonl`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirl.data.messages import Messages

# `rewards.functions` describes the call.
RewardFunction = Callable[..., Any]
# The arguments of every reward function; the others are named after columns of the data.
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
# Reward functions that name these get them too. No column of the data may have one of these six names.
EPISODE_ARGUMENTS = ("episodes", "environments", "rollouts")


def exact_score(answer_of: Callable[[str], Any]) -> RewardFunction:
    """Return a reward function: 1 where the answer in a completion is that of the column `answer`, else 0."""

    def score(completions: Sequence[str | Messages], answer: Sequence[Any]) -> list[float]:
        # A completion is a list of one message where the prompt is a chat.
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        return [float(answer_of(text) == expected) for text, expected in zip(texts, answer, strict=True)]

    return score


@dataclass(frozen=True)
class Row:
    """One example of the data."""

    prompt: str | Messages
    # Further fields, which reward functions may take as arguments.
    columns: Mapping[str, Any]
    # The origin, "file:line" or "source row N", for error messages and logs.
    origin: str
    # JSON schemas of the tools that a prompt of messages shows; None: the run's.
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Task:
    """Rows to train on, held-out rows and reward functions by name."""

    name: str
    train_rows: Sequence[Row]
    # Held-out rows by their file; {} without any.
    eval_sets: Mapping[str, Sequence[Row]]
    rewards: Mapping[str, RewardFunction]
    # The default of --max-new-tokens: enough for an answer.
    max_new_tokens: int
    # Functions that are logged but not trained on.
    extra_scores: Mapping[str, RewardFunction] = field(default_factory=dict)
    # The answer in a completion's text, for majority votes: None if it has none. Equal answers get equal rewards.
    answer_of: Callable[[str], Any] | None = None
    # An embedded task's prompts with an "answer", which warm-start the embedded model.
    warm_start_rows: Sequence[Row] = ()
