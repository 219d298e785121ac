"""The event loop of users' functions. It runs in slices, in the thread that also decodes."""

import asyncio
import functools
import selectors
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from selectors import SelectorKey
from typing import Any

# The most seconds of a slice in which nothing waits: a function that polls must not hold up decoding.
MAX_BUSY_S = 0.005
# Blocking calls at a time, of `asyncio.to_thread`; more wait for a free thread.
MAX_THREADS = 1024


class SlicedLoop(asyncio.SelectorEventLoop):
    """An event loop that goes on, slice by slice, where the last slice ended."""

    def __init__(self) -> None:
        self._end = _SliceEnd(self)
        super().__init__(self._end)
        self.set_default_executor(ThreadPoolExecutor(MAX_THREADS, "rollout"))

    def run_slice(self, wait_s: float = 0.0) -> None:
        """Run until all tasks wait. If they wait for something outside, it may come within `wait_s` seconds."""
        now = time.monotonic()
        self._end.busy_until, self._end.wait_until = now + MAX_BUSY_S, now + wait_s
        # A notebook calls this from its own event loop.
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            self.run_forever()
        finally:
            asyncio._set_running_loop(outer)

    def stop_waiting(self) -> None:
        """End the present slice as soon as all tasks wait."""
        self._end.wait_until = 0.0


class _SliceEnd(selectors.DefaultSelector):
    """Stops the loop where it would wait too long. The loop calls `select` between any two rounds of its tasks."""

    def __init__(self, loop: SlicedLoop):
        super().__init__()
        self._loop = loop
        self.busy_until = self.wait_until = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Return the events, as the loop asks. timeout: 0 if tasks can run, None if no timer is set."""
        now = time.monotonic()
        left = max(0.0, self.wait_until - now)
        can_run = timeout == 0
        wait_s = left if timeout is None else min(timeout, left)
        events: list[tuple[SelectorKey, int]] = super().select(0 if can_run else wait_s)
        is_idle = not can_run and not events and wait_s == left
        if is_idle or (now > self.busy_until and can_run):
            self._loop.stop()
        return events


@functools.cache
def event_loop() -> SlicedLoop:
    """Return the loop of this process: what a user's file keeps between episodes, such as a client, belongs to one."""
    return SlicedLoop()


async def in_thread(thread: ThreadPoolExecutor | None, call: Callable[[], Any]) -> Any:
    """Return the result of a blocking call in a thread. Its exceptions pass through, as a RuntimeError if they must."""

    def run() -> Any:
        try:
            return call()
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # No future takes the first, and the others would end the event loop.
            raise RuntimeError(f"raised {error!r}") from error

    return await asyncio.get_running_loop().run_in_executor(thread, run)
