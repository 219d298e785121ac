"""Rollouts in the terminal: a step's rollouts, and the messages when there is nothing to show."""

import json
import sys

import pytest

from minirl.extras.show import lines_of, main

ANSWER = {
    "id": [3, 0],
    "row": "f:1",
    "prompt": "1+1=",
    "completion": "2\x1b[2J",
    "reward": 1.0,
    "advantage": 0.5,
    "rewards": {"exact": 1.0},
    "num_tokens": 2,
    "finish_reason": "stop",
}
EPISODE = ANSWER | {
    "id": [3, 1],
    "prompt": [{"role": "user", "content": "what is\x07 it?"}, {"role": "tool", "calls": []}],
    "completion": "all of it",
    "reward": None,
    "rewards": {"exact": None, "short": -0.25},
    "num_tokens": 5,
    "finish_reason": "env_done",
    "messages": [],
    "segments": [
        {"kind": "sampled", "text": "ask<eos>", "num_tokens": 4},
        {"kind": "environment", "text": "<turn>t:\x1b]0;title", "num_tokens": 9},
        {"kind": "sampled", "text": "done", "num_tokens": 1},
    ],
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder under $MINIRL_RUNS with two steps, and in the last one a line that was cut off."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path))
    folder = tmp_path / "mine" / "rollouts"
    folder.mkdir(parents=True)
    (folder / "000002.jsonl").write_text(json.dumps(ANSWER) + "\n")
    text = json.dumps(ANSWER) + "\n" + json.dumps(EPISODE) + '\n{"id": [5, 0], "row'
    (folder / "000012.jsonl").write_text(text)
    return folder.parent


def test_an_episode_is_shown_segment_by_segment():
    """With what the environment said. Row 57: no control character of a text reaches the terminal."""
    assert [*lines_of(EPISODE)] == [
        "3.1  f:1  reward none, advantage 0.5, 5 tokens sampled, env_done",
        "rewards: exact none, short -0.25",
        "prompt:",
        '{"role": "user", "content": "what is\\u0007 it?"}\n{"role": "tool", "calls": []}',
        "sampled, 4 tokens:",
        "ask<eos>",
        "environment, 9 tokens:",
        "<turn>t:\\x1b]0;title",
        "sampled, 1 tokens:",
        "done",
    ]


def test_the_first_rollouts_of_the_last_step_are_shown_but_for_a_damaged_line(run, monkeypatch, capsys):
    """An answer without turns too."""
    monkeypatch.setattr(sys, "argv", ["show", "mine", "--num", "1"])
    assert main() == 0
    said = capsys.readouterr()
    for text in (
        "3.0  f:1  reward 1, advantage 0.5, 2 tokens sampled, stop",
        "\nprompt:\n1+1=\n",
        "\n2\\x1b[2J\n",
    ):
        assert text in said.out
    assert "3.1  f:1" not in said.out
    assert "2 rollouts in" in said.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: no rollouts in nowhere or "),
        (["mine", "7"], "has none of step 7; there are steps 2 to 12"),
        (["empty"], "rollouts: has no rollouts yet"),
    ],
)
def test_row_57_what_cannot_be_shown_is_said(run, monkeypatch, capsys, arguments, said):
    """Exit code 2 and one line."""
    (run.parent / "empty" / "rollouts").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["show", *arguments])
    assert main() == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    assert said in lines[-1]
