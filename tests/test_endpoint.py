"""Programs that own their loop: the turns sampled at a URL are their episode, whatever else they send there."""

import asyncio
import contextlib
import functools
import inspect
import json
import re
import resource
import runpy
import time
from http import HTTPStatus
from pathlib import Path

import pytest

from minirl.agents import loopback
from minirl.agents.endpoint import Endpoint, run_program, serve
from minirl.agents.loopback import Answer, HttpError, LoopbackServer
from minirl.agents.openai_format import read_request
from minirl.data.task import Row
from minirl.episodes.episode import Episode
from minirl.episodes.generate import Generate
from minirl.episodes.program import Ended
from minirl.errors import RolloutError
from minirl.rewards.functions import EpisodeReward
from minirl.truncation import Truncation
from support.collecting import (
    chat_prompts,
    collected,
    facts,
    in_workers,
    make_collector,
)
from support.jobs import SLACK
from support.marks import slow
from support.processes import is_alive
from support.programs import AT_A_URL, in_turns
from support.turns import told_turn

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Functions of the file above in their workers, which are killed when the test is over."""
    (tmp_path / "mine.py").write_text(AT_A_URL)
    monkeypatch.setattr("minirl.workers.pool.GRACE_S", 0.5)
    with in_workers(tmp_path, timeout_s=20.0) as load_function:
        yield load_function


def rollouts_of(rollout, num_steps=1, num_groups=5, *, is_chat=True, **options):
    prompts = chat_prompts(120) if is_chat else None
    return collected(make_collector(prompts, rollout=rollout, **options), num_steps, num_groups)


def of_ids(episode):
    yield episode.generate(max_tokens=4)
    yield episode.generate(after=[7, 8], max_tokens=4)
    yield episode.generate(after=[7, 9], max_tokens=4)


def unseen(episode):
    """Turns that nobody saw; a copy of it runs in a worker."""
    yield episode.generate(max_tokens=4)
    episode.reward(1.0)
    other = episode.branch("abc")
    yield other.generate(max_tokens=3)
    yield episode.generate(after="q", max_tokens=5)
    episode.reward(2.0)
    other.drops_last = episode.drops_last = True
    yield episode.branch("xyz").generate(max_tokens=6)


def seen(episode):
    yield episode.generate(max_tokens=4)
    episode.reward(3.0)
    episode.branch("abc")
    yield episode.branch("xyz").generate(max_tokens=6)


def test_turns_that_nobody_saw_are_no_part_of_the_rollout(load, tmp_path):
    """Fault 60."""
    (tmp_path / "mine.py").write_text(inspect.getsource(unseen))

    def made(rollout):
        groups = make_collector(functions={"mine": EpisodeReward()}, rollout=rollout).collect(2)
        return [(facts(one), one.episode) for one in groups.rewarded.rollouts]

    assert made(unseen) == made(load("unseen")) == made(seen)


def test_an_agents_process_takes_so_many_episodes_and_further_ones_get_another(load):
    workers = load("two_at_a_time")
    assert rollouts_of(workers, 2, 2) == rollouts_of(in_turns, 2, 2)
    assert len(workers.pool.workers) == 3


@pytest.mark.parametrize("is_chat", [True, False])
def test_token_ids_are_continued_by_their_prefix_and_come_back_with_their_logprobs(load, is_chat):
    assert rollouts_of(load("by_completion"), is_chat=is_chat) == rollouts_of(of_ids, is_chat=is_chat)


OPENAI = """
import asyncio, openai
from minirl.agents.endpoint import run_program, serve

@serve
async def client_async(url, episode):
    client = openai.AsyncOpenAI(base_url=url, api_key="-")
    messages = [{"role": "user", "content": episode.row.prompt}]
    for number in range(3):
        completion = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=5 + number, stop="e", temperature=1.0, logprobs=True
        )
        (choice,) = completion.choices
        assert [entry.logprob for entry in choice.logprobs.content] == episode.turns[-1].logprobs
        messages.append(choice.message)
        messages.append({"role": "user", "content": choice.message.content[:3] + " go on"})

@serve
def client_sync(url, episode):
    client = openai.OpenAI(base_url=url, api_key="-")
    assert [model.id for model in client.models.list()] == ["policy"]
    messages = [{"role": "user", "content": [{"type": "text", "text": episode.row.prompt}]}]
    for number in range(3):
        text = ""
        for chunk in client.chat.completions.create(
            model="m", messages=messages, max_completion_tokens=5 + number, stop=["e"], stream=True
        ):
            text += chunk.choices[0].delta.content
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": text[:3] + " go on"})

AGENT = '''
import openai, sys
client = openai.OpenAI()
messages = [{"role": "user", "content": sys.stdin.read()}]
for number in range(3):
    completion = client.chat.completions.create(model="m", messages=messages, max_tokens=5 + number, stop="e")
    message = completion.choices[0].message
    messages += [message.model_dump(), {"role": "user", "content": message.content[:3] + " go on"}]
print(len(messages))
'''

@serve
async def client_program(url, episode):
    import sys
    printed = await run_program(url, sys.executable, "-c", AGENT, text=episode.row.prompt)
    assert printed == "7\\n"
"""


@pytest.mark.parametrize("name", ["client_async", slow("client_sync"), slow("client_program")])
def test_an_agent_written_with_the_openai_package_trains_as_it_is(load, tmp_path, name):
    pytest.importorskip("openai")
    (tmp_path / "mine.py").write_text(OPENAI)
    rollout = load(name, timeout_s=60)
    assert rollouts_of(rollout, num_groups=1, group_size=2) == rollouts_of(
        in_turns, num_groups=1, group_size=2
    )


SHARED = """
import openai
from minirl.agents.endpoint import serve

# A client gives up a connection after 5 seconds, which hundreds of them take on a loaded machine.
CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", max_retries=0, timeout=60)

@serve
async def agent(url, episode):
    client = CLIENT.with_options(base_url=url)
    messages = [{"role": "user", "content": episode.row.prompt}]
    for _ in range(1 + episode.seed % 4 // 3):
        completion = await client.chat.completions.create(model="m", messages=messages)
        messages += [completion.choices[0].message, {"role": "user", "content": "go on"}]
    return 1.0
"""


@pytest.mark.slow
def test_a_client_that_256_episodes_share_loses_no_request_within_512_descriptors(load, tmp_path):
    """64 in each process. One in four asks for a second turn, on a connection that others have used, and none again."""
    pytest.importorskip("openai")
    (tmp_path / "mine.py").write_text(SHARED)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        host = load("agent", timeout_s=120)
        episodes = [made_episode(seed=i, is_chat=True) for i in range(256)]
        running = {host.begin(episode): episode for episode in episodes}
        while running:
            for number, reply in host.replies(1.0):
                if isinstance(reply, Generate):
                    host.send(number, sampled_turn(running[number]))
                else:
                    assert reply == Ended({}), reply
                    assert running.pop(number).rewards[0] == {"reward": 1.0}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [len(episode.turns) for episode in episodes] == [1, 1, 1, 2] * 64


def in_a_loop(coroutine):
    """Run a coroutine to its end, which must come within a minute."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def echo(method, path, body):
    if body == b"refuse":
        raise HttpError(HTTPStatus.BAD_REQUEST, "no")
    return Answer.of_json([method, path, len(body)])


def at_route(conversation):
    """Run `conversation(url)` with a URL that echoes."""

    async def run():
        await conversation(await LoopbackServer(echo).start())

    in_a_loop(run())


async def connect(url, sent=b""):
    """A connection on which this was sent."""
    host, port = url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


def head(url, path="/x", size=0, *more, method="POST"):
    target = "/" + url.split("/", 3)[3] + path
    return "\r\n".join((f"{method} {target} HTTP/1.1", f"Content-Length: {size}", *more, "", "")).encode()


async def read_answer(reader):
    """The status and the JSON of an answer."""
    text = (await reader.readuntil(b"\r\n\r\n")).decode()
    size = int(re.search(r"Content-Length: (\d+)", text)[1])
    return int(text.split()[1]), json.loads(await reader.readexactly(size))


async def ask(url, sent):
    """The status and JSON that come for these bytes."""
    reader, writer = await connect(url, sent)
    try:
        return await read_answer(reader)
    finally:
        writer.close()


async def post(url, path="/chat/completions", method="POST", **fields):
    body = json.dumps(fields).encode()
    return await ask(url, head(url, path, len(body), method=method) + body)


def test_a_connection_is_for_one_request_and_its_answer_says_so():
    """The next one on it is not read. A client may ask whether to send its body, which it then sends."""

    async def conversation(url):
        reader, writer = await connect(url, head(url, "/a?b=c", 3) + b"abc" + head(url, "/x", 6) + b"refuse")
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"Connection: close" in answer
        size = int(re.search(rb"Content-Length: (\d+)", answer)[1])
        assert json.loads(await reader.readexactly(size)) == ["POST", "v1/a", 3]
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        error = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
        assert await ask(url, head(url, "/x", 6) + b"refuse") == (400, {"error": error})
        reader, writer = await connect(url, head(url, "/x", 3, "Expect: 100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert await read_answer(reader) == (200, ["POST", "v1/x", 3])

    at_route(conversation)


HUGE = 100_000_000
# Requests to the path URL, and the answers.
UNREADABLE = {
    "nonsense\r\n\r\n": (400, "this is no HTTP/1.1"),
    "GET URL HTTP/2.0\r\n\r\n": (400, "this is no HTTP/1.1"),
    "GET URL HTTP/1.1\r\nContent-Length 0\r\n\r\n": (400, "this is no HTTP/1.1"),
    "GET / HTTP/1.1\r\n\r\n": (404, "no episode has this URL: it ended, or never existed"),
    "GET URLx HTTP/1.1\r\n\r\n": (404, "no episode has this URL"),
    "POST " + "x" * 10_000_000: (431, "head has more than 32768 bytes"),
    "POST URL HTTP/1.1\r\n" + "a: b\r\n" * 10_000 + "\r\n": (431, "head has more than 32768 bytes"),
    "POST URL HTTP/1.1\r\nContent-Length: -1\r\n\r\n": (400, "Content-Length: '-1': expected a number"),
    "POST URL HTTP/1.1\r\nContent-Length: 3\r\ncontent-length: 4\r\n\r\n": (400, "'3, 4': expected a number"),
    f"POST URL HTTP/1.1\r\nContent-Length: {'9' * 9999}\r\n\r\n": (413, "bytes; at most"),
    f"POST URL HTTP/1.1\r\nContent-Length: {HUGE}\r\n\r\n{'x' * HUGE}": (413, "has 100000000 bytes; at most"),
    "POST URL HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n": (411, "send it with Content-Length"),
}


@pytest.mark.parametrize("sent", UNREADABLE, ids=range(len(UNREADABLE)))
def test_row_60_a_request_that_cannot_be_read_is_refused_and_its_connection_closed(sent):
    async def conversation(url):
        path = "/" + url.split("/")[3]
        reader, _ = await connect(url, sent.replace("URL", path).encode())
        found, answer = await read_answer(reader)
        status, said = UNREADABLE[sent]
        assert found == status
        assert said in answer["error"]["message"]
        assert await reader.read() == b""
        assert (await ask(url, head(url)))[0] == 200

    at_route(conversation)


@pytest.mark.parametrize("is_body", [slow(True), False])
def test_row_60_a_client_that_sends_a_letter_at_a_time_is_left_alone(monkeypatch, is_body):
    monkeypatch.setattr(loopback, "REQUEST_S", 0.3)

    async def conversation(url):
        begin = time.monotonic()
        reader, writer = await connect(url)
        for letter in head(url, size=100) if is_body else b"POST /":
            writer.write(bytes([letter]))
        answer = await reader.read()
        assert 0.2 < time.monotonic() - begin < 5 * SLACK
        assert (b"408 Request Timeout" in answer) == is_body
        await settled(0)

    at_route(conversation)


async def settled(count):
    """Wait until this process has this many connections."""
    await until(lambda: len(loopback._connections) == count)


async def until(is_true):
    async with asyncio.timeout(5 * SLACK):
        while not is_true():
            await asyncio.sleep(0.01)


def test_row_60_connections_without_a_token_are_dropped_first_and_those_with_requests_never(monkeypatch):
    """Hundreds that say nothing keep nobody out. Where all places have requests, one more is refused."""
    monkeypatch.setattr(loopback, "MAX_CONNECTIONS", 5)
    may_go_on, begun = asyncio.Event(), []

    async def slow(method, path, body):
        begun.append(path)
        await may_go_on.wait()
        return Answer.of_json("late")

    async def conversation(url):
        silent = [await connect(url) for _ in range(300)]
        await until(lambda: sum(reader.at_eof() for reader, _ in silent) == 295)
        assert (await ask(url, head(url)))[0] == 200
        late = await LoopbackServer(slow).start()
        asking = [await connect(late, head(late)) for _ in range(5)]
        await until(lambda: len(begun) == 5)
        status, answer = await ask(url, head(url))
        assert (status, answer["error"]["message"]) == (503, "more than 5 connections are open")
        may_go_on.set()
        for reader, writer in asking:
            assert (await read_answer(reader))[1] == "late"
            writer.close()
        await settled(0)

    at_route(conversation)


def test_a_server_that_is_closed_answers_no_request_and_others_stay():
    async def conversation(url):
        server = LoopbackServer(echo)
        own = await server.start()
        assert (await ask(own, head(own)))[0] == 200
        assert (await ask(own, head(url)))[0] == 404
        reader, writer = await connect(own, head(own, size=3))
        await settled(1)
        server.close()
        writer.write(b"abc")
        assert (await read_answer(reader))[0] == 410
        with pytest.raises(ConnectionError):
            await connect(own)
        assert (await ask(url, head(url)))[0] == 200

    at_route(conversation)


def test_row_60_a_client_that_never_reads_its_answer_is_counted_and_closed(monkeypatch):
    monkeypatch.setattr(loopback, "REQUEST_S", 0.3)

    has_come = asyncio.Event()

    async def large(method, path, body):
        has_come.set()
        return Answer(b"x" * HUGE)

    async def conversation(url):
        url = await LoopbackServer(large).start()
        reader, writer = await connect(url, head(url))
        writer.transport.pause_reading()
        await has_come.wait()
        assert len(loopback._connections) == 1
        await settled(0)
        writer.transport.resume_reading()
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < HUGE

    at_route(conversation)


HI = {"role": "user", "content": "hi"}


def made_episode(*, seed=0, **options):
    return Episode(Row("hi", {}, "f:1"), seed, 50, tools=[TOOL], prompt_ids=[5, 6], **options)


# By path the request, and the refusal.
REFUSED = {
    "v1/embeddings": {"{}": "there is no /v1/embeddings; there are /v1/chat/completions, /v1/completions"},
    "v1/completions": {
        "{": "the request is no JSON",
        "[" * 100_000: "the request is no JSON",
        '{"prompt": "hi"}': "prompt: expected token ids",
        '{"prompt": ["hi"]}': "prompt: expected token ids",
        '{"prompt": []}': "prompt: expected token ids",
        '{"prompt": [true]}': "prompt: expected token ids",
        '{"prompt": [-1]}': "prompt: expected token ids",
        '{"prompt": [1], "stream": true}': "stream: only chat completions",
        '{"prompt": [1], "top_k": 257}': "top_k 257: must be a number from 0 to 256",
        '{"prompt": [1], "top_k": 5.0}': "top_k 5.0: must be a number",
        '{"prompt": [1], "top_k": true}': "top_k True: must be a number",
        '{"prompt": [1], "features": 3}': "'features': not known here",
    },
    "v1/chat/completions": {
        "[]": "is not a JSON object",
        "{}": "messages: expected a list of one or more",
        '{"messages": "hi"}': "messages: expected a list",
        '{"messages": []}': "messages: expected a list",
        '{"messages": ["hi"]}': "messages[0]: expected an object",
        '{"messages": [{"role": "user"}, {"content": "a"}]}': "messages[1]: has no role",
        '{"messages": [{"role": 1}]}': "messages[0]: role: expected text",
        '{"messages": [{"role": "user", "content": 7}]}': "messages[0]: content: expected text",
        r'{"messages": [{"role": "user", "content": "\ud800"}]}': "messages: half a surrogate pair",
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "content: only text is poss",
        '{"messages": [{"role": "user", "tool_calls": 3}]}': "tool_calls: expected calls",
        '{"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}': "expected calls",
        r'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments":'
        r' "{\"a\": [\"\\ud800\"]}"}}]}]}': "messages[0]: tool_calls: half a surrogate",
        '{"messages": [{"role": "user", "mood": 3}]}': "messages[0]: 'mood': not known here",
        '{"n": 2}': "n: only 1 is possible here; leave it out",
        '{"n": true}': "n: only 1 is possible here",
        '{"top_p": 0.9}': "top_p 0.9: needs top_k, which bounds",
        '{"top_p": 0, "top_k": 5}': "top_p 0: must be greater than 0",
        '{"top_p": NaN, "top_k": 5}': "top_p nan: must be a number from 0 to 1",
        '{"min_p": "0.1", "top_k": 5}': "min_p '0.1': must be a number from 0 to 1",
        '{"min_p": 0.1, "top_k": -1}': "min_p 0.1: needs top_k",
        '{"logit_bias": {"3": 4}}': "logit_bias: only {} is possible here",
        '{"response_format": {"type": "json_object"}}': "response_format: only {'type': 'text'} is possible",
        '{"tool_choice": "required"}': "tool_choice: only 'auto' is possible here",
        '{"top_logprobs": 5}': "top_logprobs: only 0 is possible here",
        '{"temperature": 0.7}': "temperature: this run samples with 1; leave it out",
        '{"temperature": "1"}': "temperature: this run samples with 1",
        f'{{"temperature": 1{"0" * 400}}}': "temperature: this run samples with 1",
        '{"max_tokens": 0}': "max_tokens: expected a number from 1 on",
        '{"max_tokens": 3, "max_completion_tokens": 2.5}': "max_tokens: expected a number",
        '{"stop": 3}': "stop: expected text or a list of texts",
        '{"stop": ["a", 3]}': "stop: expected text or a list of texts",
        '{"stop": ["a", ""]}': "stop: '' and U+FFFD end no text",
        '{"messages": [{"role": "user"}], "stream": 1}': "stream: expected true or false",
        '{"tools": 3}': "tools: 3: expected a list",
        '{"tools": [{"type": "function"}]}': "tools: {'type': 'function'}: expected a function, or a schema",
        json.dumps({"tools": [TOOL, TOOL]}): "tools: two have the name 'add'; rename one",
        '{"beams": 3, "heat": 3}': "'beams, heat': not known here; leave it out",
    },
}


@pytest.mark.parametrize(
    ("path", "body", "said"), [(path, *row) for path, rows in REFUSED.items() for row in rows.items()]
)
def test_row_60_a_request_for_what_the_run_does_not_do_is_refused_by_its_field(path, body, said):
    with pytest.raises(HttpError, match=re.escape(said)) as raised:
        read_request(path, body.encode(), made_episode(is_chat=True))
    assert raised.value.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)


def test_messages_are_refused_where_prompts_are_text():
    with pytest.raises(HttpError, match="no template is applied; see --chat"):
        read_request("v1/chat/completions", b'{"messages": [1]}', made_episode())


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"tool_choice": "none"}, 1),
        ({"tools": []}, 1),
        ({"tools": [TOOL]}, 1),
        ({"n": 1.0, "temperature": 1, "top_p": 1, "stop": None, "model": "x", "seed": 3, "stream": False}, 1),
        ({"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.1}, 0),  # a greedy evaluation takes any
    ],
)
def test_fields_that_change_nothing_are_taken(fields, temperature):
    body = json.dumps({"messages": [HI], **fields}).encode()
    episode = made_episode(is_chat=True, temperature=temperature)
    assert read_request("v1/chat/completions", body, episode).prompt == [HI]


def test_a_request_asks_for_a_part_of_its_turns_truncation_and_the_run_gives_the_rest():
    """vLLM's -1 stands for all tokens."""
    episode = made_episode(is_chat=True, truncation=(20, 0.95, 0.0))
    for fields, asked in (
        ({"top_p": None}, {}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_p": 1, "top_k": -1}, {"top_p": 1, "top_k": 0}),
    ):
        body = json.dumps({"messages": [HI], **fields}).encode()
        assert read_request("v1/chat/completions", body, episode).truncation == asked
    with pytest.raises(HttpError, match=r"top_p 0\.95: needs top_k") as raised:
        read_request("v1/completions", b'{"prompt": [1], "top_k": -1}', episode)
    assert raised.value.status == HTTPStatus.BAD_REQUEST


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "é", "b": [1, 2]}}}
ARGUMENTS = '{"a": "é", "b": [1, 2]}'


def called(arguments):
    """The calls of an episode's first turn, as programs get and send them."""
    return [{"id": "c00001000", "type": "function", "function": {"name": "add", "arguments": arguments}}]


def message_in(answer):
    return answer["choices"][0]["message"]


def sampled_turn(branch, text="yes", finish_reason="stop", **said):
    """A turn of one token per letter, with this message; None for one that nobody can read."""
    message = {"role": "assistant", "content": text, **said}
    readable = {"error": "no response template"} if "message" in said else {"said": message}
    ids = [ord(letter) for letter in text]
    branch.prompt_ids = branch.prompt if type(branch.prompt[0]) is int else [5, 6]
    branch.max_tokens = 50
    facts = {"branch": branch.number, "finish_reason": finish_reason, "logprobs": [-0.5] * len(ids)}
    return told_turn(len(branch.tokens), ids, text, **facts, **readable)


def drive(program, *turns, sample=lambda: asyncio.sleep(0)):
    """A program's requests when it gets these turns; closes it when it asks for more. `program(post, episode)`.

    sample: awaited while a turn is sampled.
    """

    async def with_post(url, episode):
        return await program(functools.partial(post, url), episode)

    async def run():
        episode = made_episode(is_chat=True)
        rollout = serve(with_post)(episode)
        asked = []
        with contextlib.suppress(StopAsyncIteration):
            asked.append(await rollout.asend(None))
            for fields in turns:
                await sample()
                branch = episode.branches[asked[-1].branch]
                branch.turns.append(sampled_turn(branch, **fields))
                asked.append(await rollout.asend(branch.turns[-1]))
        await sample()
        await rollout.aclose()
        return asked

    return in_a_loop(run())


def test_calls_of_tools_have_openais_form_and_their_results_continue_the_episode():
    result = {"role": "tool", "content": "3", "tool_call_id": "c00001000"}

    async def program(post, _):
        status, answer = await post(messages=[HI], tools=[TOOL], return_token_ids=True, logprobs=True)
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"]) == (200, "tool_calls")
        said = {"role": "assistant", "content": "so", "tool_calls": called(ARGUMENTS)}
        assert choice["message"] == {**said, "reasoning_content": "hm"}
        assert choice["token_ids"] == [115, 111]
        assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
        entry = {"token": "token_id:115", "logprob": -0.5, "bytes": None, "top_logprobs": []}
        assert choice["logprobs"]["content"][0] == entry
        # As programs send it back: without the reasoning, with other spaces, with fields of None.
        said["tool_calls"] = called('{"b":[1,2],"a":"\\u00e9"}')
        await post(messages=[HI, {**said, "refusal": None}, {**result, "name": None}])
        history = {"role": "assistant", "content": None, "tool_calls": called('{"a": 1}')}
        await post(messages=[HI, history, HI])

    _, second, branch = drive(
        program, {"text": "so", "tool_calls": [CALL], "reasoning_content": "hm"}, {}, {}
    )
    assert second.after == [result]
    # Templates get arguments as structures, and text.
    assert branch.prompt[1]["content"] == ""
    assert branch.prompt[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("asked", "turn", "said", "finish_reason"),
    [
        # The stop string and the rest of its token are left out.
        ({"stop": ["Z", "Obs"]}, {"text": "I see. Obs:"}, {"content": "I see. "}, "stop"),
        ({"top_k": 9, "top_p": 0.7, "min_p": 0.05}, {}, {"content": "yes"}, "stop"),
        # A program that wants no calls gets the text of a call.
        ({"tool_choice": "none"}, {"text": "<c>", "tool_calls": [CALL]}, {"content": "<c>"}, "stop"),
        # Nobody can read it.
        ({}, {"message": None, "finish_reason": "length"}, {"content": "yes"}, "length"),
        # Calls alone.
        (
            {},
            {"content": None, "tool_calls": [CALL]},
            {"content": "", "tool_calls": called(ARGUMENTS)},
            "tool_calls",
        ),
    ],
)
def test_an_answer_is_continued_as_a_program_sends_it_back(asked, turn, said, finish_reason):
    """An answer without text may come back as None."""

    async def program(post, _):
        _, answer = await post(messages=[HI], tools=[TOOL], **asked)
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", **said}
        assert choice["finish_reason"] == finish_reason
        back = {**choice["message"], "content": said["content"] or None}
        await post(messages=[HI, back, HI], tools=[TOOL])

    first, second = drive(program, turn, {})
    assert first.stop == tuple(asked.get("stop", ()))
    assert first.truncation == {name: asked[name] for name in asked if name in Truncation._fields}
    assert second.truncation == {}
    assert (first.branch, second.branch, second.after) == (0, 0, [HI])


def test_tools_belong_to_a_conversation_and_others_begin_a_branch():
    other = {**TOOL, "function": {**TOOL["function"], "name": "sub"}}

    async def program(post, _):
        said = [HI]
        for tools in ([other], [other], [TOOL], None, [other]):
            _, answer = await post(messages=said, tools=tools)
            said += [message_in(answer), HI]

    asked = drive(program, *[{}] * 5)
    assert [generate.branch for generate in asked] == [1, 1, 2, 2, 1]
    assert [generate.tools for generate in asked] == [[other], [other], [TOOL], [TOOL], [other]]
    assert [len(generate.prompt) for generate in asked] == [1, 1, 5, 5, 1]


def test_an_answer_comes_as_a_stream_of_events_with_calls_numbered():
    async def program(post, _):
        with pytest.raises(json.JSONDecodeError) as raised:
            await post(messages=[HI], stream=True, stream_options={"include_usage": True})
        first, second, *_ = raised.value.doc.split("\n\n")
        (choice,) = json.loads(first.removeprefix("data: "))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["delta"]["tool_calls"][0]["index"] == 0
        second = json.loads(second.removeprefix("data: "))
        assert (second["choices"], second["usage"]["completion_tokens"]) == ([], 3)

    drive(program, {"tool_calls": [CALL]})


def test_requests_that_come_together_are_answered_in_the_order_in_which_they_came():
    async def program(post, _):
        first = asyncio.create_task(post(messages=[HI], max_tokens=3))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(post(messages=[HI], max_tokens=4))
        _, models = await post(path="/models", method="GET")
        assert models["data"][0]["max_model_len"] == 52
        assert [message_in((await task)[1])["content"] for task in (first, second)] == ["one", "two"]

    asked = drive(program, {"text": "one"}, {"text": "two"})
    assert [generate.max_tokens for generate in asked] == [3, 4]


def test_what_a_client_hung_up_on_is_not_sampled_and_if_it_was_is_dropped(monkeypatch):
    """While a turn is sampled its client hangs up, as does one that waits; then the same is asked once more.

    Fault 60.
    """

    async def program(post, episode):
        hung_up = []
        for number in (1, 2):
            hung_up.append(asyncio.create_task(post(messages=[HI], max_tokens=number)))
            await until(lambda: sum(len(endpoint._pending) for endpoint in endpoints) == len(hung_up))
        for task in hung_up:
            task.cancel()
        await until(lambda: not endpoints[0]._pending)
        is_gone.set()
        _, answer = await post(messages=[HI], max_tokens=3)
        assert [branch.drops_last for branch in episode.branches.values()] == [True, False]
        await post(messages=[HI, message_in(answer), HI], max_tokens=4)

    endpoints, is_gone = [], asyncio.Event()
    run = Endpoint.__aenter__
    monkeypatch.setattr(Endpoint, "__aenter__", lambda endpoint: endpoints.append(endpoint) or run(endpoint))
    asked = drive(program, {}, {}, sample=is_gone.wait)
    assert [(generate.branch, generate.max_tokens) for generate in asked] == [(0, 1), (1, 3), (1, 4)]


def test_what_is_refused_is_no_turn_and_the_episode_goes_on():
    async def program(post, episode):
        assert (await post(messages=[HI], n=2))[0] == 400
        assert (await post(path="/x"))[0] == 404
        assert (await post(method="GET"))[0] == 405
        status, answer = await post(messages=[HI])
        message = message_in(answer)
        assert status == 200
        status, answer = await post(messages=[HI, message])
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        episode.max_tokens = 3
        status, answer = await post(messages=[HI, message, HI])
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    assert len(drive(program, {})) == 1


def test_row_60_a_flood_of_requests_is_refused_and_those_that_wait_end_with_the_episode():
    statuses = []

    async def program(post, _):
        async def ask_once():
            statuses.append((await post(messages=[HI]))[0])

        await asyncio.gather(*(ask_once() for _ in range(100)))

    drive(program, sample=lambda: until(lambda: len(statuses) == 36))
    assert statuses == [429] * 36


def test_row_60_an_episode_that_is_closed_ends_its_program_and_what_that_started(tmp_path):
    """A coroutine, even one that does not let itself be cancelled; a thread that asks; a process."""
    seen = []
    pid = tmp_path / "pid"

    async def stubborn(url, episode):
        try:
            await post(url, messages=[HI])
        finally:
            seen.append("cancelled")
            await asyncio.sleep(1000)

    def threaded(url, episode):
        seen.append(asyncio.run(post(url, messages=[HI]))[0])
        try:
            asyncio.run(post(url, messages=[HI]))
        except ConnectionError:
            seen.append("refused")

    async def starting(url, episode):
        asking = asyncio.create_task(post(url, messages=[HI]))
        try:
            await run_program(url, "sh", "-c", f"echo $$ > {pid}; exec sleep 1000")
        finally:
            await asking

    async def run():
        for program in (stubborn, threaded, starting):
            rollout = serve(program)(made_episode(is_chat=True))
            await rollout.asend(None)
            while program is starting and not pid.exists():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            await rollout.aclose()
        await asyncio.sleep(0.1)

    in_a_loop(run())
    assert seen == ["cancelled", 410, "refused"]
    assert not is_alive(int(pid.read_text()))


def test_a_command_has_the_url_and_a_text_and_gives_what_it_prints():
    run = functools.partial(run_program, "http://a", "sh", "-c")

    async def conversation():
        assert await run("cat; echo $OPENAI_BASE_URL", text="hi ") == "hi http://a\n"
        printed = await run("yes | head -c 100000000; echo end", text="x" * 10_000_000)
        assert len(printed) == 1 << 20
        assert printed.endswith("y\nend\n")
        with pytest.raises(RuntimeError, match="sh ended with exit code 3\noh"):
            await run("echo oh >&2; exit 3")
        with pytest.raises(FileNotFoundError):
            await run_program("http://a", "no-such-program")

    in_a_loop(conversation())


HOSTILE = """
@serve
async def silent(url, episode):
    await post_async(url, {"messages": first_messages(episode), "max_tokens": 3})
    await asyncio.sleep(1000)

@serve
def silent_thread(url, episode):
    post(url, {"messages": first_messages(episode), "max_tokens": 3})
    time.sleep(1000)

@serve
def raises(url, episode):
    post(url, {"messages": first_messages(episode), "max_tokens": 3})
    raise KeyError("no such tool")

@serve
def exits(url, episode):
    post(url, {"messages": first_messages(episode), "max_tokens": 3})
    sys.exit(3)

@serve
async def interrupts(url, episode):
    await post_async(url, {"messages": first_messages(episode), "max_tokens": 3})
    raise KeyboardInterrupt

@serve
async def stops(url, episode):
    await post_async(url, {"messages": first_messages(episode), "max_tokens": 3})
    raise StopIteration

@serve
def stops_in_thread(url, episode):
    post(url, {"messages": first_messages(episode), "max_tokens": 3})
    raise StopIteration
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("silent", "took more than 0.7 s for a reply; see --call-timeout"),
        ("silent_thread", "took more than 0.7 s for a reply; see --call-timeout"),
        ("raises", r"raised\n(.|\n)*mine.py(.|\n)*KeyError: 'no such tool'"),
        ("exits", r"raised\n(.|\n)*the program raised SystemExit\(3\)"),
        ("interrupts", r"raised\n(.|\n)*the program raised KeyboardInterrupt"),
        ("stops", r"raised\n(.|\n)*StopIteration"),
        ("stops_in_thread", r"raised\n(.|\n)*StopIteration"),
    ],
)
def test_row_60_a_program_that_fails_is_the_runs_clear_error_and_nothing_is_left(load, tmp_path, name, said):
    (tmp_path / "mine.py").write_text(AT_A_URL + HOSTILE)
    workers = load(name, timeout_s=0.7 if "silent" in name else 60.0)
    with pytest.raises(RolloutError, match=rf"rollout {name} for the row at f:\d+, after turn \d+: {said}"):
        rollouts_of(workers, num_groups=2, group_size=2)
    workers.pool.stop()
    assert not any(is_alive(worker.pid) for worker in workers.pool.workers)


def test_what_continues_nothing_begins_a_branch_which_is_continued_in_its_turn():
    """A system's message of the program's own, a history without its thoughts, the same question once more."""
    system = {"role": "system", "content": "be brief"}

    async def program(post, _):
        own = [system, HI]
        for _ in range(2):
            _, answer = await post(messages=own)
            own += [message_in(answer), HI]
        assert answer["usage"]["prompt_tokens"] == 5
        await post(messages=[HI])
        await post(messages=[HI])
        await post(messages=[system, HI, {"role": "assistant", "content": "otherwise"}, HI])
        await post(messages=own)
        for ids in ([5, 6, *b"yesyesyes"], [9, 9], [9, 9, *b"yes", 7]):
            await post(path="/completions", prompt=ids)

    asked = drive(program, *[{}] * 9)
    assert [generate.branch for generate in asked] == [1, 1, 0, 2, 3, 1, 1, 4, 4]
    assert asked[0].prompt == [system, HI]
    assert [generate.after for generate in asked[:4]] == ["", [HI], "", ""]
    assert (asked[7].prompt, asked[8].after) == ([9, 9], [7])


def test_the_documented_agent_is_rewarded_for_its_last_answer():
    pytest.importorskip("openai")
    example = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "examples" / "openai_agent.py"))
    given = []

    async def run():
        episode = made_episode(is_chat=True)
        episode.row.columns["answer"] = 1200.0
        episode.reward = lambda value, name, branch: given.append((name, value))
        rollout = example["agent"](episode)
        asked = await rollout.asend(None)
        for text in ("so 3", "so 1,200."):
            episode.turns.append(sampled_turn(episode, text))
            with contextlib.suppress(StopAsyncIteration):
                asked = await rollout.asend(episode.turns[-1])
        assert asked.after == [{"role": "user", "content": "Check each step, then answer again."}]

    in_a_loop(run())
    assert given == [("reward", 1.0)]
