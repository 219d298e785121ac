"""What rollout functions may not ask for, begin or give: refused with function, row and turn, wherever they run."""

import pytest

from minirl.errors import RolloutError
from support.collecting import Prompts, in_workers, make_collector

SOURCE = """
import copy
from minirl.episodes.generate import End, Generate

def wrong(episode):
    return globals()[episode.row.columns["does"]](episode)

# Before the first turn.

def returns_a_turn(episode):
    return episode.generate()

def is_silent(episode):
    if False:
        yield

def raises_first(episode):
    raise KeyError("at its beginning")
    yield

def ends_first(episode):
    yield episode.end("env_done")

async def sends_a_message_first(episode):
    await episode.generate(after={"role": "user", "content": "a"})

async def begins_with_a_number(episode):
    await episode.branch(7).generate()

async def begins_with_nothing(episode):
    await episode.branch([]).generate()

async def begins_without_content(episode):
    await episode.branch([{"role": "user"}]).generate()

async def begins_without_room(episode):
    await episode.branch("a" * 100).generate()

# After the first turn.

def after_a_turn(act):
    async def function(episode):
        await episode.generate(max_tokens=3)
        asked = act(episode)
        if asked is not None:
            await asked
    return function

appends_a_number = after_a_turn(lambda episode: episode.generate(after=5))
appends_bytes = after_a_turn(lambda episode: episode.generate(after=b"abc"))
appends_fractions = after_a_turn(lambda episode: episode.generate(after=[1.5]))
appends_a_message = after_a_turn(lambda episode: episode.generate(after=[{"role": "user", "content": "a"}]))
appends_foreign_ids = after_a_turn(lambda episode: episode.generate(after=[10_000]))
stops_at_true = after_a_turn(lambda episode: episode.generate(stop=True))
stops_at_a_number = after_a_turn(lambda episode: episode.generate(stop=[7]))
stops_at_none = after_a_turn(lambda episode: Generate(stop=None))
stops_at_nothing = after_a_turn(lambda episode: episode.generate(stop=["a", ""]))
stops_at_no_character = after_a_turn(lambda episode: episode.generate(stop="a\\ufffd"))
stops_at_half_a_character = after_a_turn(lambda episode: episode.generate(stop="\\ud83d"))
samples_nothing = after_a_turn(lambda episode: episode.generate(max_tokens=0))
samples_text = after_a_turn(lambda episode: episode.generate(max_tokens="7"))
truncates_without_bound = after_a_turn(lambda episode: episode.generate(top_p=0.9))
lists_a_branch = after_a_turn(lambda episode: Generate(branch=[1]))
ends_in_nonsense = after_a_turn(lambda episode: End("nonsense"))
ends_with_an_unknown_reason = after_a_turn(lambda episode: episode.end("won"))
sets_its_end = after_a_turn(lambda episode: setattr(episode, "end_reason", ["stop"]))
yields_text = after_a_turn(lambda episode: "a turn")
rewards_a_branch_without_a_turn = after_a_turn(
    lambda episode: episode.reward(1.0, branch=episode.branch("b"))
)
rewards_a_number = after_a_turn(lambda episode: episode.reward(1.0, branch=3))
rewards_a_copy = after_a_turn(lambda episode: episode.reward(1.0, branch=copy.copy(episode)))

def misspells(episode):
    turn = episode.generate(max_tokens=3)
    yield turn
    vars(turn)["max_token"] = 3
    yield turn

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

async def rewards_late(episode):
    await episode.generate(max_tokens=3)
    try:
        episode.end("env_done")
        return
    finally:
        episode.reward(1.0)

async def returns_a_number(episode):
    await episode.generate(max_tokens=3)
    return 1.0

async def is_right(episode):
    await episode.generate(max_tokens=3)

async def returns_text(episode):
    await episode.generate(max_tokens=3)
    return "1.0"
"""
NO_PROMPT = r"branch\(.*\): expected text or messages with role and content"
AFTER_ITS_END = r"(.|\n)*episode.generate\(\) after episode.end\('env_done'\)"
NO_BRANCH = r"(.|\n)*branch=.*; expected a branch of the episode, or 'all'"
WRONG_FIRST = {
    "returns_a_turn": "is not a generator; write `turn = yield",
    "is_silent": "ended without a turn",
    "ends_first": "ended without a turn",
    "sends_a_message_first": ".*before the first turn; see episode.branch",
    "begins_with_a_number": NO_PROMPT,
    "begins_with_nothing": NO_PROMPT,
    "begins_without_content": NO_PROMPT,
    "begins_without_room": ".*the prompt of its first turn leaves no room",
}
WRONG_LATER = {
    "appends_a_number": r"generate\(after=5\): expected text, a list of token ids, or messages",
    "appends_bytes": r"generate\(after=b'abc'\): expected text, a list of token ids, or messages",
    "appends_fractions": r"generate\(after=...\): expected text, token ids or messages",
    "appends_a_message": "messages after a text prompt; see --chat",
    "appends_foreign_ids": "token id 10000, and the model has 48",
    "stops_at_true": r"(.|\n)*generate\(stop=True\): expected a text or several",
    "stops_at_a_number": r"generate\(stop=\(7,\)\): expected a tuple of texts",
    "stops_at_none": r"generate\(stop=None\): expected a tuple of texts",
    "stops_at_nothing": r"generate\(stop=\('a', ''\)\): expected .*; '' is in every text",
    "stops_at_no_character": r"generate\(stop=.*\): expected .*, U\+FFFD and surrogates in none",
    "stops_at_half_a_character": r"generate\(stop=.*\): expected .*, U\+FFFD and surrogates in none",
    "samples_nothing": r"generate\(max_tokens=0\): must be at least 1",
    "samples_text": r"generate\(max_tokens='7'\): must be at least 1",
    "truncates_without_bound": ".*top_p 0.9: needs top_k, .* add top_k 256, the most",
    "lists_a_branch": r"generate\(branch=\[1\]\): write `episode.branch\(messages\).generate\(\)`",
    "ends_in_nonsense": r"episode.end\('nonsense'\): expected one of stop, length",
    "ends_with_an_unknown_reason": r"(.|\n)*episode.end\('won'\): expected one of stop, length, .*env_done",
    "sets_its_end": r"episode.end\(\['stop'\]\): expected one of stop, length",
    "yields_text": "yields 'a turn'; expected `yield episode.generate",
    "rewards_a_branch_without_a_turn": r"(.|\n)*branch 1 has had no turn that could be given one",
    "rewards_a_number": NO_BRANCH,
    "rewards_a_copy": NO_BRANCH,
    "misspells": r"generate\(max_token=3\): there is no such field",
    "goes_on": AFTER_ITS_END,
    "begins_a_branch": AFTER_ITS_END,
    "goes_on_in_a_branch": AFTER_ITS_END,
    "rewards_late": r"(.|\n)*the episode ended; give rewards before a `yield`",
    "returns_a_number": r"gives rewards \('reward'\) that the run does not have: add --reward episode",
    "returns_text": r"returns '1.0'; a reward is a finite number of at most 1e\+12",
}


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """The function that does what its row names, in a worker, and in one whose failures are forgiven."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "mine.py").write_text(SOURCE)
    with in_workers(folder, timeout_s=20.0) as load:
        yield load("wrong"), load("wrong", on_error="end")


def collect(rollout, *names):
    """Collect 40 episodes with these faults by name, the last one most often."""
    prompts = Prompts(num_rows=40)
    for i in range(40):
        prompts.row(i).columns["does"] = names[min(i, len(names) - 1)]
    make_collector(prompts, rollout=rollout, group_size=1).collect(40)


@pytest.mark.parametrize("name", [*WRONG_FIRST, *WRONG_LATER])
def test_row_61_what_an_episode_asks_for_or_gives_wrongly_is_refused_in_both_hosts(workers, name):
    """Fault 56: an end that means nothing, too."""
    said = {**WRONG_FIRST, **WRONG_LATER}[name]
    place = "before its first turn" if name in WRONG_FIRST else "after turn 1"
    said = rf"^rollout wrong for the row at f:\d+, {place}: (wrong\(episode\).*: )?{said}"
    here = {}
    exec(SOURCE, here)
    for rollout in (here["wrong"], workers[0].beside()):
        with pytest.raises(RolloutError, match=said) as raised:
            collect(rollout, name)
        assert raised.value.exit_code == 4


@pytest.mark.parametrize("name", ["returns_a_turn", "is_silent", "raises_first"])
def test_row_53_a_failure_before_the_first_turn_is_never_forgiven(workers, name):
    """There is nothing of the episode that could be trained on; one of 40 that fails later is forgiven."""
    _, forgiving = workers
    collect(forgiving.beside(), "returns_text", "is_right")
    with pytest.raises(RolloutError, match=r"rollout wrong for the row at f:\d+, before its first turn: "):
        collect(forgiving.beside(), name, "is_right")
