r"""Self-play: the model plays both sides of a game, each in its own branch, and each move gets a reward.

patch -o turn_rewards.py train_grpo.py docs/objectives/turn_rewards.diff
torchrun --standalone --nproc-per-node 2 turn_rewards.py --rollout docs/examples/self_play.py:play --reward episode \
    --max-new-tokens 24 --max-turns 12

The game is Nim: taking the last stick wins. A position is text such as `7=`; a move is one digit.
"""

MOVES = ("1", "2", "3")


async def play(episode):
    """Play one game. The row's prompt determines the number of sticks, 4 to 9, so a group's games start alike.

    An illegal move loses. The winner's moves get reward 1, the loser's -1, and the game as a whole 0.
    """
    sticks = 4 + sum(map(ord, str(episode.row.prompt))) % 6
    sides = []
    mover = -1
    has_ended = False
    while not has_ended:
        mover += 1
        position = f"{sticks}="
        if mover < 2:
            sides.append(episode.branch(position))
            after = None
        else:
            after = {"role": "user", "content": position} if episode.is_chat else position
        turn = await sides[mover % 2].generate(after=after, max_tokens=1)
        is_legal = turn.text in MOVES and int(turn.text) <= sticks
        sticks -= int(turn.text) if is_legal else 0
        has_ended = sticks == 0 or not is_legal
    for number, side in enumerate(sides):
        for turn in side.turns:
            turn.extra["reward"] = 1.0 if is_legal == (number == mover % 2) else -1.0
    return 0.0
