"""Play a game of TextArena: `--rollout docs/examples/textarena_game.py:play --reward episode --chat`.

Rows: {"prompt": "You play a game.", "game": "GuessTheNumber-v0"}
"""

import textarena


def play(episode):
    """A game for one. Its observation has all that was said; what is new in it is told to the model."""
    game = textarena.make(episode.row.columns["game"])
    game.reset(num_players=1, seed=episode.seed % 2**31)
    episode.reward(0.0)  # where it ends before the game does
    before, told, ended = episode.messages, "", False
    while not ended:
        _, observation = game.get_observation()
        new = {"role": "user", "content": observation.removeprefix(told)}
        turn = yield episode.generate(after=[*before, new])
        before, told = [], observation
        ended, _ = game.step(turn.text)
    rewards, _ = game.close()
    episode.reward(rewards[0])
