"""The plot of runs: input, errors if there is nothing to draw, and the drawing."""

import pytest
import tyro

from minirl.errors import InputError
from minirl.extras.plot import draw, main, read_run
from support.scripts import write_rows

CAUSES = ("decode", "host", "prefill", "update")


@pytest.mark.slow
def test_runs_are_drawn_with_the_score_before_training_and_all_causes_of_a_step(tmp_path, monkeypatch):
    """The causes' mean times are stacked in one order and add up to the mean step time.

    A run is given by name or folder. Only complete lines count; null and missing metrics have no points. A run with few
    metrics is drawn too; a run without steps is rejected by name.
    """
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path))
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = [{"step": step, "policy/logp_gap_max": 0.0, "eval/reward": 0.5} for step in (1, 2)]
    lines += [{"step": 3, "eval/reward": None}, {"step": 4}]
    lines[0] |= {"reward/mean": 0.4, "eval/before": 0.25, **{f"time/{cause}": 1.0 for cause in CAUSES}}
    with write_rows(folder / "metrics.jsonl", lines).open("a") as file:
        file.write('{"step": 5, "rew')
    assert read_run(str(folder)) == read_run("mine") == ("mine", lines)
    figure = draw([("mine", lines), ("short", lines[3:])])
    assert [*map(list, figure.axes[0].lines[2].get_data())] == [[0, 1, 2], [0.25, 0.5, 0.5]]
    bars = figure.axes[-1].containers
    assert [stacked.get_label() for stacked in bars] == list(CAUSES)
    assert bars[-1][0].get_x() + bars[-1][0].get_width() == len(CAUSES) / len(lines)
    picture = tmp_path / "picture.png"
    tyro.cli(main, args=["mine", str(folder), "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="has no steps yet"):
        main(("mine",))
