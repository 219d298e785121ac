"""Make the turn that a function asks for: its branch, the tokens to append before it, its end."""

from dataclasses import replace

from minirl.data.prompts import PromptStream
from minirl.data.task import is_messages
from minirl.episodes.episode import Branch, Episode
from minirl.episodes.generate import Generate
from minirl.episodes.running import RunningBranch, RunningEpisode
from minirl.episodes.turn import Turn
from minirl.errors import refuse


class TurnMaker:
    """Makes the turns that one function asks for; refuses impossible ones naming function and row."""

    def __init__(self, function: str, prompts: PromptStream):
        self._function = function
        self._prompts = prompts

    def place(self, episode: Episode) -> str:
        """Return how messages name an episode."""
        return f"{self._function}(episode), for the row at {episode.row.place}"

    def make(self, running: RunningEpisode, asked: Generate) -> Turn | None:
        """Set the turn of an episode and its branch; return None if the turn has no room.

        Raises InputError.
        """
        episode = running.episode
        refuse(
            episode.end_reason is not None, f"episode.generate() after episode.end({episode.end_reason!r})"
        )
        present = self._branch(running, asked)
        running.branch, running.turn = present, None
        if present is None:
            return None
        branch = present.branch
        new_ids = self._appended_ids(episode, branch, asked)
        start = branch.num_tokens + len(new_ids)
        room = branch.max_tokens - start
        if room < 1:
            refuse(
                not episode.all_turns,
                f"{self._function}(episode): the first turn's `after` leaves no room for a turn",
            )
            return None
        present.request = replace(
            present.request,
            max_new_tokens=start + min(room, asked.max_tokens or room),
            holds=True,
            stop=asked.stop,
            turn_start=start,
        )
        num_before = len(branch.prompt_ids)
        inserted = asked.inserted
        # Its message begins after the last messages.
        earlier = (turn.start for turn in reversed(branch.turns) if turn.inserted)
        running.turn = Turn(
            start,
            branch=branch.number,
            inserted=inserted,
            appended=new_ids,
            tokenizer=self._prompts.tokenizer.with_tools(branch.tools),
            tokens=present.tokens,
            first=num_before + start,
            answer_first=num_before + (start if inserted else next(earlier, 0)),
        )
        return running.turn

    def _branch(self, running: RunningEpisode, asked: Generate) -> RunningBranch | None:
        """Return a request's branch; None for a new one whose prompt leaves no room for a turn."""
        number = asked.branch
        if number in running.branches:
            return running.branches[number]
        request = running.request
        branch = running.episode.branches[number]
        if number != 0:
            place = self.place(running.episode)
            prompt_ids = self._prompts.branch_ids(branch.prompt, place, tools=branch.tools)
            branch_id = request.rollout_id._replace(branch=number)
            request = self._prompts.request(branch_id, prompt_ids, request.temperature)
            if request.max_new_tokens < 1:
                is_first = not running.episode.all_turns
                refuse(is_first, f"{place}: the prompt of its first turn leaves no room for it")
                return None
        branch.prompt_ids, branch.max_tokens = list(request.prompt_ids), request.max_new_tokens
        running.branches[number] = RunningBranch(request, branch)
        return running.branches[number]

    def _appended_ids(self, episode: Episode, branch: Branch, asked: Generate) -> list[int]:
        """Return the token ids that a function appends to a branch. Raises InputError naming function and row."""
        place = self.place(episode)
        if not is_messages(asked.after):
            return self._prompts.appended_ids(asked.after, place)
        refuse(
            not branch.turns,
            f"{place}: messages before the first turn; see episode.branch, or write them into the row's prompt",
        )
        is_chat = self._prompts.tokenizer.is_chat(branch.prompt)
        refuse(not is_chat, f"{place}: messages after a text prompt; see --chat, or append text")
        last = branch.turns[-1]
        end_id = last.ids[-1] if last.finish_reason == "stop" else None
        return self._prompts.appended_ids(asked.after, place, end_id=end_id, tools=branch.tools)
