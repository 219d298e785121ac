"""Faults of rollout functions: each error names the function, the row and the turn."""

import re

import pytest

from minirl.errors import InputError, RolloutError
from minirl.rewards.functions import EpisodeReward
from minirl.run.config import RunConfig
from minirl.run.inputs import load_rollout_function
from support.collecting import Prompts, make_collector

NO_PROMPT = r"branch\(.*expected (text, or messages with role and content|a message)"
NO_AFTER = "expected text, a list of token ids, or messages"
NO_STOP = r"generate\(stop=.*\): expected non-empty strings without U\+FFFD or surrogates"
LATE = "took more than 60 s; see --call-timeout"
# Faulty code that runs first, or after a turn, and the expected message.
FIRST = {
    "return": "ended without a turn",
    "episode.end('env_done')": "ended without a turn",
    "await episode.generate(after={'role': 'user', 'content': 'a'})": ".*cannot precede the first turn; see",
    "await episode.branch(7).generate()": NO_PROMPT,
    "await episode.branch([]).generate()": NO_PROMPT,
    "await episode.branch([{'content': 'a'}]).generate()": NO_PROMPT,
    "await episode.branch('a' * 100).generate()": ".*the first turn's prompt and `after` leave no room",
}
LATER = {
    "{}['no such tool']": r"raised\nTraceback(.|\n)*mine.py(.|\n)*KeyError: 'no such tool'",
    "sys.exit()": r"raised\n(.|\n)*SystemExit",
    "let_time_pass(); await asyncio.sleep(1000)": LATE,
    "let_time_pass(); await asyncio.to_thread(has_failed.wait)": LATE,
    "await asyncio.wait_for(episode.generate(), 0.0005)": r"generate\(\): cancelled while its turn was being sampled",
    "left = asyncio.create_task(episode.generate()); await asyncio.sleep(0)": "ended while one of its turns was",
    "await asyncio.gather(episode.generate(), episode.generate())": r"generate\(\): a second turn was requested while",
    "await episode.generate(after=5)": rf"generate\(after=5\): {NO_AFTER}",
    "await episode.generate(after=b'abc')": rf"generate\(after=b'abc'\): {NO_AFTER}",
    "await episode.generate(after=[1.5])": r"generate\(after=...\): expected text, token ids or messages",
    "await episode.generate(after={'role': 'user', 'content': 'a'})": "messages cannot follow a text prompt",
    "await episode.generate(after=[10_000])": r"token id 10000 is out of range: the model has 48",
    "await episode.generate(stop=[7])": NO_STOP,
    "await episode.generate(stop=None)": NO_STOP,
    "await episode.generate(after=torch.ones(2))": rf"generate\(after=tensor.*\): {NO_AFTER}",
    "await episode.generate(stop=['a', ''])": NO_STOP,
    "await episode.generate(max_tokens=0)": r"generate\(max_tokens=0\): must be an integer of at least 1",
    "await episode.generate(max_tokens='7')": r"generate\(max_tokens='7'\): must be an integer of at least 1",
    "episode.end('won')": r"episode.end\('won'\): expected one of stop, length, .*env_done",
    "episode.end('stop'); await episode.generate()": r"episode.generate\(\) after episode.end\('stop'\)",
    "return 1.0": r"the episode recorded rewards \('reward'\) that this run does not use; add --reward episode",
    "return {'other': 1.0}": r"the episode ended without recording the reward 'total' \(recorded: 'other'\)",
    "return float('nan')": r"returns nan; a reward must be a finite number with an absolute value of at most 1e\+12",
    "return '1.0'": "returns '1.0'; a reward must be",
    "episode.reward(float('nan'))": "episode.reward, for the row at f:3: 'reward' is nan; a reward must be",
}
WRONG = [(code, said, "before its first turn") for code, said in FIRST.items()]
WRONG += [
    (f"await episode.generate(max_tokens=3); {code}", said, "after turn 1") for code, said in LATER.items()
]
SOURCE = """
import asyncio, math, sys, threading, torch
from minirl.episodes import runner

has_failed = threading.Event()

def let_time_pass():
    runner.time.monotonic = lambda: math.inf

async def mine(episode):
    if episode.row.origin != "f:3":
        await episode.generate(max_tokens=9)
        return RETURNED
"""


@pytest.mark.parametrize(("code", "said", "when"), WRONG, ids=range(len(WRONG)))
@pytest.mark.usefixtures("clock")
def test_row_53_61_an_error_in_an_episode_stops_the_run(tmp_path, code, said, when):
    """The error names function, row and turn, and nothing is left running. Faults 24 and 56."""
    functions = {name: EpisodeReward(name) for name in ("total",) if name in said}
    returned = dict.fromkeys(functions, 1.0)
    (tmp_path / "mine.py").write_text(f"RETURNED = {returned}\n{SOURCE}    {code}\n")
    rollout = load_rollout_function(RunConfig(rollout=f"{tmp_path}/mine.py:mine")).function
    options = {"functions": functions or None, "group_size": 1, "call_timeout": 60.0}
    collector = make_collector(Prompts(num_rows=9), rollout=rollout, **options)
    with pytest.raises(RolloutError) as raised:
        collector.collect(9)
    rollout.__globals__["has_failed"].set()
    expected = rf"^rollout mine for the row at f:3, {when}: (rollout mine for the row at f:3.*: )?{said}"
    assert re.match(expected, str(raised.value)), str(raised.value)
    assert raised.value.exit_code == 4
    assert not collector._runner._drivers


NO_FORM = r"a rollout: expected `async def mine\(episode\)` with `turn = await episode.generate\(\)`"
UNUSABLE = {
    "def mine(episode):\n    return episode.generate()": NO_FORM,
    "async def mine(episode):\n    yield episode.generate()": NO_FORM,
    "def mine(episode:": r"(.|\n)*SyntaxError",
    "import no_such_module_of_mine": r'(.|\n)*mine\.py", line 1',
    "mine = 3": r".*mine\.py has no function mine",
}


@pytest.mark.parametrize("source", UNUSABLE)
def test_row_53_a_file_that_cannot_be_used_is_refused_before_anything_is_loaded(tmp_path, source):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(InputError, match=rf"^--rollout .*mine\.py:mine: {UNUSABLE[source]}"):
        load_rollout_function(RunConfig(rollout=f"{tmp_path}/mine.py:mine"))


# Invalid values of a flag that names a user's function, and the expected message.
NO_SPEC = "expected file.py:function or module:function"
UNNAMED = {
    "mine.py": NO_SPEC,
    "mine.py:": NO_SPEC,
    ":score": NO_SPEC,
    "folder/mine.txt:f": NO_SPEC,
    "none.py:f": "file none.py does not exist",
    "no_such_package.rewards:f": "raised\nTraceback",
    "minirl.data.gsm8k:f": "minirl.data.gsm8k has no function f",
}


def test_an_invalid_function_spec_is_refused_with_the_flag():
    for spec, said in UNNAMED.items():
        with pytest.raises(InputError) as error:
            load_rollout_function(RunConfig(rollout=spec))
        assert str(error.value).startswith(f"--rollout {spec}: {said}")
