"""Progress is for a person at a terminal: nothing of it reaches a log file, other ranks, or a short phase."""

import io
import sys

import pytest

from minirl.report.progress_bar import progress_bar


class Terminal(io.StringIO):
    """A terminal's content."""

    def isatty(self):
        return True


def shown(monkeypatch, stderr, *, rank=0, delay_s=0.0):
    """The output of a bar of four parts."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr("minirl.report.progress_bar.rank", lambda: rank)
    monkeypatch.setattr("minirl.report.progress_bar.DELAY_S", delay_s)
    with progress_bar("generate", total=4, unit="completions") as bar:
        for _ in range(4):
            bar.update(1)
            bar.refresh()
    return stderr.getvalue()


def test_a_long_phase_counts_its_parts_in_a_terminal(monkeypatch):
    """Name, parts done of how many, and the time left; afterwards the line is gone."""
    text = shown(monkeypatch, Terminal())
    assert "generate" in text
    assert "2/4" in text
    assert "completions/s" in text
    assert text.rstrip(" ").endswith("\r")


@pytest.mark.parametrize(
    ("stderr", "rank", "delay_s"),
    [(io.StringIO(), 0, 0.0), (Terminal(), 1, 0.0)],
    ids=["log_file", "other_rank"],
)
def test_nothing_is_shown_elsewhere(monkeypatch, stderr, rank, delay_s):
    """Not one character."""
    assert shown(monkeypatch, stderr, rank=rank, delay_s=delay_s) == ""


def test_a_phase_that_ends_soon_shows_nothing(monkeypatch):
    """Without refreshing by hand, as the scripts do."""
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress_bar("update", total=2, unit="microbatches") as bar:
        bar.update(2)
    assert stderr.getvalue().strip("\r ") == ""
