"""Refuse rewards that a rollout function may not give, naming function and row."""

from collections.abc import Collection
from typing import Any

from minirl.errors import InputError, refuse
from minirl.files.user_code import shown
from minirl.rewards.values import MAX_REWARD, validate_number

# The name of a reward that is given without one.
REWARD = "reward"


def check_rewards(given: Collection[str], wanted: Collection[str], place: str) -> None:
    """Raise InputError for rewards that the run has no use for, and for one that it wants and nobody gave.

    given: the names of the rewards that an episode gave or returned. wanted: the names of the run's rewards.
    """
    if not given and not wanted:
        return
    listed = ", ".join(map(repr, sorted(given))) or "none"
    flags = " ".join("episode" if name == REWARD else f"episode:{name}" for name in sorted(given))
    refuse(
        bool(given) and not wanted,
        f"{place}: gives rewards ({listed}) that the run does not have: add --reward {flags}",
    )
    for name in wanted:
        refuse(
            name not in given,
            f"{place}: ended without the reward {name!r} (given: {listed}); give it in every episode, at "
            f"least `episode.reward(0.0, {name!r})`, or return {{{name!r}: None}} where it does not apply",
        )


def returned_rewards(returned: Any) -> dict[str, float | None]:
    """Return the rewards, by name, that a function returned: a number is the one named "reward", None means none.

    Raises InputError with the reason if it cannot be one.
    """
    if returned is None:
        return {}
    if not isinstance(returned, dict):
        return {REWARD: checked_reward(returned, "returns")}
    rewards: dict[str, float | None] = {}
    for name, value in returned.items():
        rewards[name] = None if value is None else checked_reward(value, f"returns {name!r}:")
    return rewards


def checked_reward(value: Any, what: str) -> float:
    """Return a reward as a float. Raises InputError, beginning with `what`, unless it is a finite number."""
    checked = validate_number(value)
    if not isinstance(checked, float):
        raise InputError(f"{what} {shown(value)}; a reward is a finite number of at most {MAX_REWARD:g}")
    return checked
