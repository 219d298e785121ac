"""State of a run that carries over from step to step."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Counters of a run and the script's own state; a checkpoint saves them with the models.

    step: steps done. update: optimizer steps done, which is also the version of the weights. first_update: optimizer
    steps done before the current step. num_served: prompts drawn from the stream. before: held-out scores before
    training. evaluated: held-out scores of this step, if it was evaluated. in_flight: ordinals of the prompts whose
    rollouts continue in a later step. extra: the script's own state, see `Run`.
    """

    step: int = 0
    update: int = 0
    first_update: int = 0
    num_served: int = 0
    before: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
