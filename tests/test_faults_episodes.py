"""What rollout functions may not ask for, begin or give: refused with function, row and turn."""

import re

import pytest

from minirl.errors import RolloutError
from support.collecting import Prompts, make_collector

MESSAGE = {"role": "user", "content": "a"}


def asks(**asked):
    return lambda episode: episode.generate(**asked)


def begins(prompt):
    return lambda episode: episode.branch(prompt).generate()


def ends(episode):
    episode.end("env_done")


async def raises(episode):
    raise KeyError("at its beginning")


# What a function does first, or after a turn, one after another; and what is said.
NO_PROMPT = r"branch\(.*\): expected text or messages with role and content"
FIRST = [
    ([], "ended without a turn"),
    ([ends], "ended without a turn"),
    ([raises], r"raised\n(.|\n)*KeyError: 'at its beginning'"),
    ([asks(after=MESSAGE)], ".*before the first turn; see episode.branch"),
    ([begins(7)], NO_PROMPT),
    ([begins([])], ".*the prompt has no tokens"),
    ([begins([{"role": "user"}])], NO_PROMPT),
    ([begins("a" * 100)], ".*the prompt of its first turn leaves no room"),
]
NO_AFTER = "expected text, a list of token ids, or messages"
NO_STOP = r"generate\(stop=.*\): expected texts; '' is in every text, U\+FFFD and surrogates in none"
LATER = [
    ([asks(after=5)], rf"generate\(after=5\): {NO_AFTER}"),
    ([asks(after=b"abc")], rf"generate\(after=b'abc'\): {NO_AFTER}"),
    ([asks(after=[1.5])], r"generate\(after=...\): expected text, token ids or messages"),
    ([asks(after=[MESSAGE])], "messages after a text prompt; see --chat"),
    ([asks(after=[10_000])], r"generate\(after=...\): token id 10000, and the model has 48"),
    ([asks(stop=[7])], NO_STOP),
    ([asks(stop=["a", ""])], NO_STOP),
    ([asks(stop="a\ufffd")], NO_STOP),
    ([asks(stop="\ud83d")], NO_STOP),
    ([asks(max_tokens=0)], r"generate\(max_tokens=0\): must be at least 1"),
    ([asks(max_tokens="7")], r"generate\(max_tokens='7'\): must be at least 1"),
    ([asks(max_token=7)], r"raised\n(.|\n)*TypeError: .*unexpected keyword argument 'max_token'"),
    ([lambda e: e.end("won")], r"episode.end\('won'\): expected one of stop, length, .*env_done"),
    ([lambda e: e.reward(float("nan"))], "episode.reward, for the row at f.*: 'reward' is nan; a"),
    ([ends, asks()], r"episode.generate\(\) after episode.end\('env_done'\)"),
    ([ends, begins("abc")], r"episode.generate\(\) after episode.end\('env_done'\)"),
]
WRONG = [(*case, "before its first turn") for case in FIRST]
WRONG += [([asks(max_tokens=3), *actions], said, "after turn 1") for actions, said in LATER]


@pytest.mark.parametrize(("actions", "said", "when"), WRONG, ids=range(len(WRONG)))
def test_row_61_what_an_episode_asks_for_or_gives_wrongly_is_refused(actions, said, when):
    """Fault 56: an end that means nothing, too."""

    async def mine(episode):
        for action in actions:
            done = action(episode)
            if done is not None:
                await done

    with pytest.raises(RolloutError) as raised:
        make_collector(Prompts(num_rows=4), rollout=mine, group_size=1).collect(4)
    expected = rf"^rollout mine for the row at f:\d, {when}: (mine\(episode\).*: )?{said}"
    assert re.match(expected, str(raised.value)), str(raised.value)
    assert raised.value.exit_code == 4
