"""Run user code's blocking calls in threads, because the event loop's thread also decodes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


async def run_in_thread(thread: ThreadPoolExecutor | None, call: Callable[[], Any]) -> Any:
    """Run a blocking call in a thread and return its result.

    Propagates exceptions; some are re-raised as RuntimeError.
    """

    def run() -> Any:
        try:
            return call()
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # A future rejects StopIteration; SystemExit and KeyboardInterrupt would stop the event loop.
            raise RuntimeError(f"raised {error!r}") from error

    return await asyncio.get_running_loop().run_in_executor(thread, run)
