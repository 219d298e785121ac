"""Progress is for a person at a terminal: nothing of it reaches a log file, other ranks, or a short phase."""

import io
import re
import sys

import pytest

from minirl.report.progress_bar import progress_bar


class Terminal(io.StringIO):
    """A terminal's content."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stderr", "rank", "delay_s"),
    [(Terminal(), 0, 0.0), (io.StringIO(), 0, 0.0), (Terminal(), 1, 0.0), (Terminal(), 0, 3.0)],
    ids=["terminal", "log file", "other rank", "short phase"],
)
def test_a_long_phase_counts_its_parts_in_a_terminal_only(request, monkeypatch, stderr, rank, delay_s):
    """Name, parts done of how many, and their rate; afterwards the line is gone."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr("minirl.report.progress_bar.rank", lambda: rank)
    monkeypatch.setattr("minirl.report.progress_bar.DELAY_S", delay_s)
    with progress_bar("generate", total=4, unit="completions") as bar:
        for _ in range(4):
            bar.update(1)
            if delay_s == 0:
                bar.refresh()
    text = stderr.getvalue().strip("\r ")
    if request.node.callspec.id == "terminal":
        assert re.match(r"generate.* 2/4 .* completions/s(.|\n)*", text)
    else:
        assert text == ""
