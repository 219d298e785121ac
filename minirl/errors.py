"""Errors that end a run deliberately, each with its own exit code.

The messages are written for the user and printed without a traceback. Any other exception is a bug: the run prints a
traceback and exits with code 1. On a stop signal, a run saves a checkpoint and exits with code 143 (SIGTERM), 130
(Ctrl-C) or 129 (SIGHUP, a closed terminal).
"""


class InputError(ValueError):
    """A flag, file, data row or model folder is unusable; the message states the cause and how to fix it."""

    exit_code = 2


class GuardError(FloatingPointError):
    """Training produced a non-finite number and stopped before saving it."""

    exit_code = 3


class RewardError(RuntimeError):
    """A reward function raised, hung, died or returned something other than finite numbers."""

    exit_code = 4


class RolloutError(RuntimeError):
    """A rollout function raised, hung, made an invalid request or returned an invalid reward."""

    exit_code = 4


class SaveError(RuntimeError):
    """A checkpoint or the last lines of metrics.jsonl could not be written; earlier checkpoints are intact."""

    exit_code = 6


def refuse(is_wrong: object, message: str) -> None:
    """Raise InputError with the message if `is_wrong` is true."""
    if is_wrong:
        raise InputError(message)


def escape_control_chars(text: str) -> str:
    """Escape control characters, such as terminal escape codes, in text from user code before it is printed."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
