"""Progress bar for long phases, shown only in a terminal."""

from collections.abc import Sequence
from typing import Any

from minirl.ranks.process_group import rank

DELAY_S = 3.0  # shorter phases show no bar


def show_progress(
    name: str, items: Sequence[Any] | None = None, *, total: int | None = None, unit: str = "microbatches"
) -> Any:
    """Return a tqdm bar, shown on rank 0 and cleared when it ends. Not collective.

    Iterating over the bar yields `items`; if `items` is None, `update(n)` advances the bar towards `total`. The
    bar is shown only if stderr is a terminal, so that it does not clutter log files.
    """
    from tqdm import tqdm

    return tqdm(
        items,
        desc=name,
        total=total,
        unit=f" {unit}",
        delay=DELAY_S,
        leave=False,
        disable=None if rank() == 0 else True,  # None: disabled unless stderr is a terminal
        dynamic_ncols=True,
    )
