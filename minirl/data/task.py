"""A task: prompts and the functions that reward completions. Tasks hold text, never tensors.

Each task is a module with a `load...` function that returns a `Task`. A new task is a new module, or, without
changing the package, a JSONL file and a reward function (`jsonl`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Called as `rewards.functions` describes.
RewardFunction = Callable[..., Any]
# The arguments of every reward function; the others are named after columns of the data.
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
# Each has "role" and "content".
Messages = list[dict[str, str]]


def as_messages(prompt: str | Messages) -> Messages:
    """Return messages as they are, and text as one user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


@dataclass(frozen=True)
class Row:
    """One example of the data."""

    prompt: str | Messages
    # Further fields, which reward functions may take as arguments.
    columns: Mapping[str, Any]
    # The origin, "file:line", for error messages and logs.
    place: str


@dataclass(frozen=True)
class Task:
    """Rows to train on, held-out rows and reward functions by name."""

    name: str
    train_rows: Sequence[Row]
    # Held-out rows by the file that they come from; {} if there are none.
    eval_sets: Mapping[str, Sequence[Row]]
    rewards: Mapping[str, RewardFunction]
    # The default of --max-new-tokens: enough for an answer.
    max_new_tokens: int
    # Functions that are logged but not trained on.
    extra_scores: Mapping[str, RewardFunction] = field(default_factory=dict)
    # Of an embedded task: prompts with an "answer" that the embedded model is warm-started on.
    warm_start_rows: Sequence[Row] = ()
