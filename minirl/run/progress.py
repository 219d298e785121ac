"""What a run counts and remembers between steps."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """How far the run is, and the script's memory: a checkpoint saves it with the models.

    step: steps done. update: optimizer steps done, which is the version of the weights. first_update: those done before
    this step. num_served: prompts taken from the stream. before: held-out scores before training. evaluated: held-out
    scores of this step, if the run evaluated it. in_flight: the ordinals of the prompts whose rollouts go on in a later
    step. extra: values that the script has to remember, see `Run`.
    """

    step: int = 0
    update: int = 0
    first_update: int = 0
    num_served: int = 0
    before: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
