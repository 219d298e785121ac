"""The picture of runs: its input, its messages when there is nothing to draw, and the drawing."""

import json
import sys

import pytest

from minirl.errors import InputError
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
    """A run's folder under $MINIRL_RUNS, with one evaluation, a line without a step and a line that was cut off."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path))
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = [*LINES[:-1], LINES[-1] | {"eval/reward": 0.9, "policy/entropy": None}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text('{"reward/mean": 1}\n' + text + '{"step": 16, "rew')
    return folder


def test_a_run_is_found_by_folder_and_by_name_and_a_cut_line_is_left_out(run):
    for name in (str(run), "mine"):
        found, lines = read_run(name)
        assert found == "mine"
        assert [line["step"] for line in lines] == list(range(1, 16))


def test_a_series_has_the_steps_that_have_a_number(run):
    """None (a number that was not finite) and steps without the metric give no points."""
    _, lines = read_run("mine")
    assert series(lines, "eval/reward") == ([15], [0.9])
    assert series(lines, "policy/entropy")[0] == list(range(1, 15))
    assert series(lines, "nothing") == ([], [])


def test_runs_without_steps_are_refused_by_name(run, tmp_path):
    """A folder that is not a run's, an unknown name, a run without steps."""
    with pytest.raises(InputError, match=r"nowhere: no metrics\.jsonl"):
        read_run("nowhere")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="has no steps yet"):
        read_run("mine")


@pytest.mark.slow
def test_runs_are_drawn_also_with_hardly_any_metrics(run, tmp_path, monkeypatch):
    """One of them given twice by another name, and four of one step without times."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["plot", "mine", str(run), "--output", str(picture)])
    assert main() == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    draw([("short", [{"step": 1, "reward/mean": 0.5}])] * 4).savefig(tmp_path / "short.png")


@pytest.mark.slow
def test_a_picture_has_the_gap_the_score_before_training_and_a_color_for_each_cause():
    """The causes are stacked to the step, from the ground up in one order; a fork's causes come last."""
    pytest.importorskip("matplotlib")
    lines = [{"step": step, "policy/logp_gap_max": 0.0, "eval/reward": 0.5} for step in (1, 2)]
    lines[0] |= {"eval/before": 0.25, **{f"time/{cause}": 1.0 for cause in (*CAUSES, "a")}}
    figure = draw([("a-fork-with-a-name-20261124-103148-ab12", lines)])
    figure.draw_without_rendering()
    for axes in figure.axes:
        title = axes._left_title
        assert title.get_window_extent().x1 <= axes.bbox.x1
    (gap,) = (axes for axes in figure.axes if "gap" in axes.get_title(loc="left"))
    assert len(gap.lines) == 2
    assert [*map(list, figure.axes[0].lines[-1].get_data())] == [[0, 1, 2], [0.25, 0.5, 0.5]]
    areas = figure.axes[-1].collections
    assert [area.get_label() for area in areas] == [*CAUSES, "a"]
    assert areas[-1].get_paths()[0].vertices[:, 1].max() == len(CAUSES) + 1
    assert len({tuple(area.get_facecolor()[0]) for area in areas}) == len(areas)


def test_without_matplotlib_the_command_says_how_to_get_it(run, monkeypatch, capsys):
    """Exit code 2 and one line."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["plot", "mine"])
    assert main() == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "error: matplotlib is not installed: pip install -e '.[plot]'"
