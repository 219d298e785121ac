"""The account of time: at every moment this rank's main thread spends its time on exactly one cause.

So the seconds of all causes add up to the wall clock; unattributed time goes to "host". docs/metrics.md lists the
causes. A phase of the step sets the cause (`StepMetrics.begin`), and `spent_on` sets another one for a block. The
module's only state is `this_process`.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Counted whole, whatever happens inside: the cost of an evaluation, a save or a refresh.
WHOLE_CAUSES = ("eval", "save", "refresh")
GENERATION_CAUSES = ("prefill", "decode", "decode_comm")


class TimeAccount:
    """Seconds by cause, of the thread that began the account."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start over, under "host". Call it before the first step, so that set-up counts in no step."""
        self._thread = threading.get_ident()
        self._cause = "host"
        self._since = self._started_at = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def switch(self, cause: str) -> None:
        """Count the time from now on under another cause."""
        now = time.perf_counter()
        self._seconds[self._cause] += now - self._since
        self._since = now
        self._cause = cause

    def take(self) -> tuple[float, dict[str, float]]:
        """Return the wall seconds since the last `take` or `begin`, and the seconds by cause."""
        self.switch(self._cause)
        elapsed, seconds = self._since - self._started_at, self._seconds
        self._started_at = self._since
        self._seconds = defaultdict(float)
        return elapsed, seconds

    @contextmanager
    def spent_on(self, cause: str) -> Iterator[None]:
        """For the block, or the calls of a decorated function, the time is spent on another cause.

        It costs a few microseconds and never waits for the device. Without effect in another thread and inside of a
        cause that is counted whole.
        """
        if self._cause in WHOLE_CAUSES or threading.get_ident() != self._thread:
            yield
            return
        outer = self._cause
        self.switch(cause)
        try:
            yield
        finally:
            self.switch(outer)


this_process = TimeAccount()
spent_on = this_process.spent_on


def wait_for_device() -> None:
    """Wait until all CUDA kernels launched so far have finished, so that their time is not another cause's."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
