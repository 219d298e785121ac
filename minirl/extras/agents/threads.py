"""Blocking calls of users' code, beside the event loop that also decodes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


async def run_in_thread(thread: ThreadPoolExecutor | None, call: Callable[[], Any]) -> Any:
    """Return the result of a blocking call in a thread. Its exceptions pass through, as a RuntimeError if they must."""

    def run() -> Any:
        try:
            return call()
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # No future takes the first, and the others would end the event loop.
            raise RuntimeError(f"raised {error!r}") from error

    return await asyncio.get_running_loop().run_in_executor(thread, run)
