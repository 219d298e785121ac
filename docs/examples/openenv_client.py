"""Play on an OpenEnv server. Rows are chats with the instructions; the first observation is appended as a message.

OPENENV_URL=http://localhost:8000 torchrun train_grpo.py --chat --data rows.jsonl --reward episode \
    --rollout docs/examples/openenv_client.py:play --max-turns 20
"""

import json
import os

from openenv.core.generic_client import GenericEnvClient


async def play(episode):
    """Play one session. The server may run any environment whose action has a single text field."""
    async with GenericEnvClient(base_url=os.environ["OPENENV_URL"]) as client:
        result = await client.reset(seed=episode.seed % 2**31)
        branch = episode.branch([*episode.messages, message(result.observation)])
        after = None
        while not result.done:
            turn = await branch.generate(after=after)
            result = await client.step({os.environ.get("OPENENV_FIELD", "message"): turn.text})
            episode.reward(result.reward or 0.0)
            after = message(result.observation)


def message(observation):
    """Return the user message for an observation, a dict."""
    return {"role": "user", "content": json.dumps(observation)}
