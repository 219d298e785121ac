"""Agents that call a URL: requests become turns of the agent's episode, and faults give clear errors."""

import asyncio
import json
import re
import runpy
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import aiohttp
import pytest

from minirl.data.task import Row
from minirl.episodes.episode import Episode
from minirl.episodes.event_loop import event_loop
from minirl.errors import InputError, RolloutError
from minirl.extras.agents.endpoint import Endpoint, drop_last_turn, run_program, serve
from minirl.extras.agents.openai_format import read_request
from minirl.rewards.functions import EpisodeReward
from support.collecting import (
    assert_pauses_change_nothing,
    chat_prompts,
    collected,
    facts,
    make_collector,
)
from support.engines import make_request
from support.jobs import LIMIT_S
from support.marks import slow
from support.processes import is_alive
from support.texts import assistant, user

HI = user("hi")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def load(tmp_path):
    """Return `load(name, source)`, which loads a rollout function from a user's file."""

    def load_one(name, source):
        (tmp_path / "mine.py").write_text(source)
        return runpy.run_path(str(tmp_path / "mine.py"))[name]

    return load_one


def test_dropped_turns_are_not_in_the_rollout():
    """Fault 60."""

    async def seen(episode):
        await episode.generate(max_tokens=4)
        episode.branch("abc")
        await episode.branch("xyz").generate(max_tokens=6)

    async def unseen(episode):
        await episode.generate(max_tokens=4)
        other = episode.branch("abc")
        await other.generate(max_tokens=3)
        await episode.generate(after="q", max_tokens=5)
        drop_last_turn(other)
        drop_last_turn(episode.branches[0])
        await episode.branch("xyz").generate(max_tokens=6)

    def made(rollout):
        rollouts = make_collector(rollout=rollout).collect(2).rollouts
        return [(facts(one), one.episode) for one in rollouts]

    assert made(unseen) == made(seen)


# Agents that make the same requests as `in_turns`: with the openai package, with streaming, and with plain HTTP.
AGENTS = """
import asyncio, json, random, sys, time, urllib.request
import openai
from minirl.extras.agents.endpoint import run_program, serve

def prompt_of(episode):
    return [{"role": "user", "content": [{"type": "text", "text": episode.row.prompt}]}]

@serve
async def client_async(url, episode):
    async with openai.AsyncOpenAI(base_url=url, api_key="-") as client:
        messages = prompt_of(episode)
        for number in range(3):
            raw = await client.chat.completions.with_raw_response.create(
                model="m", messages=messages, max_tokens=5 + number, stop="e", temperature=0.2, seed=3,
                extra_body={"return_token_ids": True},
            )
            assert raw.headers["x-minirl-ignored"] == '["seed", "temperature"]'
            completion = raw.parse()
            (choice,) = completion.choices
            assert completion.usage.prompt_tokens == len(completion.prompt_token_ids)
            assert completion.prompt_token_ids + choice.token_ids == episode.prompt_ids + episode.tokens
            assert choice.token_ids == episode.turns[-1].ids
            await asyncio.sleep(random.SystemRandom().random() / 50)
            messages += [choice.message, {"role": "user", "content": choice.message.content[:3] + " go on"}]

@serve
def client_sync(url, episode):
    with openai.OpenAI(base_url=url, api_key="-") as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        messages = prompt_of(episode)
        for number in range(3):
            text = ""
            for chunk in client.chat.completions.create(
                model="m", messages=messages, max_completion_tokens=5 + number, stop=["e"], stream=True
            ):
                text += chunk.choices[0].delta.content
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": text[:3] + " go on"})

PROGRAM = '''
import json, os, sys, urllib.request
messages = [{"role": "user", "content": sys.stdin.read()}]
for number in range(3):
    fields = json.dumps({"messages": messages, "max_tokens": 5 + number, "stop": "e"}).encode()
    with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", fields) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": message["content"][:3] + " go on"}]
print(len(messages))
'''

@serve
async def program(url, episode):
    printed = await run_program(url, sys.executable, "-c", PROGRAM, text=episode.row.prompt)
    assert printed == "7\\n"
"""


async def in_turns(episode):
    turn = await episode.generate(max_tokens=5, stop="e")
    for number in (1, 2):
        said = turn.text.partition("e")[0]
        reply = user(said[:3] + " go on")
        turn = await episode.generate(after=reply, max_tokens=5 + number, stop="e")


@pytest.mark.parametrize("name", ["client_async", "client_sync", slow("program")])
def test_an_agent_makes_the_same_rollouts_as_a_rollout_function(load, name):
    """Covers late requests, a small cache, rounds, and a resume. Fault 54.

    For each turn, the client gets the token ids of prompt and completion.
    """
    pytest.importorskip("openai")
    prompts = chat_prompts(120)
    tight = {"cache_tokens": 512, "max_running_requests": 5}
    options = {"rollout": load(name, AGENTS), "group_size": 2, "engine_options": tight}
    twin = make_collector(prompts, rollout=in_turns, group_size=2)
    if name == "client_async":
        assert_pauses_change_nothing(partial(make_collector, prompts, **options), twin, budget=3)
    else:
        assert collected(make_collector(prompts, **options), 1, 1) == collected(twin, 1, 1)


MANY = """
import openai
from minirl.extras.agents.endpoint import serve

CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", max_retries=0, timeout=600)

@serve
async def agent(url, episode):
    client = CLIENT.with_options(base_url=url)
    messages = [{"role": "user", "content": episode.row.prompt}]
    for _ in range(1 + (episode.seed % 5 == 0)):
        completion = await client.chat.completions.create(model="m", messages=messages, max_tokens=3)
        messages += [completion.choices[0].message, {"role": "user", "content": "go on"}]
    return 1.0
"""


def test_200_agents_start_at_once_without_rejected_lost_or_repeated_requests(load):
    """The agents fit into the system's limit on file descriptors. Every fifth agent requests a second turn."""
    pytest.importorskip("openai")
    prompts = chat_prompts()
    options = {"functions": {"reward": EpisodeReward()}, "group_size": 1}
    rollouts = make_collector(prompts, rollout=load("agent", MANY), **options).collect(200).rollouts
    for one in rollouts:
        assert len(one.episode.turns) == 1 + (prompts.rng_key(one.rollout_id) % 5 == 0)
        assert one.episode.rewards == {"reward": 1.0}


async def post(url, path="chat/completions", *, data=None, **fields):
    """Post a request; return the status and the response, as parsed JSON or as the text of a stream."""
    data = json.dumps(fields) if data is None else data
    async with aiohttp.ClientSession() as client, client.post(f"{url}/{path}", data=data) as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await (answer.json() if is_json else answer.text())


def message_in(answer):
    return answer["choices"][0]["message"]


def made_episode():
    return Episode(Row("hi", {}, "f:1"), make_request([5, 6], max_new_tokens=50), [TOOL], is_chat=True)


def sampled_turn(branch, text="yes", **said):
    """Return a turn with one token per letter and this message."""
    branch.request = replace(branch.request, prompt_ids=(5, 6))
    ids = [ord(letter) for letter in text or ""]
    start, count = branch.num_tokens, len(ids)
    return SimpleNamespace(
        branch=branch.number,
        start=start,
        end=start + count,
        num_tokens=count,
        finish_reason="stop",
        ids=ids,
        text=text,
        message=assistant(text, **said),
    )


def until(is_true):
    """Run the event loop until the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline
        event_loop().run_slice(0.01)


async def at_once():
    """Do not wait."""


async def at_least(count, found):
    """Wait until a list has at least this many items."""
    while len(found) < count:
        await asyncio.sleep(0.01)


def drive(rollout, *turns, while_sampled=at_once):
    """Run an agent that gets these turns; return its turn requests. A further request ends the episode, like a limit.

    while_sampled: awaited before each turn ends.
    """
    episode, asked, left = made_episode(), [], list(turns)

    async def ask(request):
        asked.append(request)
        await while_sampled()
        if not left:
            task.cancel()
            await asyncio.sleep(1000)
        turn = sampled_turn(episode.branches[request.branch], **left.pop(0))
        episode.add_turn(turn)
        return turn

    episode.branches[0].request_turn = ask
    task = event_loop().create_task(rollout(episode))
    until(task.done)
    assert task.cancelled() or task.result() is None
    return asked


# Invalid requests as JSON, with the expected errors.
REFUSED = {
    "[]": "is not a JSON object",
    "{}": "messages: expected a non-empty list",
    '{"messages": ["hi"]}': "messages[0]: 'hi': expected a message",
    '{"messages": [{"role": "user"}, {"content": "a"}]}': "messages[1]: {'content': 'a'}: expected a message",
    '{"messages": [{"role": "user", "content": 7}]}': "messages[0]: content is 7; only text",
    '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "}]; only text content",
    '{"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}': "only function calls",
    r'{"messages": [{"role": "user", "content": "\ud800"}]}': "a lone surrogate is not valid text",
    '{"messages": [{"role": "assistant", "content": "so"}]}': "end with a user or tool message",
    '{"n": 2}': "n: only 1 is supported; remove this field",
    '{"response_format": {"type": "json_object"}}': "response_format: only {'type': 'text'} is supported",
    '{"tool_choice": "required"}': "tool_choice: only 'auto' is supported",
    '{"messages": [{"role": "user"}], "stop": 3}': "stop: expected a string or a list of strings",
    '{"messages": [{"role": "user"}], "tools": 3}': "tools: 3: expected a list",
}


def test_row_60_an_unsupported_request_is_rejected_naming_its_field(capfd):
    """An ignored field is noted once."""
    for body, said in REFUSED.items():
        with pytest.raises(InputError, match=re.escape(said)):
            read_request(json.loads(body), made_episode())
    for _ in range(2):
        read_request({"messages": [HI], "reasoning_effort": "low"}, made_episode())
    assert capfd.readouterr().out.count("'reasoning_effort', which has no effect") == 1


def test_row_60_a_rejected_request_is_no_turn_logs_no_traceback_and_the_episode_continues(caplog):
    """The response says why in OpenAI's format. Malformed HTTP closes its connection."""
    refused = [
        ({"messages": [HI], "n": 2}, 400, "n: only 1 is supported"),
        ({"data": "["}, 400, "the request is not valid JSON"),
        ({"data": "x" * 5_000_000}, 413, "Maximum request body size 4194304 exceeded"),
        ({"path": "completions"}, 404, "POST completions: unknown route; use GET models or POST chat"),
        (
            {"messages": [HI], "max_tokens": 0},
            400,
            "generate(max_tokens=0): must be an integer of at least 1",
        ),
    ]

    @serve
    async def agent(url, episode):
        for asked, status, said in refused:
            found, answer = await post(url, **asked)
            assert (found, answer["error"]["message"][: len(said)]) == (status, said)
        reader, writer = await asyncio.open_connection(*url.split("/")[2].split(":"))
        writer.write(b"GET / HTTP/1.1\r\na b\r\n\r\n")
        assert b" 400 Bad Request" in await reader.read()
        writer.close()
        _, answer = await post(url, messages=[HI])
        first = episode.branches[0]
        first.request = replace(first.request, max_new_tokens=3)
        status, answer = await post(url, messages=[HI, message_in(answer), HI])
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    assert len(drive(agent, {})) == 1
    assert caplog.text == ""


def test_row_60_too_many_requests_are_rejected_and_pending_ones_end_with_the_episode():
    answers = []

    @serve
    async def agent(url, _):
        async def ask_once():
            answers.append(await post(url, messages=[HI]))

        await asyncio.gather(*(ask_once() for _ in range(100)))

    # Under load, a few of the 36 excess requests may take minutes to connect.
    assert len(drive(agent, while_sampled=lambda: at_least(20, answers))) == 1
    assert [answer for status, answer in answers[:20] if status != 429] == []
    # 410 if a client is still there when the episode ends.
    assert {status for status, _ in answers} <= {410, 429}
    assert answers[0][1]["error"]["message"] == "the episode already has 64 pending requests (the maximum)"


def test_row_60_a_request_whose_client_disconnects_is_not_sampled_or_its_turn_is_dropped(monkeypatch):
    """The clients of a running turn and of a pending request disconnect; then the agent repeats the request."""
    hung_up, arrived, left = [], [], []
    handle = Endpoint._handle

    async def noted(endpoint, fields):
        arrived.append(fields)
        try:
            return await handle(endpoint, fields)
        finally:
            left.append(fields)

    monkeypatch.setattr(Endpoint, "_handle", noted)

    @serve
    async def agent(url, episode):
        for number in (1, 2):
            hung_up.append(asyncio.create_task(post(url, messages=[HI], max_tokens=number)))
            await at_least(number, arrived)
        await asyncio.wait(hung_up)
        _, answer = await post(url, messages=[HI], max_tokens=3)
        assert [len(branch.turns) for branch in episode.branches] == [0, 1]
        await post(url, messages=[HI, message_in(answer), HI], max_tokens=4)

    async def hang_up():
        await at_least(2, arrived)
        for task in hung_up:
            task.cancel()
        await at_least(2, left)

    asked = drive(agent, {}, {}, {}, while_sampled=hang_up)
    assert [(one.branch, one.max_tokens) for one in asked] == [(0, 1), (1, 3), (1, 4)]


def test_row_60_when_an_episode_ends_its_agent_and_child_processes_end(tmp_path):
    """Covers a thread, a coroutine and its child process. The thread's current and next requests fail."""
    seen = []
    pid = tmp_path / "pid"

    @serve
    def threaded(url, _):
        for _ in range(2):
            seen.append(asyncio.run(post(url, messages=[HI]))[1]["error"]["message"])

    @serve
    async def starting(url, _):
        asking = asyncio.create_task(post(url, messages=[HI]))
        await run_program(url, "sh", "-c", f"echo $$ > {pid}; exec sleep 1000")
        await asking

    async def started():
        while not pid.exists() or not pid.read_text():
            await asyncio.sleep(0.01)

    drive(threaded)
    drive(starting, while_sampled=started)
    until(lambda: len(seen) == 2)
    assert seen == ["the episode has ended", "no episode has this URL: it has ended or never existed"]
    until(lambda: not is_alive(int(pid.read_text())))


HOSTILE = """
import asyncio, json, math, sys, time, urllib.request
from minirl.episodes import runner
from minirl.extras.agents.endpoint import run_program, serve

def let_time_pass():
    runner.time.monotonic = lambda: math.inf

def asks(url, episode):
    fields = {"messages": [{"role": "user", "content": episode.row.prompt}], "max_tokens": 3}
    urllib.request.urlopen(f"{url}/chat/completions", json.dumps(fields).encode()).close()

@serve
async def silent(url, episode):
    await asyncio.to_thread(asks, url, episode)
    let_time_pass()
    await asyncio.sleep(1000)

@serve
def silent_thread(url, episode):
    asks(url, episode)
    let_time_pass()
    while not episode.is_closed:
        time.sleep(0.01)

@serve
def exits(url, episode):
    asks(url, episode)
    sys.exit(3)

@serve
def stops(url, episode):
    asks(url, episode)
    raise StopIteration

@serve
async def starts_a_command(url, episode):
    await run_program(url, "sh", "-c", "exit 3")
"""
FAILS = {
    "silent": "after turn 1: took more than 60 s; see --call-timeout",
    "silent_thread": "after turn 1: took more than 60 s; see --call-timeout",
    "exits": r"after turn 1: raised\n(.|\n)*mine.py(.|\n)*SystemExit\(3\)",
    "stops": r"after turn 1: raised\n(.|\n)*StopIteration",
    "starts_a_command": r"before its first turn: raised\n(.|\n)*RuntimeError: sh exited with code 3",
}


@pytest.mark.parametrize("name", FAILS)
@pytest.mark.usefixtures("clock")
def test_row_60_a_failing_agent_ends_the_run_with_a_clear_error(load, name):
    collector = make_collector(chat_prompts(120), rollout=load(name, HOSTILE), call_timeout=60.0)
    with pytest.raises(RolloutError, match=rf"rollout {name} for the row at f:\d+, {FAILS[name]}"):
        collector.collect(1)


def test_an_agent_is_rejected_for_text_prompts(load):
    with pytest.raises(RolloutError, match="the run's prompts are text: add --chat"):
        make_collector(rollout=load("silent", HOSTILE)).collect(1)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "é", "b": [1, 2]}}}


def called(arguments):
    """Return the tool calls of an episode's first turn, as agents receive and return them."""
    return [{"id": "c00001000", "type": "function", "function": {"name": "add", "arguments": arguments}}]


CALLED = [{**one, "index": 0} for one in called('{"a": "é", "b": [1, 2]}')]


@pytest.mark.parametrize(
    ("asked", "turn", "said", "finish_reason"),
    [
        ({}, {"text": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": CALLED}, "tool_calls"),
        ({}, {"reasoning_content": "hm"}, {"content": "yes", "reasoning_content": "hm"}, "stop"),
        # The content ends before the stop string.
        ({"stop": ["Z", "Obs"]}, {"text": "I see. Obs:"}, {"content": "I see. "}, "stop"),
        # An agent that disables tool calls gets the call as text.
        ({"tool_choice": "none"}, {"text": "<c>", "tool_calls": [CALL]}, {"content": "<c>"}, "stop"),
    ],
)
def test_a_response_has_openais_format_and_is_recognized_when_sent_back(asked, turn, said, finish_reason):
    """Covers streaming, and messages returned without reasoning, with other whitespace, or with None as content."""
    result = {"role": "tool", "content": "3", "tool_call_id": "c00001000"}

    @serve
    async def agent(url, _):
        _, answer = await post(url, messages=[HI], stream=True, **asked)
        event, end, _ = answer.split("\n\n")
        assert end == "data: [DONE]"
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        message = choice["delta"]
        assert (message, choice["finish_reason"]) == ({"role": "assistant", **said}, finish_reason)
        message.pop("reasoning_content", None)
        message["content"] = message["content"] or None
        if "tool_calls" in message:
            message["tool_calls"] = called('{"b":[1,2],"a":"\\u00e9"}')
        await post(url, messages=[HI, {**message, "refusal": None}, {**result, "name": None}])

    first, second = drive(agent, turn, {})
    assert first.stop == tuple(asked.get("stop", ()))
    assert (first.branch, second.branch, second.after) == (0, 0, [result])


def test_a_request_that_continues_no_branch_begins_one_that_can_be_continued():
    """Covers an additional system message, other tools, a repeated question and a different history."""
    own = [{"role": "system", "content": "be brief"}, HI]
    other = {**TOOL, "function": {**TOOL["function"], "name": "sub"}}
    branches = []

    @serve
    async def agent(url, episode):
        await post(url, messages=[HI, {"role": "assistant", "tool_calls": called('{"a": 1}')}, HI])
        _, answer = await post(url, messages=own)
        await post(url, messages=[*own, message_in(answer), HI])
        await post(url, messages=[HI])
        _, answer = await post(url, messages=[HI])
        await post(url, messages=[HI, message_in(answer), HI], tools=[other])
        branches.extend(episode.branches)

    asked = drive(agent, *[{}] * 6)
    assert [one.branch for one in asked] == [1, 2, 2, 0, 3, 4]
    assert [one.after for one in asked if one.after] == [[HI]]
    assert [branch.tools for branch in branches] == [[TOOL]] * 4 + [[other]]
    assert branches[2].prompt == own
    # Templates get arguments as parsed objects, although agents send JSON text.
    (call,) = branches[1].prompt[1]["tool_calls"]
    assert (branches[1].prompt[1]["content"], call["function"]["arguments"]) == ("", {"a": 1})
