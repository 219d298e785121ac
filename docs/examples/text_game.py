"""Play a text game with gymnasium's interface: `--rollout docs/examples/text_game.py:play --reward episode --chat`.

Rows: {"prompt": "You play a game."}
"""

import random


class HigherOrLower:
    """Guess a number from 1 to 20. `reset` and `step` are gymnasium's; replace the class with `gymnasium.make(...)`."""

    def reset(self, seed):
        self.target, self.num_left = random.Random(seed).randint(1, 20), 5
        return "Guess a number from 1 to 20; say only the number.", {}

    def step(self, action):
        self.num_left -= 1
        guess = int(action) if action.strip().isdecimal() else 0
        answer = "right" if guess == self.target else "higher" if guess < self.target else "lower"
        return answer, float(answer == "right"), answer == "right", self.num_left == 0, {}


async def play(episode):
    """Play one game. The first observation follows the row's messages; each later observation is a user message."""
    game = HigherOrLower()
    observation, _ = game.reset(seed=episode.seed % 2**31)
    branch = episode.branch([*episode.messages, {"role": "user", "content": observation}])
    after, ended = None, False
    while not ended:
        turn = await branch.generate(after=after)
        observation, reward, terminated, truncated, _ = game.step(turn.text)
        episode.reward(reward)
        after, ended = {"role": "user", "content": observation}, terminated or truncated
