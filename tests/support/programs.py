"""Programs that own their loop, as in a user's file."""

# Each of the first two makes the requests of `in_turns`.
AT_A_URL = """
import asyncio, json, random, sys, time, urllib.error, urllib.request
from minirl.agents.endpoint import run_program, serve

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
def by_completion(url, episode):
    ids = episode.prompt_ids
    for number in range(3):
        fields = {"prompt": ids, "max_tokens": 4, "return_token_ids": True, "logprobs": 1, "temperature": 1}
        answer = post(url, fields, "completions")
        (choice,) = answer["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert choice["logprobs"]["token_logprobs"] == episode.turns[-1].logprobs
        assert answer["usage"]["prompt_tokens"] == len(ids)
        ids = [*ids, *choice["token_ids"], 7, 8 + number]

@serve
async def two_at_a_time(url, episode):
    await in_loop.__wrapped__(url, episode)

two_at_a_time.max_episodes = 2
"""


async def in_turns(episode):
    """The requests of the programs above."""
    turn = await episode.generate(max_tokens=5, stop="e")
    for number in (1, 2):
        said = turn.text.partition("e")[0]
        reply = {"role": "user", "content": said[:3] + " go on"}
        turn = await episode.generate(after=reply, max_tokens=5 + number, stop="e")
