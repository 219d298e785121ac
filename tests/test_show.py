"""`show` prints a step's rollouts to the terminal, and clear errors when there is nothing to show."""

import json

import pytest
import tyro

from minirl.errors import InputError
from minirl.extras.show import main

EPISODE = {
    "id": [3, 1],
    "row": "f:1",
    "prompt": [{"role": "user", "content": "what is\x07 it?"}, {"role": "tool", "calls": []}],
    "completion": "all of it",
    "reward": None,
    "advantage": 0.5,
    "rewards": {"exact": None, "short": -0.25},
    "num_tokens": 5,
    "finish_reason": "env_done",
    "segments": [
        {"kind": "sampled", "text": "ask<eos>", "num_tokens": 4},
        {"kind": "environment", "text": "<turn>t:\x1b]0;title", "num_tokens": 9},
    ],
}
ANSWER = {**EPISODE, "id": [3, 0], "prompt": "1+1=", "completion": "2\x1b[2J", "reward": 1.0}
del ANSWER["segments"]


def test_rollouts_are_shown_in_segments_and_a_corrupt_line_is_rejected(tmp_path, monkeypatch, capsys):
    """The last step is the default. Single-turn rollouts have one segment. Missing runs and steps are rejected.

    Fault 57: no control character reaches the terminal.
    """
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path))
    path = tmp_path / "mine" / "rollouts" / "000012.jsonl"
    path.parent.mkdir(parents=True)
    path.with_name("000002.jsonl").touch()
    path.write_text(json.dumps(ANSWER) + "\n" + json.dumps(EPISODE) + '\n{"id": [5, 0], "row')

    def shown(*arguments):
        tyro.cli(main, args=arguments)
        return capsys.readouterr().out.splitlines()

    assert shown("mine") == [
        "3.0  f:1  reward 1, advantage 0.5, 5 tokens sampled, env_done",
        "rewards: exact none, short -0.25",
        "prompt:",
        "1+1=",
        "sampled, 5 tokens:",
        "2\\x1b[2J",
        "",
        "3.1  f:1  reward none, advantage 0.5, 5 tokens sampled, env_done",
        "rewards: exact none, short -0.25",
        "prompt:",
        '{"role": "user", "content": "what is\\u0007 it?"}',
        '{"role": "tool", "calls": []}',
        "sampled, 4 tokens:",
        "ask<eos>",
        "environment, 9 tokens:",
        "<turn>t:\\x1b]0;title",
        "",
        f"2 rollouts in {path}",
    ]
    for arguments, said in (
        (["nowhere"], "nowhere: no rollouts in nowhere or "),
        (["mine", "7"], "has no rollouts for step 7; choose a step from 2 to 12"),
    ):
        with pytest.raises(InputError, match=said):
            shown(*arguments)
