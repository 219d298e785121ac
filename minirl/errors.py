"""The errors that a run ends with on purpose, each with the exit code of every rank.

Their message is for the user and is printed without a traceback; any other exception is a bug: traceback, exit code 1.
A run that was asked to stop saves and leaves with 143 (SIGTERM) or 130 (Ctrl-C).
"""


class InputError(ValueError):
    """A flag, file, row or model folder that cannot be used: the message names it and the fix."""

    exit_code = 2


class GuardError(FloatingPointError):
    """Training met a number that is not finite, and stopped before the update."""

    exit_code = 3


class RewardError(RuntimeError):
    """A reward function raised, hung, died or returned something else than finite numbers."""

    exit_code = 4


class HangError(RuntimeError):
    """A rank has shown no sign of progress for too long."""

    exit_code = 5


class SaveError(RuntimeError):
    """The last checkpoint could not be written; what was saved before is intact."""

    exit_code = 6


def refuse(is_wrong: object, message: str) -> None:
    """Raise InputError with the message if something is wrong."""
    if is_wrong:
        raise InputError(message)
