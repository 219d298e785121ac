"""An episode, as seen by the function that writes a rollout.

Its turns are sampled together with those of all other episodes:

    async def rollout(episode):
        turn = await episode.generate(stop=["</query>"])
        await episode.generate(after=await look_up(turn.text))

Tokens are never tokenized again: sampled tokens stay as they are, and appended text is tokenized alone. So are
messages, which the chat template writes.
"""

import copy
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from minirl.data import answers
from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.conversation import branch_messages
from minirl.data.messages import After, Messages, is_messages, is_token_ids, read_message, read_prompt
from minirl.data.task import Row
from minirl.data.tokenizer import is_stop_string
from minirl.errors import InputError, refuse
from minirl.files.user_code import short_repr
from minirl.rewards.calls import MAX_REWARD, validate_number
from minirl.rollouts import Request, SampledSequence, Stream, TurnRecord

# Finish reasons for `Episode.end`.
END_REASONS = (
    "stop",
    "length",
    "max_turns",
    "max_tokens",
    "tool_error",
    "parse_error",
    "timeout",
    "env_done",
)
# The name of a reward that is given without one.
REWARD = "reward"


@dataclass(frozen=True)
class TurnRequest:
    """Asks for a turn: tokens are appended, then at most `max_tokens` are sampled.

    after: text, token ids or, between turns of a chat, messages, as `read_message` returns them. The results of tools
    may have other contents than text: the chat template gets these as text, reward functions as they are.
    stop: strings that end the turn, as the model's stop tokens do; the token in which one ends is kept whole.
    max_tokens: None for as many as fit.
    branch: the number of the episode's branch.
    """

    after: After
    stop: tuple[str, ...]
    max_tokens: int | None
    branch: int

    def __post_init__(self) -> None:
        """Raise InputError naming the field that is wrong. What is appended is checked where it is tokenized."""
        refuse(
            not isinstance(self.after, str | list | tuple),
            f"generate(after={self.after!r:.80}): expected text, a list of token ids, or messages",
        )
        refuse(
            not all(map(is_stop_string, self.stop)),
            f"generate(stop={self.stop!r:.80}): expected texts; '' is in every text, U+FFFD and surrogates in none",
        )
        if self.max_tokens is not None:
            is_limit = type(self.max_tokens) is int and self.max_tokens >= 1
            refuse(not is_limit, f"generate(max_tokens={self.max_tokens!r:.80}): must be at least 1")


@dataclass(slots=True)
class BranchTokens:
    """The tokens of a branch up to its last turn, with the finish reason of the branch if that stays the last.

    The branch and its turns share it, so that memory holds a branch once and not once per turn.
    """

    sequence: SampledSequence = field(init=False)


@dataclass(eq=False, kw_only=True)
class Turn(TurnRecord):
    """A turn that a function asked for: appended tokens, then sampled ones.

    tokens: the branch's. number: its place in the episode, from 1.
    """

    tokenizer: ChatTokenizer
    tokens: BranchTokens
    number: int = 0

    @property
    def ids(self) -> list[int]:
        """The sampled token ids, including the stop token."""
        return self._sampled["id"].tolist()

    @property
    def logprobs(self) -> list[float]:
        """The sampled tokens' logprobs, when they were sampled."""
        return self._sampled["logprob"].tolist()

    @functools.cached_property
    def text(self) -> str:
        """The text of the sampled ids, without special tokens."""
        return self.text_from(self.start)

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        """The content, and reasoning and calls of tools, if any; see `data.answers`.

        Raises InputError if the form of the model's calls is unknown.
        """
        sequence = self.tokens.sequence
        before = sequence.tokens[: sequence.num_prompt_tokens + self.start]
        message = answers.parse_answer(self.tokenizer, self.ids, before)
        self.parse_error = message.get("parse_error")
        return message

    def text_from(self, start: int) -> str:
        """Return the text, up to the turn's end, from `start` among the branch's tokens after its prompt."""
        return self.tokenizer.decode(self.tokens.sequence.after_prompt["id"][start : self.end])

    @property
    def _sampled(self) -> Stream:
        """The sampled tokens, including the stop token."""
        return self.tokens.sequence.after_prompt[self.start : self.end]


@dataclass(eq=False)
class Branch:
    """A prompt with the turns that follow it, while its episode runs; a `SampledSequence` stores it.

    number: its place among the episode's branches. turns: the finished ones. tools: JSON schemas of the tools that its
    prompt shows; None: the run's.

    For the code that runs the episode, which sets them: request: without tokens; until the first turn of a branch that
    the function began, it has the episode's limit and no prompt. request_turn: samples a turn. engine_tokens: those of
    its finished turns.
    """

    prompt: str | Messages | list[int]
    request: Request = field(repr=False)
    number: int = 0
    turns: list[Turn] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    request_turn: Callable[[TurnRequest], Awaitable[Turn]] = field(init=False)
    engine_tokens: BranchTokens = field(default_factory=BranchTokens)

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's token ids; [] before the first turn of a branch that the function began."""
        return list(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens after the prompt, sampled and appended."""
        return self.turns[-1].end if self.turns else 0

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens it may have."""
        return self.request.max_new_tokens - self.num_tokens

    @property
    def tokens(self) -> list[int]:
        """All tokens after the prompt, sampled and appended."""
        return self.engine_tokens.sequence.completion[: self.num_tokens] if self.turns else []

    @property
    def messages(self) -> Messages:
        """The conversation so far: the prompt (text is the user's), the answers, and the appended messages.

        An answer is all text between messages, without special tokens: sampled, or appended as text or ids. One that
        continues the prompt's last message joins it. Raises InputError if the prompt is token ids.
        """
        refuse(
            is_token_ids(self.prompt),
            f"branch {self.number}: it begins with token ids, so it has no messages",
        )
        return branch_messages(cast(str | Messages, self.prompt), self.turns, Turn.text_from)

    @property
    def finish_reason(self) -> str:
        """Why it ends, if its last turn stays the last."""
        last = self.turns[-1]
        return (
            "turn_length"
            if last.finish_reason == "length" and self.remaining_tokens > 0
            else last.finish_reason
        )

    async def generate(
        self,
        *,
        after: After | dict[str, str] | None = None,
        stop: str | Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Turn:
        """Append `after` and sample a turn; return it when it ends. See `TurnRequest`.

        If `after` leaves no room, or the episode has reached a limit, it ends: the function is cancelled here. after:
        also a single message; None for nothing. Raises InputError naming an argument that is wrong, after `end`, and
        while another turn of the episode is sampled.
        """
        strings = tuple(stop) if isinstance(stop, list | tuple) else (cast(str, stop),)
        appended = "" if after is None else _read_after(after)
        return await self.request_turn(TurnRequest(appended, strings, max_tokens, self.number))


class Episode:
    """One rollout in the making.

    branches: in order of their numbers. The first follows the row's prompt; its `generate`, `turns`, `messages` and the
    like are the episode's, too.
    row: a copy of the prompt's row of the data. seed: for everything random in this episode; the same in every run.
    tools: JSON schemas of the tools that the prompt shows. is_chat: whether the chat template wrote the prompt.
    temperature: of all turns. num_turns: how many have ended, in all branches. given_rewards: the rewards given so far,
    by name; in the end also those returned, None for one that does not apply. end_reason: the argument of `end`, if it
    was called. is_closed: whether the function ended, or is being ended.
    environment: the object of --environment, or what else a function sets here; reward functions get it.
    """

    environment: Any = None
    end_reason: str | None = None
    num_turns = 0
    is_closed = False

    def __init__(
        self,
        row: Row,
        request: Request,
        tools: list[dict[str, Any]] | None = None,
        *,
        is_chat: bool = False,
    ):
        self.row = row
        self.seed = request.rng_key
        self.tools = copy.deepcopy(tools or [])
        self.is_chat = is_chat
        self.temperature = request.temperature
        first = Branch(copy.deepcopy(row.prompt), request, tools=self.tools)
        self.branches = [first]
        self.prompt = first.prompt
        self.prompt_ids = first.prompt_ids
        self.turns = first.turns
        self.generate = first.generate
        self.given_rewards: dict[str, float | None] = {}

    @property
    def messages(self) -> Messages:
        """The conversation of the first branch; see `Branch.messages`."""
        return self.branches[0].messages

    @property
    def tokens(self) -> list[int]:
        """All tokens of the first branch after its prompt, sampled and appended."""
        return self.branches[0].tokens

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens the first branch may have."""
        return self.branches[0].remaining_tokens

    def add_turn(self, turn: Turn) -> None:
        """Add a finished turn to its branch. For the code that runs the episode."""
        self.num_turns += 1
        turn.number = self.num_turns
        self.branches[turn.branch].turns.append(turn)

    def branch(
        self, prompt: str | Messages | list[int], *, tools: list[dict[str, Any]] | None = None
    ) -> Branch:
        """Begin a further branch, with another prompt: a rewritten or a second conversation, or token ids.

        It is a separate training sample with the rollout's advantage, and shares its weight in the loss with the other
        branches. tools: JSON schemas of the tools that a prompt of messages shows; None: the run's. Raises InputError
        for another prompt.
        """
        if not is_token_ids(prompt):
            prompt = read_prompt(prompt, "branch(...): the prompt")
        first = self.branches[0]
        number = len(self.branches)
        rollout_id = first.request.rollout_id._replace(branch=number)
        # Until its prompt is tokenized, for its first turn.
        request = replace(first.request, rollout_id=rollout_id, prompt_ids=())
        # The caller may go on to change its lists; the branch keeps the present ones.
        own, own_tools = copy.deepcopy((prompt, tools))
        branch = Branch(own, request, number, tools=own_tools)
        branch.request_turn = first.request_turn
        self.branches.append(branch)
        return branch

    def reward(self, value: float, name: str = REWARD) -> None:
        """Add to a reward of the rollout. Raises InputError unless it is finite, and after the episode's end."""
        origin = f"episode.reward, for the row at {self.row.origin}:"
        refuse(self.is_closed, f"{origin} the episode ended; give rewards before `await episode.generate()`")
        checked = checked_reward(value, f"{origin} {name!r} is")
        total = (self.given_rewards.get(name) or 0.0) + checked
        self.given_rewards[name] = checked_reward(total, f"{origin} {name!r} adds up to")

    def end(self, reason: str) -> None:
        """End the episode with this finish reason; then return from the function.

        reason: one of `END_REASONS`; raises InputError for another. Without it an episode ends like its last turn.
        """
        refuse(
            reason not in END_REASONS,
            f"episode.end({reason!r:.80}): expected one of {', '.join(END_REASONS)}",
        )
        self.end_reason = reason


def _read_after(after: After | dict[str, str]) -> After:
    """Return what a caller appends, messages as copies: the caller may go on to change them."""
    appended = [after] if isinstance(after, dict) else after
    if is_messages(appended):
        return [read_message(copy.deepcopy(one), "generate(after=...)") for one in appended]
    return appended


def checked_reward(value: Any, what: str) -> float:
    """Return a reward as a float. Raises InputError, beginning with `what`, unless it is a finite number."""
    checked = validate_number(value)
    if not isinstance(checked, float):
        raise InputError(f"{what} {short_repr(value)}; a reward is a finite number of at most {MAX_REWARD:g}")
    return checked


# Returns rewards by name, None for one that does not apply; or a number, the reward named "reward"; or None.
RolloutFunction = Callable[[Episode], Coroutine[Any, Any, Any]]


async def one_turn(episode: Episode) -> None:
    """The rollout of one completion."""
    await episode.generate()
