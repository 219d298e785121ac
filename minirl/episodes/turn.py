"""A turn of an episode. After its end it reads its parts from the tokens of its branch, on demand."""

# Cached properties stand for attributes that can be written, which mypy does not know.
# mypy: disable-error-code="override"

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minirl.data import answers
from minirl.data.tokenizer import Tokenizer
from minirl.rollouts import Rollout, TurnFacts


@dataclass(slots=True)
class BranchTokens:
    """The tokens of a branch, as the engine last returned them, at the end of a turn or of a round's part of one.

    The branch and its turns share it, so that memory holds a branch once and not once per turn.
    """

    rollout: Rollout | None = None


@dataclass(eq=False, kw_only=True)
class Turn(TurnFacts):
    """A turn that a function asked for: appended tokens, then sampled ones.

    appended: the token ids that were appended before it. tokens: the branch's.
    """

    appended: list[int]
    tokenizer: Tokenizer
    tokens: BranchTokens

    @functools.cached_property
    def ids(self) -> list[int]:
        """The sampled token ids, including the stop token."""
        return self._listed(self._rollout.tokens)

    @functools.cached_property
    def logprobs(self) -> list[float]:
        """The sampled tokens' logprobs, when they were sampled."""
        return self._listed(self._rollout.sample_logprobs)

    @functools.cached_property
    def text(self) -> str:
        """The text of the sampled ids, without special tokens."""
        return self.text_from(self.start)

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        """The content, and reasoning and calls of tools, if any; see `data.answers`.

        Raises InputError if the form of the model's calls is unknown.
        """
        before = self._rollout.tokens[: self._place(self.start)]
        message = answers.parsed_answer(self.tokenizer, self.ids, before)
        self.parse_error = message.get("parse_error")
        return message

    def text_from(self, start: int) -> str:
        """Return the text, up to the turn's end, from `start` among the branch's tokens after its prompt."""
        return self.tokenizer.decode(self._rollout.tokens[self._place(start) : self._place(self.end)])

    @property
    def _rollout(self) -> Rollout:
        """The branch, up to this turn or a later one."""
        assert self.tokens.rollout is not None, "the turn has not ended"
        return self.tokens.rollout

    def _place(self, index: int) -> int:
        """The place in the branch, prompt included, of one of its tokens after the prompt."""
        return self._rollout.num_prompt_tokens + index

    def _listed(self, stream: Tensor) -> list[Any]:
        """The turn's part of a stream of the branch."""
        part: list[Any] = stream[self._place(self.start) : self._place(self.end)].tolist()
        return part
