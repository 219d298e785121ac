"""TRL's tools and environments: run as they are, with the messages and tokens that TRL makes of them."""

import asyncio
import contextlib
import copy
import inspect
import json
import os
import re
import signal
import sqlite3
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minirl.data.answers import parsed_answer
from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.data.tools import tool_schemas
from minirl.episodes.collector import Collector
from minirl.episodes.episode import Episode
from minirl.errors import InputError, RolloutError
from minirl.model.transformer import Transformer
from minirl.rewards.reward_workers import RewardWorkers
from minirl.run.config import RunConfig
from minirl.run.load_prompts import load_tokenizer
from minirl.run.load_task import load_rollout, load_task
from support.collecting import (
    CHAT,
    Prompts,
    chat_prompts,
    collected,
    letter_tokenizer,
    make_collector,
)
from support.engines import cached_model, make_engine
from support.texts import CHATML, HERMES, save_chat_tokenizer
from support.turns import told_turn

WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHATML


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
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return {"name": name, "letters": list(name)}


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
        return float(self.guesses[-1] == self.target)

    async def close(self):
        print(f"closed after {len(self.guesses)} guesses")


BROKEN = '''
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

class Undocumented(NoTools):
    def guess(self, number):
        return ""

class Raises:
    def __init__(self):
        raise OSError("no server")

class Listed(NoTools):
    def reset(self, **row):
        return [1]
'''
FUNCTIONS = [add, fail, describe, lookup, search]
SOURCE = "import asyncio, signal, threading\n\n" + "\n\n".join(map(inspect.getsource, [*FUNCTIONS, Guessing]))


def call(name, /, **arguments):
    """A call as Hermes writes it."""
    shown = str(arguments).replace("'", '"')
    return f'<tool_call>\n{{"name": "{name}", "arguments": {shown}}}\n</tool_call>'


@pytest.fixture
def load(tmp_path):
    """Tools or an environment of the file above."""
    (tmp_path / "mine.py").write_text(SOURCE + BROKEN)
    return lambda kind, name: load_rollout(RunConfig(**{kind: f"{tmp_path}/mine.py:{name}"}))


@pytest.fixture
def tokenizer(tmp_path):
    save_chat_tokenizer(tmp_path, HERMES + WITH_TOOLS, "<|im_end|>")
    return Tokenizer(tmp_path, chat=True)


def said_turn(episode, tokenizer, asked, text):
    """A turn of an episode with this text, after its request."""
    ids = tokenizer.encode_text(f"{text}<|im_end|>", "")
    message = parsed_answer(tokenizer, ids, tokenizer.backend("", return_tensors="pt")["input_ids"][0].long())
    branch = episode.branches[asked.branch]
    return told_turn(
        len(branch.tokens), ids, text, message=message, branch=asked.branch, inserted=asked.inserted
    )


def converse(rollout, tokenizer, texts, columns=None):
    """Run an episode whose turns have these texts. Returns its requests, and the episode."""
    episode = Episode(Row("how much?", columns or {}, "f:1"), seed=1, max_tokens=10_000)
    requests, left = [], iter(texts)

    async def ask(request):
        requests.append(request)
        turn = said_turn(episode, tokenizer, request, next(left))
        episode.take(turn)
        return turn

    episode.ask = ask
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


def test_row_58_tools_are_called_until_a_turn_calls_none_and_errors_are_told_to_the_model(load, tokenizer):
    tools = load("tools", ",".join(f.__name__ for f in FUNCTIONS))
    assert [tool["function"]["name"] for tool in tools.tools] == [f.__name__ for f in FUNCTIONS]
    requests, _ = converse(tools.function, tokenizer, TEXTS)
    asked = [request.after for request in requests]
    missing = asked[2][1]["content"]
    assert asked == [
        "",
        [result("add", "3")],
        [result("search", "found x"), result("add", missing), result("fail", "{'error': 'no luck'}")],
        [
            result("subtract", "{'error': 'Tool subtract not found.'}"),
            result("describe", "{'name': 'ab', 'letters': ['a', 'b']}"),
            result("search", "{'error': 'found nothing'}"),
        ],
        [result("lookup", "[('x', b'raw')]")],
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
    assert episode.branches[1].prompt == [
        {"role": "user", "content": "how much? (it is below 20; 1 message)"}
    ]
    assert [request.after for request in requests] == [
        [result("guess", "too small")],
        [result("guess", "right"), result("wait", "waited")],
    ]
    assert episode.given == {"reward": 1.0}
    assert "closed after 2 guesses" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [
        ("tools", "add,subtract", "--tools .*mine.py has no function subtract"),
        ("environment", "NoReset", r"NoReset has no method reset\(\*\*row\)"),
        ("environment", "Undocumented", "tools: 'guess': no JSON schema can be made of it"),
        ("environment", "Raises", "OSError: no server"),
    ],
)
def test_row_59_what_is_no_tool_or_environment_is_refused_at_the_start(load, kind, name, error):
    with pytest.raises(InputError, match=error):
        load(kind, name)


@pytest.mark.parametrize(
    ("kind", "name", "reward"),
    [
        ("environment", "Silent", "episode"),
        ("environment", "Guessing", "episode:style"),
        ("tools", "add", "episode"),
    ],
)
def test_row_59_a_reward_that_an_environment_does_not_give_is_refused_at_the_start(
    tmp_path, load, kind, name, reward
):
    load(kind, name)  # writes the file
    spec = f"{tmp_path}/mine.py:{name}"
    expected = rf"--reward {reward}: --{kind} {spec} gives no such reward; .*`environments`: --reward FILE.py"
    with pytest.raises(InputError, match=expected):
        load_rollout(RunConfig(**{kind: spec}, reward=(reward,)))
    assert load_rollout(RunConfig(**{kind: spec}, reward=("a.py:score",))).tools


def test_results_of_tools_are_counted_and_so_are_those_that_are_errors():
    async def rollout(episode):
        await episode.generate(max_tokens=3)
        results = [result("add", "3"), result("add", "{'error': 'no'}")]
        results.append({"role": "user", "content": "{'error': "})
        await episode.generate(after=results, max_tokens=3)

    collector = make_collector(chat_prompts(200), rollout=rollout)
    collector.collect(2)
    assert [collector.take_count(name) for name in ("tool_results", "tool_errors")] == [12, 6]


def test_a_tokenizer_without_a_response_template_does_for_an_environment_without_tools(load):
    environment = load("environment", "NoTools")
    assert not environment.gives_reward
    collected(make_collector(chat_prompts(), rollout=environment.function), 1)
    with pytest.raises(RolloutError, match=r"reset returned \[1\]; expected text or None"):
        collected(make_collector(chat_prompts(), rollout=load("environment", "Listed").function), 1)


def test_row_59_tools_need_a_way_to_read_calls_and_to_write_results(tmp_path):
    """Refused with the tokenizer, before there is a model."""
    tools = types.SimpleNamespace(tools=tool_schemas([add]))
    config = RunConfig(tools="mine.py:add", chat=True)
    only_users = "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m"
    for template, own, said in (
        (WITH_TOOLS, (), "no response template"),
        (HERMES + WITH_TOOLS, (add,), "--tools or --environment: this script describes its own tools"),
        (
            HERMES + WITH_TOOLS.replace("{{ m", only_users),
            (),
            "the result of a tool: .* refuses the messages",
        ),
    ):
        save_chat_tokenizer(tmp_path, template, "<|im_end|>")
        with pytest.raises(InputError, match=said):
            load_tokenizer(config, tmp_path, own, tools)


def long_engine():
    short = cached_model("full", torch.float32)
    model = Transformer(replace(short.config, max_position_embeddings=4096))
    model.load_state_dict(short.state_dict())
    return make_engine(model, cache_tokens=32768)


# A checkout of TRL, whose programs are run without a change; its packages have none of them.
TRL = os.environ.get("MINIRL_TRL_SOURCE")
# Their other imports: their trainer, which does nothing here, and the clients of servers that are not here.
TRL_STAND_INS = {
    "trl.py": """
class GRPOTrainer:
    def __init__(self, *arguments, **options):
        pass

    def train(self):
        pass

GRPOConfig = ModelConfig = ScriptArguments = TrlParser = GRPOTrainer
""",
    "datasets.py": """
class Dataset:
    from_dict = staticmethod(dict)

load_dataset = None
""",
    "textarena_env.py": """
import types

class TextArenaAction:
    def __init__(self, message):
        self.message = message

class TextArenaEnv:
    def __init__(self, base_url):
        self.base_url = base_url

    def reset(self):
        self.said = " guess "
        return self._result(False)

    def step(self, action):
        self.said += f"you said {action.message} "
        return self._result(action.message == "[abcde]")

    def _result(self, is_right):
        message = types.SimpleNamespace(content=self.said)
        observation = types.SimpleNamespace(messages=[message])
        return types.SimpleNamespace(observation=observation, reward=float(is_right), done=is_right)
""",
}


class Door:
    """An environment without `get_reward`, a tool with a parameter named function, and a list as its result."""

    def __init__(self):
        self.client = object()

    def reset(self, function, prompt, **row):
        self.wanted, self.tried, self.reward = function, [], 0.0
        return " with a key"

    def open(self, function: str) -> list[tuple]:
        """Try a key.

        Args:
            function: The key.
        """
        self.tried.append(function)
        self.reward = float(function == self.wanted) / len(self.tried)
        return [(function, self.reward)]


def reward_func(environments, **kwargs):
    return [env.reward + 10 * len(env.tried) for env in environments]


def shape_reward(completions, **kwargs):
    """TRL's shapes: calls as structures, lists as lists, no prompt among the messages."""
    for completion in completions:
        calls = [call["function"] for said in completion for call in said.get("tool_calls", [])]
        results = [said["content"] for said in completion if said["role"] == "tool"]
        keys = [call["arguments"]["function"] for call in calls]
        assert [[row[0] for row in rows] for rows in results] == [[key] for key in keys]
        assert completion[0]["role"] == completion[-1]["role"] == "assistant"
    return [float(len(completion)) for completion in completions]


OWN = "\n\n".join(map(inspect.getsource, (Door, reward_func, shape_reward)))


def said(content, *calls):
    """A turn as TRL's parser has it."""
    structures = [
        {"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": structures} if calls else {})


def sql(command):
    return ("query_biogrid", {"sql_command": command})


WORDS = ("[a]", "[abcde]", "[b]")  # the second wins, the third comes too late
# For each program: the flag and the name of its code, its rewards; by row the model's texts, and the scores.
PROGRAMS = {
    "own": (
        "environment",
        "Door",
        ["reward_func", "shape_reward"],
        {
            "twice": ([*(said("", ("open", {"function": key})) for key in "ba"), said("in")], [20.5, 5]),
        },
    ),
    "wordle": (
        "environment",
        "WordleEnv",
        ["reward_func"],
        {
            "right": ([*(said("", ("guess", {"guess": word})) for word in WORDS), said("won")], [1]),
            "wrong": ([said("", ("guess", {"guess": "[a]"})), said("lost")], [0]),
        },
    ),
    "grpo_agent": (
        "tools",
        "query_biogrid",
        ["query_reward", "structure_reward", "correctness_reward"],
        {
            "hit": (
                [said("", sql("select a from t where a = 1")), said("*Yes*")],
                [2.4, 0.1, 0.6],
            ),
            "none": ([said("*no*")], [-1.5, 0, -1]),
        },
    ),
}


def program_of_trl(name):
    """A program's text in TRL's documentation, as it is."""
    if name == "grpo_agent":
        return Path(TRL, "examples/scripts/grpo_agent.py").read_text()
    page = Path(TRL, "docs/source/openenv.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (environment,) = (block for block in blocks if "class WordleEnv" in block and "def guess" in block)
    (training,) = (block for block in blocks if "environment_factory=WordleEnv" in block)
    return f"{environment}\n{training}"


def said_by(rows):
    """Reads turns: the turns of a row have the texts written there, whatever was sampled."""

    def message(tokenizer, ids, before):
        text = tokenizer.decode(before, skip_special_tokens=False)
        ((turns, _),) = [row for name, row in rows.items() if f"<turn>u:{name}" in text]
        return turns[text.count("<turn>a:") - 1]

    return message


@pytest.fixture
def beside_stand_ins(tmp_path, monkeypatch):
    """Processes that are started find the modules above, and a database of two rows in their folder."""
    for name, text in TRL_STAND_INS.items():
        file = tmp_path / "modules" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(sqlite3.connect("biogrid.db")) as database:
        database.execute("create table t as select 1 as a union select 2")
        database.commit()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_trl_run_as_they_are_and_score_conversations_as_there(
    tmp_path, monkeypatch, beside_stand_ins, name
):
    if name != "own" and TRL is None:
        pytest.skip("MINIRL_TRL_SOURCE names no checkout of TRL")
    kind, object_name, rewards, rows = PROGRAMS[name]
    file = tmp_path / "program.py"
    file.write_text(OWN if name == "own" else program_of_trl(name))
    lines = []
    for row in rows:
        prompt = [{"role": "user", "content": row}]
        lines.append(json.dumps({"prompt": prompt, "answer": "Yes", "function": "a"}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("minirl.data.answers.parsed_answer", said_by(rows))
    config = RunConfig(
        data=str(tmp_path / "rows.jsonl"),
        reward=tuple(f"{file}:{reward}" for reward in rewards),
        **{kind: f"{file}:{object_name}"},
    )
    loaded, task = load_rollout(config), load_task(config)
    try:
        tokenizer = copy.copy(letter_tokenizer(HERMES + CHAT, chat=True))
        tokenizer.tools = loaded.tools
        prompts = Prompts(tokenizer=tokenizer, max_new_tokens=3000, num_rows=len(rows))
        prompts._rows = task.train_rows
        collector = Collector(long_engine(), prompts, task.rewards, rollout=loaded.function, group_size=2)
        groups = collector.collect(len(rows))
        for row, scores in zip(groups.rewarded.rows, groups.rewarded.rewards.tolist(), strict=True):
            assert scores == pytest.approx(rows[row.prompt[0]["content"]][1])
    finally:
        for function in task.rewards.values():
            if isinstance(function, RewardWorkers):
                function.stop()


# It shows the names of tools, and begins answers otherwise where there are any.
WITH_NAMES = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + CHAT.replace(
    "<turn>a:", "<turn>{{ 'may call' if tools else 'a' }}:"
)
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


async def in_a_branch(episode):
    branch = episode.branch(episode.messages, tools=[LOOK])
    await branch.generate(max_tokens=3)
    await branch.generate(after={"role": "user", "content": "go on"}, max_tokens=3)


def test_a_branch_shows_its_own_tools_and_its_calls_are_structures(monkeypatch):
    """As that of an agent at a URL, whose requests have tools."""
    asks = said("", ("look", {"at": "b"}))
    monkeypatch.setattr("minirl.data.answers.parsed_answer", lambda *_: asks)
    prompts = chat_prompts(200, HERMES + WITH_NAMES)
    for rollout in make_collector(prompts, rollout=in_a_branch).collect(1).rewarded.rollouts:
        assert prompts.messages(rollout)[-1] == asks
        text = prompts.tokenizer.decode(rollout.tokens, skip_special_tokens=False)
        assert text.startswith("look <turn>u:")
        assert text.count("<turn>may call:") == 2


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (CHAT, "the chat template of .* does not show look"),
        (WITH_NAMES, "/.*: its tokenizer has no response template"),
    ],
)
def test_tools_that_a_branch_cannot_show_or_whose_calls_cannot_be_read_are_refused(template, error):
    with pytest.raises(
        RolloutError, match=rf"rollout in_a_branch for the row at f:\d+, before .*: .*{error}"
    ):
        make_collector(chat_prompts(120, template), rollout=in_a_branch).collect(1)
