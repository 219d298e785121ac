"""Train an unmodified agent that uses the openai package: the agent answers, is asked to check, and answers again.

Run with `--task gsm8k --chat --rollout docs/examples/openai_agent.py:agent --reward episode`.
"""

import re

import openai

from minirl.extras.agents.endpoint import serve

# All episodes share one client: creating a client takes longer than its requests.
CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")


@serve
async def agent(url, episode):
    """Return 1 if the last number in the final reply equals the row's answer, else 0."""
    client = CLIENT.with_options(base_url=url)
    messages = [{"role": "user", "content": episode.row.prompt}]
    for _ in range(2):
        completion = await client.chat.completions.create(model="policy", messages=messages, max_tokens=200)
        message = completion.choices[0].message
        messages += [message, {"role": "user", "content": "Check each step, then answer again."}]
    numbers = re.findall(r"-?\d+(?:\.\d+)?", message.content.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == episode.row.columns["answer"])
