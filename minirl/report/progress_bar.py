"""A progress bar for a long phase, in a terminal only."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from minirl.ranks.process_group import rank

DELAY_S = 3.0  # a phase that ends sooner shows nothing
T = TypeVar("T")


def progress_bar(name: str, total: int, *, unit: str) -> Any:
    """A tqdm bar on rank 0, which vanishes when it is closed; `update(n)` advances it. Not collective.

    It shows only where stderr is a terminal, so log files stay free of it.
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


def show_progress(name: str, microbatches: Sequence[T]) -> Iterator[T]:
    """The microbatches one by one; if that takes long, a bar in the terminal counts them. Not collective."""
    with progress_bar(name, total=len(microbatches), unit="microbatches") as bar:
        for microbatch in microbatches:
            yield microbatch
            bar.update()
