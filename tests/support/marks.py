"""Mark slow test cases, which `pytest` skips by default; `pytest -m ""` and `.ci/run` run them."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a slow case of `parametrize` with these values."""
    return pytest.param(*values, marks=pytest.mark.slow)
