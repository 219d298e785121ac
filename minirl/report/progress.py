"""How far a long phase is: a bar in a terminal, and nothing anywhere else."""

from typing import Any

from minirl.ranks.process_group import rank

DELAY_S = 3.0  # a phase that ends sooner shows nothing


def progress_bar(name: str, total: int, *, unit: str) -> Any:
    """A tqdm bar of rank 0 that vanishes when it is closed; `update(n)` counts on. Not collective.

    Only where stderr is a terminal: a log file gets nothing of it.
    """
    from tqdm import tqdm

    disable = None if rank() == 0 else True  # None: disabled unless stderr is a terminal
    return tqdm(
        desc=name,
        total=total,
        unit=f" {unit}",
        delay=DELAY_S,
        leave=False,
        disable=disable,
        dynamic_ncols=True,
    )
