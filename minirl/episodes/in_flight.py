"""Track the prompts in flight, and decide which prompts a step must take and how many new prompts to start."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minirl.errors import refuse


@dataclass
class PromptsInFlight:
    """The prompts that have been started but not yet taken by a step.

    Every rank has the same state. Steps take prompts in order, and take each prompt at most `max_staleness` steps after
    the prompt was started.
    num_served: number of prompts drawn from the stream so far. num_steps: number of finished steps.
    start_steps: the step in which each prompt was started, keyed by ordinal.
    interrupted: ordinals of prompts that were in flight at the checkpoint and have not been restarted yet.
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
        """The ordinals of all prompts in flight, including interrupted prompts."""
        return sorted([*self.start_steps, *self.interrupted])

    def restore(self, num_served: int, ordinals: Sequence[int]) -> None:
        """Requeue the prompts that were in flight at the checkpoint, ahead of new ones."""
        self.num_served = num_served
        self.interrupted = sorted(ordinals)

    def begin_prompts(self, num_prompts: int) -> list[int]:
        """Mark `num_prompts` prompts as started, interrupted prompts first; return their ordinals."""
        restarted, self.interrupted = self.interrupted[:num_prompts], self.interrupted[num_prompts:]
        first_new_ordinal = self.num_served
        self.num_served += num_prompts - len(restarted)
        ordinals = [*restarted, *range(first_new_ordinal, self.num_served)]
        self.start_steps |= dict.fromkeys(ordinals, self.num_steps)
        return ordinals

    def end_step(self, ordinals: Iterable[int]) -> None:
        """End a step, and remove the prompts that the step took or dropped."""
        self.num_steps += 1
        for ordinal in ordinals:
            del self.start_steps[ordinal]

    def expiring_prompts(self, num_groups: int) -> set[int]:
        """Return the prompts that this step must take to keep every rollout within `max_staleness`.

        num_groups: number of prompts that this step and each later step can take.
        If more than n * num_groups prompts expire within the next n steps, this step must take the excess.
        With 4 groups per step and `max_staleness` 2, in step 5:

            prompts 10 and 11, started in step 3    0 later steps can take 0 of these 2: take 2 now
            prompts 12 to 16, started in step 4     1 later step can take 4 of all 7: take 3 now
            prompts started in step 5               none expires, so the step must take 10, 11 and 12

        Raises InputError if more than `num_groups` prompts expire, which happens only if this step takes fewer groups
        than earlier steps.
        """
        ordinals = sorted(ordinal for ordinal, step in self.start_steps.items() if step < self.num_steps)
        num_expiring = 0
        for num_first, ordinal in enumerate(ordinals, 1):
            num_steps_until_expiry = self.start_steps[ordinal] + self.max_staleness - self.num_steps
            num_expiring = max(num_expiring, num_first - num_groups * num_steps_until_expiry)
        refuse(
            num_expiring > num_groups,
            f"--max-staleness {self.max_staleness}: {num_expiring} prompts expire, but this step takes only "
            f"{num_groups}; collect the same number of groups in each step",
        )
        return set(ordinals[:num_expiring])

    def num_prompts_to_begin(self, num_groups: int, *, num_wanted: int, num_ready: int) -> int:
        """Return the number of prompts to start now, for a step that has `num_groups` groups and needs `num_wanted`
        ready prompts.

        To keep the decoding batch large even if rollouts are long, two steps' worth of unfinished prompts are kept in
        flight. However, the number of prompts in flight never exceeds what this step and the next `max_staleness` steps
        can take. With 4 groups per step and `max_staleness` 2, up to 12 prompts may be in flight. If 7 are in flight
        and 2 of them are ready, 5 are unfinished, so 8 - 5 = 3 are started. If 10 are in flight and 4 of them are
        ready, 12 - 10 = 2 are started.
        """
        num_unfinished = len(self) - num_ready
        max_new_prompts = num_wanted + num_groups * self.max_staleness - len(self)
        return max(0, min(2 * num_groups - num_unfinished, max_new_prompts))
