"""Cases of a test that `pytest` leaves out of its choice; `pytest -m ""` and `.ci/run` run them too."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of `parametrize` with these values."""
    return pytest.param(*values, marks=pytest.mark.slow)
