"""Run a SkyRL-gym environment: `--rollout docs/examples/skyrl_env.py:interact --reward episode`.

Rows (SkyRL's format): {"prompt": [messages], "env_class": "gsm8k_multi_turn", "reward_spec": {...}, ...}
"""

import skyrl_gym


async def interact(episode):
    """Run a new environment for the episode and sum its step rewards."""
    columns = dict(episode.row.columns)
    env = skyrl_gym.make(columns["env_class"], env_config=columns.get("env_config"), extras=columns)
    try:
        messages, _ = env.init(episode.messages)
        branch, after, done = episode.branch(messages), None, False
        while not done:
            turn = await branch.generate(after=after)
            step = env.step(turn.text)
            episode.reward(step["reward"])
            after, done = step["observations"], step["done"]
    finally:
        env.close()
