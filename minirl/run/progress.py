"""Run state that carries over from step to step."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """A run's counters and the script's own state, which every checkpoint stores along with the models.

    step: number of completed steps. update: number of completed optimizer steps, which is also the weight version.
    first_update: number of optimizer steps completed before the current step. num_served: number of prompts drawn from
    the stream. before: held-out scores before training. evaluated: held-out scores after the current step; empty if no
    evaluation was due. in_flight: ordinals of the prompts whose rollouts continue in a later step. extra: the script's
    own state; see `Run`.
    """

    step: int = 0
    update: int = 0
    first_update: int = 0
    num_served: int = 0
    before: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
