"""The event loop for user functions, which runs in slices on the decoding thread."""

import asyncio
import functools
import time
from concurrent.futures import ThreadPoolExecutor

# Maximum duration (s) of a slice that does not wait. Without a maximum, a function that polls would block decoding.
MAX_BUSY_S = 0.005
# Maximum number of concurrent `asyncio.to_thread` calls; further calls wait for a free thread.
MAX_THREADS = 1024


class SlicedLoop(asyncio.SelectorEventLoop):
    """An event loop that runs in slices; each slice continues where the previous slice stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.set_default_executor(ThreadPoolExecutor(MAX_THREADS, "rollout"))

    def run_slice(self, wait_s: float = 0.0) -> None:
        """Run until all tasks are blocked. Wait up to `wait_s` seconds for I/O, timers or threads to wake a task up."""
        # In a notebook, the caller already runs in an event loop.
        outer_loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        wait_timer = self.call_later(wait_s, self.stop)
        slice_end = time.monotonic() + MAX_BUSY_S
        try:
            self.run_forever()
            while self._ready and time.monotonic() < slice_end:  # type: ignore[attr-defined]
                self.stop()
                self.run_forever()
        finally:
            wait_timer.cancel()
            asyncio._set_running_loop(outer_loop)


@functools.cache
def event_loop() -> SlicedLoop:
    """Return the process's only event loop. User code may keep objects that are bound to the loop, such as clients."""
    return SlicedLoop()
