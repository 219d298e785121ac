"""The errors that end a run on purpose, each with an exit code.

Their message is for the user and is printed without a traceback. Any other exception is a bug: traceback,
exit code 1. A run that is asked to stop saves a checkpoint and exits with code 143 (SIGTERM), 130 (Ctrl-C)
or 129 (SIGHUP, a closed terminal).
"""


class InputError(ValueError):
    """A flag, file, row or model folder cannot be used: the message names it and the fix."""

    exit_code = 2


class GuardError(FloatingPointError):
    """Training met a non-finite number, and stopped before saving it."""

    exit_code = 3


class RewardError(RuntimeError):
    """A reward function raised, hung, died or returned something other than finite numbers."""

    exit_code = 4


class RolloutError(RuntimeError):
    """A rollout function raised, hung, made an impossible request or gave an invalid reward."""

    exit_code = 4


class SaveError(RuntimeError):
    """A checkpoint, or the last lines of metrics.jsonl, could not be written; earlier checkpoints are whole."""

    exit_code = 6


def refuse(is_wrong: object, message: str) -> None:
    """Raise InputError with the message if `is_wrong` is true."""
    if is_wrong:
        raise InputError(message)


def escaped(text: str) -> str:
    """Return text of user code for display, with control characters (a terminal's escape codes) spelt out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
