"""What rollout functions may not ask for, begin or give: refused with function, row and turn."""

import re

import pytest

from minirl.errors import RolloutError
from support.collecting import Prompts, make_collector


async def is_silent(episode):
    pass


async def raises_first(episode):
    raise KeyError("at its beginning")


async def ends_first(episode):
    episode.end("env_done")


async def goes_on(episode):
    await episode.generate(max_tokens=3)
    episode.end("env_done")
    await episode.generate(max_tokens=3)


async def begins_a_branch(episode):
    await episode.generate(max_tokens=3)
    episode.end("env_done")
    await episode.branch("abc").generate(max_tokens=3)


async def goes_on_in_a_branch(episode):
    branch = episode.branch("abc")
    await branch.generate(max_tokens=3)
    episode.end("env_done")
    await branch.generate(max_tokens=3)


def in_turn(*requests):
    """A function that makes these requests, each of which takes the episode."""

    async def mine(episode):
        for request in requests:
            done = request(episode)
            if done is not None:
                await done

    return mine


def first(**asked):
    return in_turn(lambda episode: episode.generate(**asked))


def begins(prompt):
    return in_turn(lambda episode: episode.branch(prompt).generate())


def after_a_turn(request):
    return in_turn(lambda episode: episode.generate(max_tokens=3), request)


def then(**asked):
    return after_a_turn(lambda episode: episode.generate(**asked))


MESSAGE = {"role": "user", "content": "a"}
NO_PROMPT = r"branch\(.*\): expected text or messages with role and content"
WRONG_FIRST = [
    (is_silent, "ended without a turn"),
    (raises_first, r"raised\n(.|\n)*KeyError: 'at its beginning'"),
    (ends_first, "ended without a turn"),
    (first(after=MESSAGE), ".*before the first turn; see episode.branch"),
    (begins(7), NO_PROMPT),
    (begins([]), NO_PROMPT),
    (begins([{"role": "user"}]), NO_PROMPT),
    (begins("a" * 100), ".*the prompt of its first turn leaves no room"),
]
NO_AFTER = "expected text, a list of token ids, or messages"
AFTER_ITS_END = r"episode.generate\(\) after episode.end\('env_done'\)"
WRONG_LATER = [
    (then(after=5), rf"generate\(after=5\): {NO_AFTER}"),
    (then(after=b"abc"), rf"generate\(after=b'abc'\): {NO_AFTER}"),
    (then(after=[1.5]), r"generate\(after=...\): expected text, token ids or messages"),
    (then(after=[object()]), r"generate\(after=...\): expected text, token ids or messages"),
    (then(after=[MESSAGE]), "messages after a text prompt; see --chat"),
    (then(after=[10_000]), r"generate\(after=...\): token id 10000, and the model has 48"),
    (then(stop=True), r"episode.generate\(stop=True\): expected a text or several"),
    (then(stop=[7]), r"generate\(stop=\(7,\)\): expected texts"),
    (then(stop=["a", ""]), r"generate\(stop=\('a', ''\)\): expected .*; '' is in every text"),
    (then(stop="a\ufffd"), r"generate\(stop=.*\): expected .*, U\+FFFD and surrogates in none"),
    (then(stop="\ud83d"), r"generate\(stop=.*\): expected .*, U\+FFFD and surrogates in none"),
    (then(max_tokens=0), r"generate\(max_tokens=0\): must be at least 1"),
    (then(max_tokens="7"), r"generate\(max_tokens='7'\): must be at least 1"),
    (then(max_token=7), r"raised\n(.|\n)*TypeError: .*unexpected keyword argument 'max_token'"),
    (after_a_turn(lambda e: e.end("won")), r"episode.end\('won'\): expected one of stop, length, .*env_done"),
    (
        after_a_turn(lambda e: e.reward(float("nan"))),
        "episode.reward, for the row at f.*: 'reward' is nan; a",
    ),
    (after_a_turn(lambda e: "a turn"), r"raised\n(.|\n)*TypeError"),
    (goes_on, AFTER_ITS_END),
    (begins_a_branch, AFTER_ITS_END),
    (goes_on_in_a_branch, AFTER_ITS_END),
]
WRONG = [(*case, "before its first turn") for case in WRONG_FIRST]
WRONG += [(*case, "after turn 1") for case in WRONG_LATER]


@pytest.mark.parametrize(("rollout", "said", "when"), WRONG, ids=range(len(WRONG)))
def test_row_61_what_an_episode_asks_for_or_gives_wrongly_is_refused(rollout, said, when):
    """Fault 56: an end that means nothing, too."""
    name = rollout.__name__
    with pytest.raises(RolloutError) as raised:
        make_collector(Prompts(num_rows=4), rollout=rollout, group_size=1).collect(4)
    expected = rf"^rollout {name} for the row at f:\d, {when}: ({name}\(episode\).*: )?{said}"
    assert re.match(expected, str(raised.value)), str(raised.value)
    assert raised.value.exit_code == 4
