r"""Play against an older or frozen model, which decodes in the same process on its own engine.

OPPONENT="DIR runs/NAME/checkpoints/*" torchrun --standalone --nproc-per-node 2 train_grpo.py --run-name NAME \
    --rollout docs/examples/opponent.py:play --reward episode --max-new-tokens 24 --group-size 32 --save-every 50

OPPONENT lists glob patterns for model folders, and the last match plays: here the model in DIR until the run has a
checkpoint, then the newest checkpoint. DIR alone is a frozen opponent, which may have another tokenizer. Without
--model, DIR can be the bundled model, `runs/toy-*`. The game is Nim, as in self_play.py.
"""

import asyncio
import glob
import os
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.messages import Messages
from minirl.data.task import Row
from minirl.errors import refuse
from minirl.generation.engine import Engine
from minirl.model.weights import load_unsharded_model, load_weights
from minirl.ranks.process_group import select_device
from minirl.rollouts import Request, RolloutId, SampledSequence


class Opponent:
    """A frozen model, replicated on each rank, that serves all waiting episodes in one batch.

    Like the policy's samples, an answer depends on the weights, the prompt and the key, but not on the batch.
    """

    def __init__(self, patterns: str, *, cache_tokens: int = 2**14, max_running_requests: int = 64):
        """Load the last matching folder and allocate the cache, before the run plans its memory."""
        self._patterns = patterns.split()
        self.folder = self._newest()
        device = select_device(may_use_cpu=True)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = load_unsharded_model(self.folder, dtype=dtype).to(device)
        self.tokenizer = ChatTokenizer(self.folder)
        self._engine = Engine(
            self.model,
            max_running_requests=max_running_requests,
            cache_tokens=cache_tokens,
            dtype=dtype,
            device=device,
            keeps_cache=True,
        )
        self._ids = (RolloutId(number, 0) for number in count())
        self._answers: dict[RolloutId, SampledSequence] = {}
        # The first request allocates the cache.
        self._engine.generate([self._request([0], key=0, max_tokens=1, temperature=0.0)])

    async def answer(
        self, prompt: str | Messages, *, key: str, max_tokens: int, temperature: float = 1.0
    ) -> str:
        """Sample an answer. Keys must be unique within a run, since answers with equal keys share their randomness."""
        newest = self._newest()
        if newest != self.folder and not self._engine.is_busy:  # between two steps of the run
            load_weights(self.model, newest)
            self.folder = newest
        ids = self.tokenizer.encode(Row(prompt, {}, "the opponent's prompt"))
        number = random.Random(key).getrandbits(63)
        request = self._request(ids, key=number, max_tokens=max_tokens, temperature=temperature)
        self._engine.submit([request])
        while request.rollout_id not in self._answers:
            await asyncio.sleep(0)  # lets other episodes join the batch, and the policy decode
            self._answers |= {sequence.rollout_id: sequence for sequence in self._engine.step()}
        return self.tokenizer.decode(self._answers.pop(request.rollout_id).tokens_after_prompt["id"])

    def _request(self, ids: Sequence[int], *, key: int, max_tokens: int, temperature: float) -> Request:
        stop_ids = self.tokenizer.chat_stop_ids
        return Request(tuple(ids), next(self._ids), key, max_tokens, temperature, stop_ids)

    def _newest(self) -> Path:
        folders = [path for pattern in self._patterns for path in sorted(glob.glob(pattern))]
        refuse(not folders, f"OPPONENT={' '.join(self._patterns)}: no such folder")
        return Path(folders[-1])


OPPONENT = Opponent(os.environ.get("OPPONENT", ""))


def sticks_left(sticks, move):
    """Return the sticks left after a move, or None if the move is illegal."""
    is_legal = move in ("1", "2", "3") and int(move) <= sticks
    return sticks - int(move) if is_legal else None


async def play(episode):
    """Play one game; return 1 if the policy, which starts, wins, else -1. The row's prompt sets the number of sticks.

    The opponent's moves are appended text, which has no loss.
    """

    def message(text):
        return [{"role": "user", "content": text}] if episode.is_chat else text

    sticks = 4 + sum(map(ord, str(episode.row.prompt))) % 6
    game = episode.branch(message(f"{sticks}="))
    after = None
    while True:
        turn = await game.generate(after=after, max_tokens=1)
        sticks = sticks_left(sticks, turn.text)
        if not sticks:
            return 1.0 if sticks == 0 else -1.0
        position = message(f"{sticks}=")
        move = await OPPONENT.answer(position, key=f"{episode.seed} {sticks}", max_tokens=1)
        sticks = sticks_left(sticks, move)
        if not sticks:
            return -1.0 if sticks == 0 else 1.0
        after = message(f"{move}{sticks}=")
