"""Make the turn that a function asks for: its branch, the tokens to append before it, its end."""

from dataclasses import replace

from minirl.data.prompts import PromptStream
from minirl.data.task import is_messages
from minirl.episodes.episode import Branch, Episode, Generate, Turn
from minirl.episodes.running import RunningEpisode
from minirl.errors import refuse


def make_turn(prompts: PromptStream, running: RunningEpisode, asked: Generate) -> Turn | None:
    """Set the turn of an episode and its branch; return None if the turn has no room.

    Raises InputError, with the episode's place.
    """
    episode, place = running.episode, running.place
    refuse(episode.end_reason is not None, f"episode.generate() after episode.end({episode.end_reason!r})")
    branch = episode.branches[asked.branch]
    running.branch = None
    if not branch.prompt_ids and not _begin(prompts, branch, episode, place):
        return None
    running.branch = branch
    new_ids = _appended_ids(prompts, branch, asked, place)
    start = branch.num_tokens + len(new_ids)
    room = branch.max_tokens - start
    if room < 1:
        refuse(not episode.all_turns, f"{place}: the first turn's `after` leaves no room for a turn")
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
        tokenizer=prompts.tokenizer.with_tools(branch.tools),
        tokens=branch.engine_tokens,
    )
    return running.turn


def _begin(prompts: PromptStream, branch: Branch, episode: Episode, place: str) -> bool:
    """Make a new branch's request; return False if its prompt leaves no room for a turn."""
    prompt_ids = prompts.branch_ids(branch.prompt, place, tools=branch.tools)
    branch_id = episode.request.rollout_id._replace(branch=branch.number)
    request = prompts.request(branch_id, branch.prompt, prompt_ids, episode.temperature)
    if request.max_new_tokens < 1:
        refuse(not episode.all_turns, f"{place}: the prompt of its first turn leaves no room for it")
        return False
    branch.request, branch.prompt_ids, branch.max_tokens = request, list(prompt_ids), request.max_new_tokens
    return True


def _appended_ids(prompts: PromptStream, branch: Branch, asked: Generate, place: str) -> list[int]:
    """Return the token ids that a function appends to a branch. Raises InputError naming function and row."""
    if not is_messages(asked.after):
        return prompts.appended_ids(asked.after, place)
    refuse(
        not branch.turns,
        f"{place}: messages before the first turn; see episode.branch, or write them into the row's prompt",
    )
    is_chat = prompts.tokenizer.is_chat(branch.prompt)
    refuse(not is_chat, f"{place}: messages after a text prompt; see --chat, or append text")
    last = branch.turns[-1]
    end_id = last.ids[-1] if last.finish_reason == "stop" else None
    return prompts.appended_ids(asked.after, place, end_id=end_id, tools=branch.tools)
