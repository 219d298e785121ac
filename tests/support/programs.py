"""Users' files: agents that own their loop, and flags that name no function."""

# Values of a flag that names a user's function, of which none names one, and what is said.
NO_SPEC = "expected file.py:function or module:function"
UNNAMED = {
    **dict.fromkeys(("mine.py", "mine.py:", "mine:", ":score", "folder/mine.txt:f"), NO_SPEC),
    "none.py:f": "there is no file none.py",
    "no_such_package.rewards:f": "there is no module 'no_such_package' here; is it installed",
    "minirl.data.gsm8k:f": "minirl.data.gsm8k has no function f",
}

# Each makes the requests of `in_turns`, which asks here.
AT_A_URL = """
import asyncio, json, random, time, urllib.request
import aiohttp
from minirl.extras.agents.endpoint import serve

def post(url, fields):
    with urllib.request.urlopen(f"{url}/chat/completions", json.dumps(fields).encode()) as answer:
        return json.load(answer)

async def post_async(url, fields):
    async with aiohttp.ClientSession() as client, client.post(f"{url}/chat/completions", json=fields) as answer:
        return await answer.json()

def first_messages(episode):
    return [{"role": "user", "content": episode.row.prompt}]

def chat(messages, answer):
    message = answer["choices"][0]["message"]
    return [*messages, message, {"role": "user", "content": message["content"][:3] + " go on"}]

@serve
def in_thread(url, episode):
    messages = first_messages(episode)
    for number in range(3):
        answer = post(url, {"model": "m", "messages": messages, "max_tokens": 5 + number, "stop": "e"})
        messages = chat(messages, answer)

@serve
async def in_loop(url, episode):
    messages = first_messages(episode)
    for number in range(3):
        fields = {"messages": messages, "max_completion_tokens": 5 + number, "stop": ["e"], "temperature": 0.3}
        answer = await post_async(url, fields)
        await asyncio.sleep(random.SystemRandom().random() / 50)
        messages = chat(messages, answer)
"""


async def in_turns(episode):
    """The requests of the agents above."""
    turn = await episode.generate(max_tokens=5, stop="e")
    for number in (1, 2):
        said = turn.text.partition("e")[0]
        reply = {"role": "user", "content": said[:3] + " go on"}
        turn = await episode.generate(after=reply, max_tokens=5 + number, stop="e")
