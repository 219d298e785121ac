"""Make the turn that a function asks for: its branch, the tokens to append before it, its end."""

from dataclasses import replace

from minirl.data.prompts import PromptStream
from minirl.data.task import is_messages
from minirl.episodes.episode import Branch, Episode, Generate
from minirl.episodes.running import RunningEpisode
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
        running.branch, running.turn = branch, _ = self._begun(episode, asked.branch), None
        if branch is None or branch.request is None:
            return None
        new_ids = self._appended_ids(episode, branch, asked)
        start = branch.num_tokens + len(new_ids)
        room = branch.max_tokens - start
        if room < 1:
            refuse(
                not episode.all_turns,
                f"{self._function}(episode): the first turn's `after` leaves no room for a turn",
            )
            return None
        branch.request = replace(
            branch.request,
            max_new_tokens=start + min(room, asked.max_tokens or room),
            holds=True,
            stop=asked.stop,
            turn_start=start,
        )
        running.turn = Turn(
            start,
            branch=branch.number,
            inserted=asked.inserted,
            appended=new_ids,
            tokenizer=self._prompts.tokenizer.with_tools(branch.tools),
            tokens=branch.engine_tokens,
            first=len(branch.prompt_ids) + start,
        )
        return running.turn

    def _begun(self, episode: Episode, number: int) -> Branch | None:
        """Return a branch, with its request; None if it is new and its prompt leaves no room for a turn."""
        branch = episode.branches[number]
        if branch.request is None:
            place = self.place(episode)
            prompt_ids = self._prompts.branch_ids(branch.prompt, place, tools=branch.tools)
            assert episode.request is not None, "it has one from the start"
            branch_id = episode.request.rollout_id._replace(branch=number)
            request = self._prompts.request(branch_id, prompt_ids, episode.temperature)
            if request.max_new_tokens < 1:
                refuse(not episode.all_turns, f"{place}: the prompt of its first turn leaves no room for it")
                return None
            branch.request = request
            branch.prompt_ids, branch.max_tokens = list(prompt_ids), request.max_new_tokens
        return branch

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
