"""The event loop of users' functions. It runs in slices, in the thread that also decodes."""

import asyncio
import functools
import time
from concurrent.futures import ThreadPoolExecutor

# The most seconds of a slice without a wait: a function that polls must not hold up decoding.
MAX_BUSY_S = 0.005
# Blocking calls at a time, of `asyncio.to_thread`; more wait for a free thread.
MAX_THREADS = 1024


class SlicedLoop(asyncio.SelectorEventLoop):
    """An event loop that goes on, slice by slice, where the last slice ended."""

    def __init__(self) -> None:
        super().__init__()
        self.set_default_executor(ThreadPoolExecutor(MAX_THREADS, "rollout"))

    def run_slice(self, wait_s: float = 0.0) -> None:
        """Run until all tasks wait. If they wait for something outside, it may come within `wait_s` seconds."""
        # A notebook calls this from its own event loop.
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        wait_end = self.call_later(wait_s, self.stop)
        busy_until = time.monotonic() + MAX_BUSY_S
        try:
            self.run_forever()
            while self._ready and time.monotonic() < busy_until:  # type: ignore[attr-defined]
                self.stop()
                self.run_forever()
        finally:
            wait_end.cancel()
            asyncio._set_running_loop(outer)


@functools.cache
def event_loop() -> SlicedLoop:
    """Return the loop of this process: what a user's file keeps between episodes, such as a client, belongs to one."""
    return SlicedLoop()
