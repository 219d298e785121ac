"""Give the model a calculator: compute the text between <calc> and </calc> and append the result.

torchrun --standalone --nproc-per-node 2 train_grpo.py --task calculator \
    --rollout docs/examples/calculator.py:calculator --num-steps 100
"""

import re


async def calculator(episode):
    """Append the product after each call, as in <calc>12*34</calc>408=, until the model answers."""
    turn = await episode.generate(stop="</calc>")
    while call := re.search(r"<calc>(\d+)\*(\d+)</calc>$", turn.text):
        product = int(call[1]) * int(call[2])
        turn = await episode.generate(after=f"{product}=", stop="</calc>")
