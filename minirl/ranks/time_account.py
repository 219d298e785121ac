"""Per-rank time breakdown: the main thread's time is always attributed to exactly one timing category (a "cause").

The seconds attributed to all causes therefore add up to the wall-clock time; time without a more specific cause goes to
"host". docs/metrics.md lists the causes. Each phase of the step sets a timing category (`StepMetrics.begin`), and
`spent_on` overrides it within a block. The module's only state is `this_process`.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Causes whose time includes everything nested in them: the full cost of an evaluation, a save or a refresh.
WHOLE_CAUSES = ("eval", "save", "refresh")
GENERATION_CAUSES = ("prefill", "decode", "decode_comm")


class TimeAccount:
    """Seconds per timing category, for the thread that called `begin`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset all times to zero and switch to "host".

        Call this method before the first step, because setup belongs to no step.
        """
        self._thread = threading.get_ident()
        self._cause = "host"
        self._since = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def switch(self, cause: str) -> None:
        """Attribute time to a different timing category from now on."""
        now = time.perf_counter()
        self._seconds[self._cause] += now - self._since
        self._since = now
        self._cause = cause

    def take(self) -> dict[str, float]:
        """Return and reset the seconds per cause since the last `take` or `begin`; their sum is the wall-clock time."""
        self.switch(self._cause)
        seconds = self._seconds
        self._seconds = defaultdict(float)
        return seconds

    @contextmanager
    def spent_on(self, cause: str) -> Iterator[None]:
        """Attribute the time spent in the block, or in each call to a decorated function, to a different timing
        category.

        Costs a few microseconds and never waits for the device. The block has no effect in other threads, or while the
        timing category is one of WHOLE_CAUSES.
        """
        if self._cause in WHOLE_CAUSES or threading.get_ident() != self._thread:
            yield
            return
        outer_cause = self._cause
        self.switch(cause)
        try:
            yield
        finally:
            self.switch(outer_cause)


this_process = TimeAccount()
spent_on = this_process.spent_on


def wait_for_device() -> None:
    """Wait for all CUDA kernels launched so far, so that their time is not charged to the next timing category."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
