"""The picture of runs: its input, its messages when there is nothing to draw, and the drawing."""

import json
import sys

import pytest

from minirl.extras.plot import CAUSES, draw, main, read_run, series

LINES = [
    {
        "step": n,
        "reward/mean": n / 20,
        "policy/entropy": 1 / n,
        "time/decode": 0.1,
        "time/update": 0.2,
        "time/step": 0.3,
    }
    for n in range(1, 16)
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder under $MINIRL_RUNS, with one evaluation and a line that was cut off."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path))
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = [*LINES[:-1], LINES[-1] | {"eval/reward": 0.9, "policy/entropy": None}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 16, "rew')
    return folder


def test_a_run_is_found_by_folder_and_by_name_with_the_points_of_whole_lines(run):
    """None (a number that was not finite) and steps without the metric give no points."""
    for name in (str(run), "mine"):
        found, lines = read_run(name)
        assert found == "mine"
        assert [line["step"] for line in lines] == list(range(1, 16))
    assert series(lines, "eval/reward") == ([15], [0.9])
    assert series(lines, "policy/entropy")[0] == list(range(1, 15))


@pytest.mark.slow
def test_runs_are_drawn_with_the_score_before_training_and_all_causes_of_a_step(run, tmp_path, monkeypatch):
    """The causes are stacked to the step, from the ground up in one order; a fork's causes come last.

    Also a run with hardly any metrics. A run without steps is refused by name.
    """
    pytest.importorskip("matplotlib")
    lines = [{"step": step, "policy/logp_gap_max": 0.0, "eval/reward": 0.5} for step in (1, 2)]
    lines[0] |= {"eval/before": 0.25, **{f"time/{cause}": 1.0 for cause in (*CAUSES, "a")}}
    figure = draw([("a-fork", lines), ("short", [{"step": 1}])])
    assert [*map(list, figure.axes[0].lines[2].get_data())] == [[0, 1, 2], [0.25, 0.5, 0.5]]
    areas = figure.axes[-2].collections
    assert [area.get_label() for area in areas] == [*CAUSES, "a"]
    assert areas[-1].get_paths()[0].vertices[:, 1].max() == len(CAUSES) + 1
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["plot", "mine", str(run), "--output", str(picture)])
    assert main() == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (run / "metrics.jsonl").write_text("")
    assert main() == 2
