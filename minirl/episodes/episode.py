"""An episode, as the function sees it that writes a rollout.

Such a function is a generator. What it yields is sampled, together with the turns of all other episodes:

    def rollout(episode):
        turn = yield episode.generate(stop=["</query>"])
        yield episode.generate(after=look_up(turn.text))

Tokens are never tokenized again: what was sampled stays as it was, and appended text is tokenized by itself. So are
messages, which the chat template writes.

Standard library only: a process that runs such a function starts quickly.
"""

import copy
import functools
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from minirl.data.task import Messages, as_messages, conversation
from minirl.errors import InputError, refuse
from minirl.rewards.values import MAX_REWARD, validate_number
from minirl.workers.user_code import shown

if TYPE_CHECKING:
    from torch import Tensor

    from minirl.data.chat_turns import After
    from minirl.data.task import Row

# What `Episode.end` takes.
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
# Characters of a reward's name.
MAX_NAME = 80


@dataclass(frozen=True)
class Generate:
    """What an episode asks for: tokens to be appended, then a turn of at most `max_tokens` sampled ones.

    after: text, token ids or, between turns of a chat, messages.
    stop: strings that end the turn, as the model's stop tokens do; the token in which one ends is kept whole.
    max_tokens: None for as many as there is room for.
    branch: to which of the episode's branches, and `prompt`: what that one begins with; for 0, what the row does.
    contents: what reward functions get as the contents of the messages of `after`, None for their texts.
    tools: JSON schemas of those that this prompt tells of; None: the run's.
    """

    after: "After" = ""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    branch: int = 0
    prompt: str | Messages | list[int] = ""
    contents: Sequence[list[Any] | None] = ()
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class End:
    """What an episode says in place of `Generate`: that it ends here. See `Episode.end`."""

    reason: str


class TurnReader(NamedTuple):
    """Reads a turn, each part when it is first asked for.

    text: of its ids. message: what it says. answer: the text of the message that it belongs to, up to its end: all
    that was sampled, and appended as text or ids, since the last messages.
    """

    text: Callable[[], str]
    message: Callable[[], dict[str, Any]]
    answer: Callable[[], str]


class Turn:
    """A turn that was sampled. What of it nobody asks for is not made.

    num_tokens: sampled. finish_reason: "stop" or "length". appended: the token ids that were appended before it.
    inserted: the messages, if it was messages. branch: its number. start, end: where the turn is among the branch's
    tokens after its prompt. limit: of all these tokens, `Branch.max_tokens`. prompt_ids: of the branch, if it is its
    first turn.
    """

    def __init__(
        self,
        ids: "list[int] | Tensor",
        logprobs: "list[float] | Tensor",
        versions: "list[int] | Tensor",
        finish_reason: str,
        *,
        branch: int,
        start: int,
        limit: int,
        prompt_ids: list[int],
        appended: list[int],
        inserted: Messages,
        reader: TurnReader,
    ):
        """Tensors on the host are as good as lists; these are made of them."""
        self._ids = ids
        self._logprobs = logprobs
        self._versions = versions
        self.num_tokens = len(ids)
        self.finish_reason = finish_reason
        self.branch = branch
        self.start = start
        self.end = start + self.num_tokens
        self.limit = limit
        self.prompt_ids = prompt_ids
        self.appended = appended
        self.inserted = inserted
        self._reader = reader

    @functools.cached_property
    def ids(self) -> list[int]:
        """The token ids, including the stop token."""
        return _as_list(self._ids)

    @functools.cached_property
    def logprobs(self) -> list[float]:
        """Of these tokens, when they were sampled."""
        return _as_list(self._logprobs)

    @functools.cached_property
    def versions(self) -> list[int]:
        """Of the weights that sampled them."""
        return _as_list(self._versions)

    @functools.cached_property
    def text(self) -> str:
        """The text of its ids, without special tokens."""
        return self._reader.text()

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        """What it says: content, and where there are any, reasoning and calls of tools; see `data.answers`.

        Raises InputError if it is not known how the model writes calls.
        """
        return self._reader.message()

    @property
    def parse_error(self) -> str | None:
        """Why its message could not be read in whole; None where it could, or where nobody has asked for it."""
        error: str | None = vars(self).get("message", {}).get("parse_error")
        return error

    @functools.cached_property
    def answer(self) -> str:
        """The text of the message that the turn belongs to, up to the turn's end, without special tokens."""
        return self._reader.answer()


def _as_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else list(values.tolist())


@dataclass
class Branch:
    """A prompt with the turns behind it.

    number: among the episode's branches. max_tokens: limit of all tokens after the prompt, appended ones included;
    where the episode began it, that of the episode, until its first turn is there. prompt_ids: the prompt's token ids,
    which a branch that the episode began knows from then on. turns: those that have ended.
    end_reason: that the episode's `end` was called with. tools: as in `Generate`.
    drops_last: whether nobody saw its last turn, which is then no part of the rollout. There is no further one.
    """

    prompt: str | Messages | list[int]
    max_tokens: int
    number: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    end_reason: str | None = None
    tools: list[dict[str, Any]] | None = None
    drops_last: bool = False

    @property
    def num_tokens(self) -> int:
        """How many tokens there are after the prompt, sampled and appended."""
        return self.turns[-1].end if self.turns else 0

    @property
    def room(self) -> int:
        """How many more tokens there may be."""
        return self.max_tokens - self.num_tokens

    @property
    def tokens(self) -> list[int]:
        """All after the prompt, sampled and appended; the lists below have one element for each."""
        return [token for turn in self.turns for token in turn.appended + turn.ids]

    @property
    def loss_mask(self) -> list[bool]:
        """Which of them were sampled."""
        return [
            kind for turn in self.turns for kind in [False] * len(turn.appended) + [True] * turn.num_tokens
        ]

    @property
    def logprobs(self) -> list[float]:
        """Of the tokens when they were sampled; 0 for appended ones."""
        return [value for turn in self.turns for value in [0.0] * len(turn.appended) + turn.logprobs]

    @property
    def versions(self) -> list[int]:
        """Of the weights that sampled them; 0 for appended ones."""
        return [value for turn in self.turns for value in [0] * len(turn.appended) + turn.versions]

    @property
    def has_messages(self) -> bool:
        """Whether it is a conversation: the prompt is no list of token ids."""
        return isinstance(self.prompt, str) or not isinstance(next(iter(self.prompt), None), int)

    @property
    def messages(self) -> Messages:
        """The conversation so far: the prompt (text is the user's), the answers, and what was appended as messages.

        An answer is all text between messages, without special tokens: what was sampled and what was appended as text
        or ids. One that continues the prompt's last message is one with it. Raises InputError behind token ids.
        """
        refuse(
            not self.has_messages, f"branch {self.number}: it begins with token ids, so it has no messages"
        )
        turns = ((turn.inserted, functools.partial(getattr, turn, "answer")) for turn in self.turns)
        return conversation(as_messages(cast(str | Messages, self.prompt)), turns)

    def generate(
        self,
        *,
        after: "After | dict[str, str] | None" = None,
        stop: str | Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Generate:
        """What to yield for a turn; see `Generate`. Where `after` leaves no room the episode ends with "length".

        after: also a single message; None for nothing. Raises InputError after `end`, and for a `stop` of no such type.
        """
        refuse(self.end_reason is not None, f"episode.generate() after episode.end({self.end_reason!r})")
        refuse(
            not isinstance(stop, Iterable), f"episode.generate(stop={stop!r:.80}): expected a text or several"
        )
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        appended = [after] if isinstance(after, dict) else after
        after = "" if appended is None else appended
        if self.number == 0:
            return Generate(after, strings, max_tokens)
        return Generate(after, strings, max_tokens, self.number, self.prompt, tools=self.tools)

    def add(self, turn: Turn) -> None:
        """Add a turn of this branch, see `Episode.take`."""
        self.max_tokens = turn.limit
        if not self.turns:
            self.prompt_ids = turn.prompt_ids
        self.turns.append(turn)


class Episode(Branch):
    """One rollout while it is made. It is a branch itself, the one behind the row's prompt.

    row: of the data. seed: of this episode alone, for whatever in it is random; the same whenever it is run again.
    tools: JSON schemas of those that the prompt tells of. is_chat: whether the chat template wrote the prompt.
    temperature: that of all turns. all_turns: of all branches, in their order. rewards: by name, what was given to all
    branches, and to each turn. rewarded: at which of these places the function has given some since the last turn.
    is_closed: whether the function has ended, or is being ended.
    environment: the attributes of the object of --environment that JSON can hold, as they are now; None where no reward
    function asks for them.
    """

    def __init__(
        self,
        row: "Row",
        seed: int,
        max_tokens: int,
        tools: list[dict[str, Any]] | None = None,
        *,
        prompt_ids: Sequence[int] = (),
        is_chat: bool = False,
        temperature: float = 1.0,
        environment: dict[str, Any] | None = None,
    ):
        super().__init__(row.prompt, max_tokens, prompt_ids=list(prompt_ids))
        self.row = row
        self.seed = seed
        self.tools = tools or []
        self.is_chat = is_chat
        self.temperature = temperature
        self.environment = environment
        self._further: dict[int, Branch] = {}
        self.all_turns: list[Turn] = []
        self.rewards: list[dict[str, float]] = [{}]
        self.rewarded: set[int] = set()
        self.is_closed = False

    @property
    def branches(self) -> dict[int, Branch]:
        """All of them by number, this one is 0."""
        # Not kept: an object that holds itself is freed by a garbage collection only, with the rollout that it has.
        return {0: self, **self._further}

    def branch_of(self, asked: Generate) -> Branch:
        """The branch that a turn is asked for, or that begins with it. For who runs the episode."""
        if asked.branch == 0:
            return self
        begun = Branch(asked.prompt, 0, asked.branch, tools=asked.tools)
        return self._further.setdefault(asked.branch, begun)

    def take(self, turn: Turn) -> None:
        """Add a turn that has ended to its branch. For who runs the episode."""
        self.branches[turn.branch].add(turn)
        self.all_turns.append(turn)
        self.rewards.append({})
        self.rewarded.clear()

    def drop_unseen(self) -> None:
        """Take off the turns that nobody saw; the turn before each has the rewards that were given behind it."""
        for branch in self.branches.values():
            if not branch.drops_last:
                continue
            branch.drops_last = False
            position = self.all_turns.index(branch.turns.pop())
            del self.all_turns[position]
            given = self.rewards[position]
            for name, value in self.rewards.pop(position + 1).items():
                given[name] = given.get(name, 0.0) + value

    def branch(
        self, prompt: str | Messages | list[int], *, tools: list[dict[str, Any]] | None = None
    ) -> Branch:
        """A further branch, behind another prompt: a conversation that is written anew, another one, or token ids.

        It is a sample of its own in training, with the rewards of its own turns; what is given to no turn, and the
        weight in the loss, it shares with the others. tools: JSON schemas of those that the prompt tells of, if it is
        messages; None: the run's.
        """
        # The caller may go on with its list of messages, the branch's are those of now.
        own = copy.deepcopy(prompt)
        number = 1 + len(self._further)
        branch = Branch(own, self.max_tokens, number=number, end_reason=self.end_reason, tools=tools)
        self._further[number] = branch
        return branch

    def reward(
        self, value: float, name: str = REWARD, *, branch: Branch | Literal["all"] | None = None
    ) -> None:
        """Add to a reward of the episode. It belongs to the last token of the last turn, and so to that turn's branch.

        branch: to the last turn of this one instead (the episode is the first of them); "all": to no turn, but to each
        branch, as what the function returns. Before the first turn that is so without it.
        Raises InputError for what is no finite number, a branch without a turn, and once the episode has ended.
        """
        place = f"episode.reward, for the row at {self.row.place}:"
        refuse(self.is_closed, f"{place} the episode has ended; give rewards before a `yield`")
        _check_name(name, place)
        index = len(self.all_turns)
        if branch == "all":
            index = 0
        elif branch is not None:
            numbers = [number for number, own in self.branches.items() if own is branch]
            refuse(not numbers, f"{place} branch={branch!r:.80}; expected a branch of the episode, or 'all'")
            indices = [i for i, turn in enumerate(self.all_turns, 1) if turn.branch in numbers]
            refuse(not indices, f"{place} branch {numbers[0]} has had no turn that could be given one")
            index = indices[-1]
        self.rewarded.add(index)
        given = self.rewards[index]
        checked = _checked_reward(value, f"{place} {name!r} is")
        given[name] = _checked_reward(given.get(name, 0.0) + checked, f"{place} {name!r} adds up to")

    def end(self, reason: str) -> End:
        """What to yield, or to call before the function returns, for the episode to end with this finish reason.

        reason: one of `END_REASONS`; raises InputError for another. Without it an episode ends as its last turn did.
        """
        refuse(
            not isinstance(reason, str) or reason not in END_REASONS,
            f"episode.end({reason!r:.80}): expected one of {', '.join(END_REASONS)}",
        )
        for branch in self.branches.values():
            branch.end_reason = reason
        return End(reason)


def checked_turn(yielded: Any) -> Generate:
    """What a function has yielded for a turn. Raises InputError naming the field that is wrong."""
    if not isinstance(yielded, Generate):
        raise InputError(f"yields {yielded!r:.80}; expected `yield episode.generate()`")
    limit, branch, contents = yielded.max_tokens, yielded.branch, yielded.contents
    is_after = isinstance(yielded.after, str | list | tuple)
    is_stop = isinstance(yielded.stop, tuple) and all(isinstance(string, str) for string in yielded.stop)
    is_each = is_after and isinstance(contents, list | tuple) and len(contents) in (0, len(yielded.after))
    expected = {
        "after": (is_after, "expected text, a list of token ids, or messages"),
        "stop": (is_stop, "expected a tuple of texts"),
        "max_tokens": (limit is None or (type(limit) is int and limit >= 1), "must be at least 1"),
        "branch": (type(branch) is int and branch >= 0, "write `episode.branch(messages).generate()`"),
        # Checked where the prompt is tokenized.
        "prompt": (True, ""),
        "tools": (True, ""),
        "contents": (is_each, "expected one for each message of `after`"),
    }
    for name, value in vars(yielded).items():
        is_right, what = expected.get(name, (False, "there is no such field"))
        if not is_right:
            raise InputError(f"generate({name}={value!r:.80}): {what}")
    return yielded


def given_at_end(episode: Episode, returned: Any) -> tuple[dict[str, float | None], str | None]:
    """The rewards that a function has returned, and its finish reason. Raises InputError saying what is wrong."""
    if episode.end_reason is not None:
        episode.end(episode.end_reason)  # it may be an attribute that was set
    return returned_rewards(returned), episode.end_reason


def returned_rewards(returned: Any) -> dict[str, float | None]:
    """The rewards that a function has returned: a number is the one named "reward", None is none.

    Raises InputError saying what is wrong.
    """
    if returned is None:
        return {}
    if not isinstance(returned, dict):
        return {REWARD: _checked_reward(returned, "returns")}
    rewards: dict[str, float | None] = {}
    for name, value in returned.items():
        _check_name(name, "returns")
        rewards[name] = None if value is None else _checked_reward(value, f"returns {name!r}:")
    return rewards


def _check_name(name: Any, what: str) -> None:
    is_name = isinstance(name, str) and 0 < len(name) <= MAX_NAME
    refuse(not is_name, f"{what} a reward named {name!r:.80}; expected text of at most {MAX_NAME} characters")


def _checked_reward(value: Any, what: str) -> float:
    """A reward as a float. Raises InputError for what is no finite number, beginning with `what`."""
    checked = validate_number(value)
    # A comparison that was meant to be something else is easily taken for a number.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    if is_bool or not isinstance(checked, float):
        raise InputError(f"{what} {shown(value)}; a reward is a finite number of at most {MAX_REWARD:g}")
    return checked


Turns = Generator[Generate | End, Turn, Any]
AsyncTurns = AsyncGenerator[Generate | End, Turn]
RolloutFunction = Callable[[Episode], Turns]


def one_turn(episode: Episode) -> Turns:
    """The rollout of one completion."""
    yield episode.generate()
