"""TRL's tools and environments run unchanged and produce the same messages and tokens as in TRL."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from minirl.data.answers import parse_assistant_message
from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.conversation import rollout_messages
from minirl.data.task import Row
from minirl.episodes.episode import Episode
from minirl.errors import InputError, RolloutError
from minirl.run.config import RunConfig
from minirl.run.inputs import load_rewards, load_rollout_function, load_task, load_tokenizer
from support.collecting import (
    CHAT,
    Prompts,
    chat_prompts,
    letter_tokenizer,
    make_collector,
)
from support.engines import make_request
from support.texts import HERMES, WITH_TOOLS, assistant, save_chat_tokenizer, user

SOURCE = '''
import asyncio, signal, threading

DESCRIBED = []

def install():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def fail(text: str) -> str:
    """Fail.

    Args:
        text: What to say.
    """
    raise ValueError(f"no {text}")

def describe(name: str) -> dict:
    """Describe something within a second: an alarm belongs to the main thread.

    Args:
        name: The thing.
    """
    DESCRIBED.append(name)
    install()
    return {"name": name, "letters": list(name), "calls": len(DESCRIBED)}

def lookup(function: str) -> list[tuple]:
    """Look something up.

    Args:
        function: What it does.
    """
    return [(function, b"raw")] if function else []

async def search(query: str) -> str:
    """Search.

    Args:
        query: What for.
    """
    await asyncio.sleep(0.001)
    if query == "nothing":
        raise LookupError("found nothing")
    return f"found {query}"

class Guessing:
    """A game of TRL's kind: guess the number of a row."""

    def __init__(self):
        self.guesses, self.thread = [], threading.current_thread()

    async def reset(self, target, prompt, **kwargs):
        self.target = target
        return f" (it is below {10 * (target // 10 + 1)}; {len(prompt)} message)"

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        assert threading.current_thread() is self.thread is not threading.main_thread()
        self.guesses.append(number)
        return "right" if number == self.target else "too small" if number < self.target else "too large"

    async def wait(self) -> str:
        """Wait a moment."""
        await asyncio.sleep(0.001)
        return "waited"

    async def get_reward(self):
        return float(len(self.guesses))

    async def close(self):
        print(f"closed after {len(self.guesses)} guesses")

class NoReset:
    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """

class NoTools:
    def reset(self, **row):
        return None

class Silent(NoTools, NoReset):
    pass

class Raises:
    def __init__(self):
        raise OSError("no server")

class Listed(NoTools):
    def reset(self, **row):
        return [1]
'''
TOOLS = "add,fail,describe,lookup,search"


def call(name, /, **arguments):
    """Return a tool call in Hermes format."""
    shown = str(arguments).replace("'", '"')
    return f'<tool_call>\n{{"name": "{name}", "arguments": {shown}}}\n</tool_call>'


@pytest.fixture
def load(tmp_path):
    """Return `load(kind, name)`, which loads tools or an environment from SOURCE."""
    (tmp_path / "mine.py").write_text(SOURCE)

    def load_one(kind, name, **options):
        return load_rollout_function(RunConfig(**{kind: f"{tmp_path}/mine.py:{name}"}, **options))

    return load_one


@pytest.fixture
def tokenizer(tmp_path):
    save_chat_tokenizer(tmp_path, HERMES + WITH_TOOLS, "<|im_end|>")
    return ChatTokenizer(tmp_path, chat=True)


def converse(rollout, tokenizer, texts, columns=None):
    """Run an episode whose turns have these texts; return its turn requests and the episode."""
    episode = Episode(Row("how much?", columns or {}, "f:1"), make_request([1], max_new_tokens=10_000))
    requests, left = [], iter(texts)

    async def ask(request):
        requests.append(request)
        ids = tokenizer.encode_text(f"{next(left)}<|im_end|>", "")
        message = parse_assistant_message(tokenizer, ids, np.array([]))
        turn = SimpleNamespace(branch=request.branch, message=message)
        episode.add_turn(turn)
        return turn

    episode.branches[0].request_turn = ask
    asyncio.run(rollout(episode))
    return requests, episode


def result(name, content):
    return {"role": "tool", "name": name, "content": content}


TEXTS = (
    f"first {call('add', a=1, b=2)}",
    f"{call('search', query='x')}{call('add', a=1)}{call('fail', text='luck')}",
    f"{call('subtract', a=1)}{call('describe', name='ab')}{call('search', query='nothing')}",
    call("lookup", function="x"),
    '<tool_call>{"name": </tool_call>',
    "it is 3",
)


def test_row_58_tools_run_until_a_turn_calls_none_and_the_model_sees_errors(load, tokenizer):
    tools = load("tools", TOOLS)
    assert ",".join(tool["function"]["name"] for tool in tools.tools) == TOOLS
    requests, _ = converse(tools.function, tokenizer, TEXTS)
    asked = [request.after for request in requests]
    missing = asked[2][1]["content"]
    assert asked == [
        "",
        [result("add", "3")],
        [result("search", "found x"), result("add", missing), result("fail", "{'error': 'no luck'}")],
        [
            result("subtract", "{'error': 'Tool subtract not found.'}"),
            result("describe", "{'name': 'ab', 'letters': ['a', 'b'], 'calls': 1}"),
            result("search", "{'error': 'found nothing'}"),
        ],
        [result("lookup", [["x", "b'raw'"]])],
        [result("unknown", asked[5][0]["content"])],
    ]
    assert "missing 1 required positional argument: 'b'" in missing
    assert asked[5][0]["content"].startswith("{'error': 'call 1: ")


def test_an_environment_is_reset_with_the_row_and_its_methods_are_the_tools(load, tokenizer, capfd):
    environment = load("environment", "Guessing")
    assert [tool["function"]["name"] for tool in environment.tools] == ["guess", "wait"]
    assert environment.gives_reward
    texts = [call("guess", number=3), call("guess", number=12) + call("wait"), "done"]
    (_, *requests), episode = converse(environment.function, tokenizer, texts, {"target": 12})
    assert episode.branches[1].prompt == [user("how much? (it is below 20; 1 message)")]
    assert [request.after for request in requests] == [
        [result("guess", "too small")],
        [result("guess", "right"), result("wait", "waited")],
    ]
    assert episode.given_rewards == {"reward": 2.0}, "the last result counts"
    assert "closed after 2 guesses" in capfd.readouterr().out


NO_REWARD = r"--reward {}: --{} .*mine.py:{} does not return a reward .*`environments` with --reward FILE.py"


@pytest.mark.parametrize(
    ("kind", "name", "reward", "error"),
    [
        ("tools", "add,subtract", "format", "--tools .*mine.py has no function subtract"),
        ("environment", "NoReset", "format", r"NoReset has no method reset\(\*\*row\)"),
        ("environment", "Raises", "format", "OSError: no server"),
        ("environment", "Silent", "episode", NO_REWARD),
        ("environment", "Guessing", "episode:style", NO_REWARD),
        ("tools", "add", "episode", NO_REWARD),
    ],
)
def test_row_59_an_invalid_tool_or_environment_or_a_missing_reward_is_rejected_at_startup(
    load, kind, name, reward, error
):
    with pytest.raises(InputError, match=error.format(reward, kind, name)):
        load(kind, name, reward=(reward,))


def test_tool_results_and_tool_errors_are_counted():
    async def rollout(episode):
        await episode.generate(max_tokens=3)
        told = user("{'error': ")
        results = [result("add", "3"), result("add", "{'error': 'no'}"), told]
        await episode.generate(after=results, max_tokens=3)

    collector = make_collector(chat_prompts(200), rollout=rollout)
    collector.collect(2)
    assert [collector.counts[name] for name in ("tool_results", "tool_errors")] == [12, 6]


def test_an_environment_without_tools_needs_no_response_template(load):
    environment = load("environment", "NoTools")
    assert not environment.gives_reward
    make_collector(chat_prompts(), rollout=environment.function).collect(1)
    with pytest.raises(RolloutError, match=r"reset returned \[1\]; expected text or None"):
        make_collector(chat_prompts(), rollout=load("environment", "Listed").function).collect(1)


def test_row_59_tools_need_a_known_call_format_and_a_template_for_results(tmp_path, load):
    """Unsuitable tools are rejected when the tokenizer is loaded, before the model."""
    tools = load("tools", "add")
    config = RunConfig(tools="mine.py:add", chat=True)
    only_users = "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m"
    for template, own, said in (
        (WITH_TOOLS, (), "no response template"),
        (HERMES + WITH_TOOLS, (len,), "--tools or --environment: this script describes its own tools"),
        (
            HERMES + WITH_TOOLS.replace("{{ m", only_users),
            (),
            "the result of a tool: .* rejects the messages",
        ),
    ):
        save_chat_tokenizer(tmp_path, template, "<|im_end|>")
        with pytest.raises(InputError, match=said):
            load_tokenizer(config, tmp_path, own, tools)


# Programs modeled on TRL's examples: Wordle, and grpo_agent, which limits its queries with an alarm.
PROGRAMS = """
import signal

class Client:
    def step(self, message):
        return message * 2

class Wordle:
    def __init__(self):
        self.client = Client()

    def reset(self, **kwargs) -> str | None:
        self.reward, self.done = 0.0, False
        return " with a word"

    def guess(self, guess: str) -> str:
        '''
        Make a guess.

        Args:
            guess: The guessed word

        Returns:
            The answer.
        '''
        if self.done:
            raise ValueError("Game over.")
        self.done = guess == "[abcde]"
        self.reward = float(self.done)
        return self.client.step(guess)

def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]

class TimeoutError(Exception):
    pass

def handler(signum, frame):
    raise TimeoutError("Operation timed out")

def query(sql_command: str) -> list[tuple]:
    '''
    Execute a command.

    Args:
        sql_command: The command.
    '''
    signal.signal(signal.SIGALRM, handler)
    signal.alarm(5)
    try:
        return [(sql_command, b"raw")]
    finally:
        signal.alarm(0)

def query_reward(completions, answer, **kwargs):
    rewards = []
    for completion, ans in zip(completions, answer, strict=False):
        calls = [c["function"]["arguments"]["sql_command"] for m in completion for c in m.get("tool_calls") or ()]
        results = [m["content"] for m in completion if m["role"] == "tool"]
        assert [[row[0] for row in rows] for rows in results] == [[call] for call in calls]
        assert completion[0]["role"] == completion[-1]["role"] == "assistant"
        rewards.append(10.0 * len(results) + (completion[-1]["content"] == ans))
    return rewards
"""


def said(content, *calls):
    """Return a turn's message as TRL's parser returns it."""
    structures = [
        {"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls
    ]
    return assistant(content) | ({"tool_calls": structures} if calls else {})


WITH_NAMES = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + CHAT
GUESSES = [said("", ("guess", {"guess": word})) for word in ("[a]", "[abcde]", "[b]")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "reward", "turns", "score"),
    [
        # The second guess wins; the third guess comes too late.
        ("environment", "Wordle", "reward_func", [*GUESSES, said("won")], 1),
        ("tools", "query", "query_reward", [said("", ("query", {"sql_command": "a"})), said("Yes")], 11),
    ],
)
def test_trl_programs_run_unchanged_and_get_the_same_rewards(
    tmp_path, monkeypatch, kind, name, reward, turns, score
):
    """The turns have fixed messages, whatever the model samples."""
    (tmp_path / "mine.py").write_text(PROGRAMS)

    def turn_before(tokenizer, ids, before):
        return turns[tokenizer.decode(before, skip_special_tokens=False).count("<turn>a:") - 1]

    monkeypatch.setattr("minirl.data.answers.parse_assistant_message", turn_before)
    file = f"{tmp_path}/mine.py"
    config = RunConfig(**{kind: f"{file}:{name}"}, reward=(f"{file}:{reward}",))
    loaded, (functions, _) = load_rollout_function(config), load_rewards(config, load_task(config))
    tokenizer = letter_tokenizer(HERMES + WITH_NAMES, chat=True).with_tools(loaded.tools)
    prompts = Prompts(tokenizer=tokenizer, max_new_tokens=450)
    prompts._rows = [Row([user("a b")], {"answer": "Yes"}, "f:1")]
    collector = make_collector(prompts, rollout=loaded.function, functions=functions, group_size=1)
    assert collector.collect(1).rewards.tolist() == [[[score]]]


# A template whose generation prompt differs if there are tools.
MAY_CALL = WITH_NAMES.replace("<turn>a:", "<turn>{{ 'may call' if tools else 'a' }}:")
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


def test_a_branchs_prompt_shows_its_own_tools_and_its_calls_are_parsed(monkeypatch):
    """The branches of a URL agent have the requests' tools. A template that cannot show tools is rejected."""
    asks = said("", ("look", {"at": "b"}))
    monkeypatch.setattr("minirl.data.answers.parse_assistant_message", lambda *_: asks)

    async def in_a_branch(episode):
        branch = episode.branch(episode.messages, tools=[LOOK])
        await branch.generate(max_tokens=3)
        await branch.generate(after=user("go on"), max_tokens=3)

    prompts = chat_prompts(200, HERMES + MAY_CALL)
    for rollout in make_collector(prompts, rollout=in_a_branch).collect(1).rollouts:
        assert rollout_messages(rollout, prompts.tokenizer)[-1] == asks
        text = prompts.tokenizer.decode(rollout.branches[0].tokens, skip_special_tokens=False)
        assert text.startswith("look <turn>u:")
        assert text.count("<turn>may call:") == 2
    with pytest.raises(
        RolloutError, match=r"before .*: the chat template of .* does not render the tool look"
    ):
        make_collector(chat_prompts(), rollout=in_a_branch).collect(1)
