"""What to ask and how to judge. Tasks know text, never tensors.

One module per task, each with a `load...` function that returns a `Task`. A new task is a new module, or, without
touching the package, a JSONL file and a reward function (`jsonl`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RewardFunction = Callable[..., Sequence[float]]  # called as `rewards` says
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Row:
    """One prompt: text or chat messages, with the columns that the reward may ask for and the place it came from."""

    prompt: str | Messages
    columns: Mapping[str, Any]
    place: str


@dataclass(frozen=True)
class Task:
    """Rows to train on, held-out rows (perhaps none), rewards by name, and scores that are only logged."""

    name: str
    train_rows: Sequence[Row]
    eval_rows: Sequence[Row]
    rewards: Mapping[str, RewardFunction]
    max_new_tokens: int  # enough for an answer, unless the user says otherwise
    extra_scores: Mapping[str, RewardFunction] = field(default_factory=dict)
