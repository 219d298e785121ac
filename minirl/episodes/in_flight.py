"""Which prompts are in flight, which of them a step must take, and how many may begin."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minirl.errors import refuse


@dataclass
class PromptsInFlight:
    """The prompts that have begun and that no step has taken, with the step in which each began.

    It is the same on every rank. Steps take prompts in order, and none more than `max_staleness` steps after it began.
    num_served: prompts taken from the stream so far. num_steps: steps that have ended. start_steps: the step by prompt.
    interrupted: those that were in flight at the checkpoint, and have not begun again.
    """

    max_staleness: int = 0
    num_served: int = 0
    num_steps: int = 0
    start_steps: dict[int, int] = field(default_factory=dict)
    interrupted: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start_steps)

    @property
    def ordinals(self) -> list[int]:
        """The ordinals of the prompts, with those that have not begun again."""
        return sorted([*self.start_steps, *self.interrupted])

    def restore(self, num_served: int, ordinals: Sequence[int]) -> None:
        """Go on from a checkpoint: the prompts that were in flight begin again, before new ones."""
        self.num_served = num_served
        self.interrupted = sorted(ordinals)

    def begin_prompts(self, num_prompts: int) -> list[int]:
        """Begin this number of prompts; returns their ordinals: interrupted ones, then new ones."""
        again, self.interrupted = self.interrupted[:num_prompts], self.interrupted[num_prompts:]
        first_new = self.num_served
        self.num_served += num_prompts - len(again)
        ordinals = [*again, *range(first_new, self.num_served)]
        self.start_steps |= dict.fromkeys(ordinals, self.num_steps)
        return ordinals

    def end_step(self, ordinals: Iterable[int]) -> None:
        """End a step, which took or dropped these prompts."""
        self.num_steps += 1
        for ordinal in ordinals:
            del self.start_steps[ordinal]

    def expiring(self, num_groups: int) -> set[int]:
        """Return the prompts that this step of `num_groups` must take, so that no rollout gets older.

        Of those that must be taken within n later steps, these can take n * num_groups; the others are due now. With
        steps of 4 and `max_staleness` 2, in step 5:

            begun in step 3: prompts 10 and 11    0 later steps take 0 of these 2: 2 are due
            begun in step 4: prompts 12 to 16     1 later step takes 4 of these 7: 3 are due
            begun in step 5                       none is due, so 10, 11 and 12 are

        Raises InputError if these are too many: this step takes fewer than those before.
        """
        ordinals = sorted(ordinal for ordinal, step in self.start_steps.items() if step < self.num_steps)
        num_expiring = 0
        for num_first, ordinal in enumerate(ordinals, 1):
            num_later_steps = self.start_steps[ordinal] + self.max_staleness - self.num_steps
            num_expiring = max(num_expiring, num_first - num_groups * num_later_steps)
        refuse(
            num_expiring > num_groups,
            f"--max-staleness {self.max_staleness}: a step of {num_groups} prompts takes some of those in flight too "
            "late; collect as many in each step",
        )
        return set(ordinals[:num_expiring])

    def num_to_begin(self, num_groups: int, *, num_wanted: int, num_ready: int) -> int:
        """Return how many prompts a step of `num_groups` begins now, to get `num_wanted`; `num_ready` have ended.

        Two steps' prompts are open, so that a long rollout decodes beside many others; but no more are in flight than
        this step and those within `max_staleness` can take. With steps of 4 and `max_staleness` 2, 12 can be in flight;
        of 7 that are, 2 are ready, so 5 are open: 8 - 5 = 3 begin. Of 10 that are, 4 are ready: 12 - 10 = 2 begin.
        """
        num_open = len(self) - num_ready
        num_allowed = num_wanted + num_groups * self.max_staleness - len(self)
        return max(0, min(2 * num_groups - num_open, num_allowed))
