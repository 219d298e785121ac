"""Play a TextArena game: `--rollout docs/examples/textarena_game.py:play --reward episode --chat`.

Rows: {"prompt": "You play a game.", "game": "GuessTheNumber-v0"}
"""

import textarena


async def play(episode):
    """Play a single-player game. Observations repeat the whole transcript; the model gets only the new part."""
    game = textarena.make(episode.row.columns["game"])
    game.reset(num_players=1, seed=episode.seed % 2**31)
    episode.reward(0.0)  # in case the episode ends before the game
    _, told = game.get_observation()
    branch = episode.branch([*episode.messages, {"role": "user", "content": told}])
    turn = await branch.generate()
    while not game.step(turn.text)[0]:
        _, observation = game.get_observation()
        turn = await branch.generate(after={"role": "user", "content": observation.removeprefix(told)})
        told = observation
    rewards, _ = game.close()
    episode.reward(rewards[0])
