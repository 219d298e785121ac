"""Rollouts in the terminal: a step's rollouts, and the messages when there is nothing to show."""

import json
import os
import re
import subprocess
import sys

import pytest

from minirl.errors import InputError
from minirl.show import chosen, main, painter, paragraphs, read_rollouts, step_file

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
    "turns": [
        {"num_tokens": 4, "finish_reason": "stop", "rewards": {}, "parse_error": "call 1: no \x1b[1mname"},
        {"num_tokens": 1, "finish_reason": "length", "rewards": {"short": -0.25}},
    ],
}
OTHERS = [ANSWER | {"id": [4, sample], "reward": 2.0 - 3 * sample} for sample in range(3)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder under $MINIRL_RUNS with two steps, and in the last one a line that was cut off."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path))
    folder = tmp_path / "mine" / "rollouts"
    folder.mkdir(parents=True)
    (folder / "000002.jsonl").write_text(json.dumps(ANSWER) + "\n")
    lines = [json.dumps(rollout) for rollout in (ANSWER, EPISODE, *OTHERS)]
    (folder / "000012.jsonl").write_text("\n".join(lines) + '\n{"id": [5, 0], "row')
    (folder / "notes.txt").write_text("")
    return folder.parent


def text_of(rollout, *, has_colors=False):
    return "\n".join(paragraphs(rollout, painter(has_colors=has_colors)))


def test_a_rollout_of_one_answer_is_prompt_and_completion():
    assert text_of(ANSWER).splitlines() == [
        "3.0  f:1  reward 1, advantage 0.5, 2 tokens sampled, stop",
        "prompt:",
        "1+1=",
        "sampled:",
        "2\\x1b[2J",
    ]


def test_an_episode_is_shown_turn_by_turn_with_what_the_environment_said():
    assert text_of(EPISODE).splitlines() == [
        "3.1  f:1  reward none, advantage 0.5, 5 tokens sampled, env_done",
        "rewards: exact none, short -0.25",
        "prompt:",
        "user: what is\\x07 it?",
        '{"role": "tool", "calls": []}',
        "turn 1, 4 tokens, stop, cannot be read: call 1: no \\x1b[1mname:",
        "ask<eos>",
        "environment, 9 tokens:",
        "<turn>t:\\x1b]0;title",
        "turn 2, 1 tokens, length, short -0.25:",
        "done",
    ]


def test_row_57_no_control_character_of_a_text_reaches_the_terminal():
    """With colours there are only theirs, and without them it is the same text."""
    for rollout in (ANSWER, EPISODE):
        colored = text_of(rollout, has_colors=True)
        assert "\033[32m" in colored
        assert ("\033[36m" in colored) == ("segments" in rollout)
        assert re.sub(r"\033\[\d+m", "", colored) == text_of(rollout)
        assert text_of(rollout).replace("\n", "").isprintable()


def test_rollouts_are_chosen_by_id_by_reward_and_by_number(run, capsys):
    rollouts = read_rollouts(step_file("mine", None))
    assert "000012.jsonl:6 is not a rollout" in capsys.readouterr().err
    assert len(rollouts) == 5

    def ids(**options):
        found = chosen(rollouts, **{"name": None, "order": None, "num": 9, **options})
        return [".".join(map(str, rollout["id"])) for rollout in found]

    assert ids(num=2) == ["3.0", "3.1"]
    assert ids(name="4.1") == ["4.1"]
    assert ids(order="best") == ["4.0", "3.0", "4.1", "4.2", "3.1"]
    assert ids(order="worst", num=3) == ["4.2", "4.1", "3.0"]
    with pytest.raises(InputError, match=r"--rollout 9.1: this step has those from 3.0 to 4.2"):
        ids(name="9.1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: no rollouts in nowhere or "),
        (["a" * 5000], "no rollouts in"),
        (["mine", "7"], "has none of step 7; there are steps 2 to 14"),
        (["mine", "--num", "0"], "--num 0: must be at least 1"),
        (["mine", "13"], "000013.jsonl: has no rollouts"),
        (["mine", "14"], "000014.jsonl: Is a directory"),
        (["empty"], "rollouts: has no rollouts yet"),
    ],
)
def test_row_57_what_cannot_be_shown_is_said(run, monkeypatch, capsys, arguments, said):
    """Exit code 2 and one line."""
    (run.parent / "empty" / "rollouts").mkdir(parents=True)
    (run / "rollouts" / "000013.jsonl").write_text("")
    (run / "rollouts" / "000014.jsonl").mkdir()
    monkeypatch.setattr(sys, "argv", ["show", *arguments])
    assert main() == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    assert said in lines[-1]


@pytest.mark.parametrize("key", [*ANSWER, "segments", "turns"])
def test_row_57_a_field_that_is_something_else_never_ends_in_a_traceback(tmp_path, key):
    """The line is left out, or its fields are shown."""
    for value in (None, 7, "x", [], [7], [{}], {}, {"x": [1]}, 1e400, 10**4000):
        for rollout in (ANSWER, EPISODE):
            path = tmp_path / "000001.jsonl"
            path.write_text(json.dumps(rollout | {key: value}) + "\n" + json.dumps(ANSWER) + "\n")
            for found in chosen(read_rollouts(path), name=None, order="best", num=9):
                assert text_of(found)


@pytest.mark.slow
def test_the_command_prints_without_colors_to_a_pipe_that_may_end(run):
    """And in a terminal that has letters of ASCII only."""
    line = json.dumps(ANSWER | {"completion": "\u00fc\U0001f600" * 9})
    (run / "rollouts" / "000012.jsonl").write_text(f"{line}\n" * 3000)
    command = [sys.executable, "-m", "minirl.show", "mine", "--num", "3000"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout.readline() == b"3.0  f:1  reward 1, advantage 0.5, 2 tokens sampled, stop\n"
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
