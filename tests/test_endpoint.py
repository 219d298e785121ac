"""Programs that own their loop: what they sample at a URL is their episode, whatever else they send there."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import time

import pytest

from minirl.collect import loopback
from minirl.collect.endpoint import Endpoint, serve
from minirl.collect.episode import Episode, Turn, TurnReader
from minirl.collect.loopback import Answer, HttpError, of_this_loop
from minirl.collect.openai_format import read_request
from minirl.collect.rollout_workers import load_rollout
from minirl.data.task import Row
from minirl.errors import RolloutError
from support.collecting import chat_prompts, collected, make_collector
from support.processes import is_alive

SOURCE = """
import asyncio, json, os, pathlib, random, signal, sys, threading, time, urllib.error, urllib.request
from minirl.collect.endpoint import run_program, serve

FOLDER = pathlib.Path(__file__).parent

def post(url, fields, path="chat/completions"):
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", body)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)

def first_messages(episode):
    return [{"role": "user", "content": episode.row.prompt}]

def user(text):
    return {"role": "user", "content": text}

def chat(messages, answer):
    message = answer["choices"][0]["message"]
    return [*messages, message, user(message["content"][:3] + " go on")]

@serve
def in_thread(url, episode):
    messages = first_messages(episode)
    for number in range(3):
        answer = post(url, {"model": "m", "messages": messages, "max_tokens": 5 + number, "stop": "e"})
        messages = chat(messages, answer)

async def post_async(url, fields):
    host, port = url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(fields).encode()
    path = url.split(port, 1)[1] + "/chat/completions"
    writer.write(f"POST {path} HTTP/1.0\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\\r\\n\\r\\n")[2])

@serve
async def in_loop(url, episode):
    messages = first_messages(episode)
    for number in range(3):
        fields = {"model": "m", "messages": messages, "max_completion_tokens": 5 + number, "stop": ["e"]}
        answer = await post_async(url, fields)
        await asyncio.sleep(random.SystemRandom().random() / 50)
        messages = chat(messages, answer)

@serve
def as_events(url, episode):
    messages = first_messages(episode)
    for number in range(3):
        fields = {"messages": messages, "max_tokens": 5 + number, "stop": "e", "stream": True}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(fields).encode())
        with urllib.request.urlopen(request) as answer:
            events = [line[6:] for line in answer.read().decode().splitlines() if line]
        assert events.pop() == "[DONE]"
        (choice,) = json.loads(events[0])["choices"]
        messages = chat(messages, {"choices": [{"message": choice["delta"]}]})

def once(name):
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

@serve
def dies_once(url, episode):
    messages = first_messages(episode)
    for number in range(3):
        if number == 2 and episode.row.place == "f:26" and once("death"):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = post(url, {"messages": messages, "max_tokens": 5 + number, "stop": "e"})
        messages = chat(messages, answer)

@serve
def by_generate(url, episode):
    ids, root = episode.prompt_ids, url.removesuffix("/v1")
    for number in range(3):
        params = {"max_tokens": 4, "temperature": 1, "logprobs": 1, "stop_token_ids": [1]}
        fields = {"token_ids": ids, "sampling_params": params}
        (choice,) = post(root, fields, "inference/v1/generate")["choices"]
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert [entry["logprob"] for entry in entries] == episode.turns[-1].logprobs
        ids = [*ids, *choice["token_ids"], 7, 8 + number]

@serve
def by_completion(url, episode):
    ids = episode.prompt_ids
    for number in range(3):
        fields = {"prompt": ids, "max_tokens": 4, "return_token_ids": True, "logprobs": 1}
        answer = post(url, fields, "completions")
        (choice,) = answer["choices"]
        assert choice["logprobs"]["token_logprobs"] == episode.turns[-1].logprobs
        assert answer["usage"]["prompt_tokens"] == len(ids)
        ids = [*ids, *choice["token_ids"], 7, 8 + number]

@serve
def by_text(url, episode):
    prompt = episode.row.prompt
    for reply in ("ab", "cd", ""):
        (choice,) = post(url, {"prompt": prompt, "max_tokens": 4}, "completions")["choices"]
        prompt += choice["text"] + reply
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Functions of the file above in their workers, which are killed when the test is over."""
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.setattr("minirl.collect.rollout_workers.GRACE_S", 0.5)
    loaded = []

    def load_function(name, **options):
        loaded.append(load_rollout(f"{tmp_path}/mine.py:{name}", **{"timeout_s": 20.0, **options}))
        return loaded[-1]

    yield load_function
    for workers in loaded:
        workers.stop()


def rollouts_of(rollout, num_steps=1, num_groups=5, *, is_chat=True, **options):
    prompts = chat_prompts(120) if is_chat else None
    return collected(make_collector(prompts, rollout=rollout, **options), num_steps, num_groups)


def in_turns(episode):
    """What the programs above ask for."""
    turn = yield episode.generate(max_tokens=5, stop="e")
    for number in (1, 2):
        said = turn.text.partition("e")[0]
        reply = {"role": "user", "content": said[:3] + " go on"}
        turn = yield episode.generate(after=reply, max_tokens=5 + number, stop="e")


def of_ids(episode):
    yield episode.generate(max_tokens=4)
    yield episode.generate(after=[7, 8], max_tokens=4)
    yield episode.generate(after=[7, 9], max_tokens=4)


def of_text(episode):
    yield episode.generate(max_tokens=4)
    yield episode.generate(after="ab", max_tokens=4)
    yield episode.generate(after="cd", max_tokens=4)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", ["in_thread", "in_loop", "as_events"])
def test_a_program_at_a_url_makes_the_rollouts_of_a_function_that_asks_for_the_same(load, name, num_workers):
    assert rollouts_of(load(name, num_workers=num_workers), 2) == rollouts_of(in_turns, 2)


@pytest.mark.parametrize(("name", "is_chat"), [("by_generate", True), ("by_completion", False)])
def test_token_ids_are_continued_by_their_prefix_and_come_back_with_their_logprobs(load, name, is_chat):
    assert rollouts_of(load(name), is_chat=is_chat) == rollouts_of(of_ids, is_chat=is_chat)


def test_text_is_continued_by_its_prefix(load):
    assert rollouts_of(load("by_text"), is_chat=False) == rollouts_of(of_text, is_chat=False)


@pytest.mark.parametrize("name", ["in_loop", "in_thread"])
def test_what_is_in_flight_goes_on_from_a_checkpoint(load, name):
    """The program is run again, and gets the answers that it got."""
    options = {"decode_budget": 6, "max_staleness": 3}
    expected = rollouts_of(in_turns, 4, 2, **options)
    first = make_collector(chat_prompts(120), rollout=load(name), **options)
    before = collected(first, 2, 2)
    second = make_collector(chat_prompts(120), rollout=load(name, num_workers=2), **options)
    second.num_served = first.num_served
    second.restore(first.state(), first.records())
    after = []
    for step in (2, 3):
        groups = second.collect(2, weight_version=step)
        after.append([r.tokens.tolist() for r in groups.rewarded.rollouts])
    assert before == expected[:2]
    assert after == [[row[2] for row in step] for step in expected[2:]]


def test_a_program_whose_process_died_gets_the_answers_that_it_got(load):
    workers = load("dies_once", num_workers=2)
    pids = [worker.pid for worker in workers.workers]
    assert rollouts_of(workers, 2) == rollouts_of(in_turns, 2)
    assert sum(is_alive(pid) for pid in pids) == 1


OPENAI = """
import asyncio, openai
from minirl.collect.endpoint import run_program, serve

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


@pytest.mark.parametrize("name", ["client_async", "client_sync", "client_program"])
def test_an_agent_written_with_the_openai_package_trains_as_it_is(load, tmp_path, name):
    pytest.importorskip("openai")
    (tmp_path / "mine.py").write_text(OPENAI)
    rollout = load(name, timeout_s=60)
    assert rollouts_of(rollout, num_groups=3, group_size=2) == rollouts_of(
        in_turns, num_groups=3, group_size=2
    )
