"""A progress bar for a long phase, in a terminal only."""

from collections.abc import Sequence
from typing import Any

from minirl.ranks.process_group import rank

DELAY_S = 3.0  # a phase that ends sooner shows nothing


def show_progress(
    name: str, items: Sequence[Any] | None = None, *, total: int | None = None, unit: str = "microbatches"
) -> Any:
    """A tqdm bar on rank 0, which vanishes at its end. Not collective.

    It gives the items one by one; without items, `update(n)` advances it towards the total. It shows only where stderr
    is a terminal, so log files stay free of it.
    """
    from tqdm import tqdm

    return tqdm(
        items,
        desc=name,
        total=total,
        unit=f" {unit}",
        delay=DELAY_S,
        leave=False,
        disable=None if rank() == 0 else True,  # None: unless stderr is a terminal
        dynamic_ncols=True,
    )
