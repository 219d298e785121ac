"""The collector: prompts in, whole groups of rewarded rollouts out. It stands between the engine and the update.

The groups of a step depend on the prompts, the rollouts' lengths and their rewards, never on the clock: they are the
same on another number of ranks, or in a second run.

With a decode budget rollouts are partial: each samples up to that many tokens in a step, and continues in the next one
under new weights. A step takes the first complete groups in order of their prompts. Rollouts that are unfinished, or
complete but not taken, are in flight; `state` and `records` put them into a checkpoint.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from minirl.collect.step_groups import Groups, select_step
from minirl.data.prompts import PromptStream
from minirl.data.task import RewardFunction
from minirl.episodes.episode import RolloutFunction, one_turn
from minirl.episodes.in_flight import (
    finished_record,
    finished_rollout,
    id_of,
    paused_episode,
    paused_record,
    rewarded_of,
    rewarded_records,
)
from minirl.episodes.limits import NO_LIMITS, EpisodeLimits
from minirl.episodes.rollout_workers import RolloutWorkers
from minirl.episodes.runner import Counted, EpisodeRunner
from minirl.episodes.running import NO_BUDGET, PausedEpisode, RunningEpisode
from minirl.generation.engine import Engine
from minirl.ranks.process_group import Arrival
from minirl.report.progress_bar import progress_bar
from minirl.rewards.functions import EpisodeReward, asked_of_episodes, branch_rewards
from minirl.rewards.reward_queue import RewardQueue, reward_rollouts
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import Request, Rollout
from minirl.training.frozen_models import FrozenModel


class Collector:
    """Collects the rollouts of one stream of prompts.

    engine: that samples them. num_served: prompts taken from the stream so far; a script may raise it, to leave some
    out.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: PromptStream,
        functions: Mapping[str, RewardFunction],
        *,
        rollout: RolloutFunction | RolloutWorkers = one_turn,
        limits: EpisodeLimits = NO_LIMITS,
        group_size: int = 1,
        num_greedy: int = 0,
        temperature: float = 1.0,
        max_refills: int | None = None,
        decode_budget: int | None = None,
        max_staleness: int = 0,
        frozen: Sequence[FrozenModel] = (),
        scores_beside_cache: bool = True,
    ):
        """functions: the K reward functions by name. rollout: see `episode`; in this process, or in others.

        limits: of an episode.
        group_size: rollouts of each prompt, besides `num_greedy` greedy ones.
        max_refills: how many times in a step to replace groups of equal first rewards by groups of new prompts; then
        such groups fill it up. None: do not replace them.
        decode_budget: the most tokens that a rollout samples in a step. None: all of it.
        max_staleness: with a budget, the most steps between a rollout's first token and the step that it is
        trained in.
        frozen: models that score the groups' rollouts; they do so early where this rank would wait.
        scores_beside_cache: also where it waits for replies while the engine's cache is in memory.
        """
        self.num_served = 0
        self.engine = engine
        self._rollout = rollout
        self._limits = limits
        self._prompts = prompts
        self._functions = functions
        self._group_size = group_size
        self._num_greedy = num_greedy
        self._temperature = temperature
        self._max_refills = max_refills
        self._decode_budget = decode_budget
        self._max_staleness = max_staleness
        self._frozen = frozen
        self._scores_beside_cache = scores_beside_cache
        reward_names = [
            function.reward_name for function in functions.values() if isinstance(function, EpisodeReward)
        ]
        has_environment = isinstance(rollout, RolloutWorkers) and rollout.kind == "environment"
        self._runner = EpisodeRunner(
            engine,
            rollout,
            prompts,
            limits=limits,
            reward_names=reward_names,
            shows_environment=has_environment and "environments" in asked_of_episodes(functions.values()),
        )
        # In flight on this rank: episodes; by prompt, rollouts that ended before others of the same prompt; and whole
        # groups with their rewards.
        self._paused: list[RunningEpisode] = []
        self._ended: dict[int, list[Rollout]] = {}
        self._rewarded = reward_rollouts(functions, prompts, [])
        # The same on every rank: how many steps were collected, and in which of them each prompt in flight was begun.
        self._num_steps = 0
        self._begun_in: dict[int, int] = {}

    def collect(self, num_groups: int, *, weight_version: int = 0) -> Groups:
        """The groups of the next step (collective).

        weight_version: of the weights that sample now. Raises RewardError or RolloutError naming function and row.
        """
        self._num_steps += 1
        due = self._prompts_due(num_groups)
        for model in self._frozen:
            model.begin()
        # Always begin as many as the step takes, so the number in flight grows until one budget fills each step.
        # Beginning only the missing ones takes 1.7 times the decode steps if a few rollouts are much longer.
        num_missing = num_groups
        for num_rounds in itertools.count(1):
            new = self._serve(max(0, min(num_missing, self._num_allowed(num_groups))))
            self._rewarded += self._run([*self._paused, *new], due, weight_version=weight_version)
            self._wait_for_ranks()
            rewarded = self._rewarded
            selection = select_step(
                rewarded,
                num_groups,
                self._group_size,
                self._num_greedy,
                branch_rewards=branch_rewards(self._functions, rewarded.rollouts, rewarded.rewards),
                replaces_equal=self._max_refills is not None,
            )
            num_missing = selection.num_missing
            is_full = selection.num_selected == num_groups
            if num_missing == 0 or (is_full and num_rounds > (self._max_refills or 0)):
                break
        self._rewarded = selection.left
        for ordinal in selection.ended:
            del self._begun_in[ordinal]
        return selection.groups

    def early_streams(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """The streams that frozen models computed for these rollouts, for `exchange`. Not collective."""
        streams: dict[str, Tensor] = {}
        for model in self._frozen:
            streams |= model.early_streams(rollouts)
        return streams

    def run(self, requests: Sequence[Request], *, weight_version: int = 0) -> RewardedRollouts:
        """The rollouts of these requests with their rewards, in order of their ids. Not collective.

        Functions that judge groups get those of each prompt that are among them.
        """
        episodes = [self._runner.begin(request) for request in requests]
        return self._run(episodes, (), weight_version=weight_version)

    def evaluator(self, prompts: PromptStream) -> "Collector":
        """A collector of greedy rollouts of other prompts, with the same engine, rewards and rollout function."""
        return Collector(
            self.engine,
            prompts,
            self._functions,
            rollout=self._rollout,
            limits=self._limits,
            group_size=0,
            num_greedy=1,
        )

    def take_count(self, counted: Counted) -> int:
        """Return how many of these this rank had since the last call, also in rollouts that no step takes.

        counted: see `runner.Counted`.
        """
        return self._runner.take_count(counted)

    def state(self) -> dict[str, Any]:
        """The collector's state for a checkpoint, besides `records`: JSON values, the same on every rank."""
        return {
            "num_steps": self._num_steps,
            "begun_in": [list(item) for item in self._begun_in.items()],
        }

    def records(self) -> list[dict[str, Any]]:
        """The rollouts in flight on this rank, for a checkpoint: a record for each prompt. Not collective."""
        records = [paused_record(running) for running in self._paused]
        records += map(finished_record, itertools.chain(*self._ended.values()))
        records += rewarded_records(self._rewarded)
        # Episodes are paused in the order of their functions' replies.
        records.sort(key=lambda record: record["id"])
        groups = itertools.groupby(records, key=lambda record: id_of(record).prompt_ordinal)
        return [{"rollouts": list(group)} for _, group in groups]

    def restore(self, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint's state; `groups` are the records that are this rank's now. Not collective.

        An episode whose function does not repeat its requests begins again from the start; it counts as "restarted".
        """
        self._num_steps = state["num_steps"]
        self._begun_in = dict(state["begun_in"])
        records = list(itertools.chain.from_iterable(group["rollouts"] for group in groups))
        paused = [record for record in records if record["finish_reason"] is None]
        self._paused = self._runner.restore([self._paused_episode(record) for record in paused])
        finished = [record for record in records if record["finish_reason"] is not None]
        for record in finished:
            if record["rewards"] is None:
                ordinal = id_of(record).prompt_ordinal
                self._ended.setdefault(ordinal, []).append(finished_rollout(record))
        rewarded = [record for record in finished if record["rewards"] is not None]
        if rewarded:
            self._rewarded += rewarded_of(rewarded, self._prompts)

    def _wait_for_ranks(self) -> None:
        """Let frozen models score until all ranks have come as far (collective)."""
        if not self._frozen:
            return
        arrival = Arrival()
        for model in self._frozen:
            model.score_early(lambda: not arrival.is_complete())
        arrival.wait()

    def _paused_episode(self, record: Mapping[str, Any]) -> PausedEpisode:
        rollout_id = id_of(record)
        is_greedy = rollout_id.sample >= self._group_size
        temperature = 0.0 if is_greedy else self._temperature
        prompt_ids = tuple(record["prompt"].tolist())
        return paused_episode(record, self._prompts.request(rollout_id, prompt_ids, temperature))

    def _prompts_due(self, num_groups: int) -> set[int]:
        """The prompts in flight to finish in this step, so that no rollout gets older than `max_staleness`.

        If each further step takes `num_groups` of them, the oldest first, all are taken in time.
        """
        ordinals = sorted(self._begun_in)
        num_due = 0
        for i, ordinal in enumerate(ordinals):
            num_later_steps = self._begun_in[ordinal] + self._max_staleness - self._num_steps
            num_due = max(num_due, i + 1 - num_groups * num_later_steps)
        return set(ordinals[:num_due])

    def _num_allowed(self, num_groups: int) -> int:
        """How many prompts may be begun: no more than the steps until they are too old can take."""
        if self._decode_budget is None:
            return sys.maxsize
        return num_groups * (1 + self._max_staleness) - len(self._begun_in)

    def _serve(self, num_prompts: int) -> list[RunningEpisode]:
        """This rank's share of the episodes of this many new prompts."""
        requests = self._prompts.requests(
            self.num_served,
            num_prompts,
            group_size=self._group_size,
            num_greedy=self._num_greedy,
            temperature=self._temperature,
        )
        for ordinal in range(self.num_served, self.num_served + num_prompts):
            self._begun_in[ordinal] = self._num_steps
        self.num_served += num_prompts
        return [self._runner.begin(request) for request in requests]

    def _run(
        self, episodes: Sequence[RunningEpisode], due: Collection[int], *, weight_version: int
    ) -> RewardedRollouts:
        """Run episodes until they end or are paused; returns those that are rewarded, in order of their ids.

        A prompt's rollouts are rewarded when the last one ends. due: prompts whose rollouts have no
        budget.
        """
        num_open = Counter(ordinal_of(running) for running in episodes)
        for running in episodes:
            is_due = ordinal_of(running) in due
            running.budget = NO_BUDGET if is_due else self._decode_budget or NO_BUDGET
        # At most: those that are paused get none in this phase.
        num_rollouts = len(episodes) + sum(map(len, self._ended.values()))
        queue = RewardQueue(self._functions, self._prompts, num_rollouts=num_rollouts)
        whole: list[Rollout] = []

        def reward_if_whole(ordinal: int) -> None:
            if num_open[ordinal] == 0:
                rollouts = self._ended.pop(ordinal)
                whole.extend(rollouts)
                queue.add(rollouts)
                for model in self._frozen:
                    model.add(
                        [rollout for rollout in rollouts if rollout.rollout_id.sample < self._group_size]
                    )

        self._runner.submit(episodes, weight_version=weight_version)
        with progress_bar("generate", total=len(episodes), unit="completions") as bar:
            while self._runner.is_busy:
                for model in self._frozen if self._scores_beside_cache else ():
                    model.score_early(self._runner.is_waiting)
                rollouts = self._runner.step()
                for rollout in rollouts:
                    ordinal = rollout.rollout_id.prompt_ordinal
                    self._ended.setdefault(ordinal, []).append(rollout)
                    num_open[ordinal] -= 1
                    reward_if_whole(ordinal)
                queue.poll()
                bar.update(len(rollouts))
        self._paused = self._runner.take_paused()

        def is_waiting() -> bool:
            queue.poll()
            return queue.is_busy

        for model in self._frozen:
            model.score_early(is_waiting)
        whole.sort(key=lambda rollout: rollout.rollout_id)
        return queue.finish(whole)


def ordinal_of(running: RunningEpisode) -> int:
    """The number of the episode's prompt in the stream."""
    return running.request.rollout_id.prompt_ordinal
