"""What the scripts' flags have in common: presets, and refusals that name the flag. Flags come as plain values."""

import argparse
import os
import re
from collections.abc import Mapping
from typing import Any

from minirl.errors import InputError


def chosen_preset(flag: str, presets: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The preset that the command line names with `flag`, by default the first; all else there is left alone."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument(flag, dest="name", default=next(iter(presets)))
    return presets.get(early.parse_known_args()[0].name, {})


def refuse(is_wrong: object, message: str) -> None:
    """Raise InputError with the message if something is wrong."""
    if is_wrong:
        raise InputError(message)


def check_each(
    given: Mapping[str, Any], defaults: Mapping[str, Any], *, positive: str, needs: Mapping[str, str]
) -> None:
    """Refuse numbers that are negative or NaN, and fields that are set in vain.

    `positive`: fields (names, space-separated) that must not be 0 either. needs[field] is the field without which it
    has no effect.
    """
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')} {value}"
        if isinstance(value, int | float):
            refuse(not value >= 0, f"{flag}: must not be negative")
            refuse(name in positive.split() and value == 0, f"{flag}: must be greater than 0")
        if value != defaults[name] and name in needs:
            other = needs[name]
            refuse(given[other] in (0, "none"), f"{flag}: has no effect without --{other.replace('_', '-')}")


def redacted(value: Any) -> Any:
    """The flags (or any JSON value) for a file, without secrets.

    Those are values of environment variables that are called TOKEN, KEY, SECRET or PASSWORD, what looks like a token of
    a known service, and passwords in addresses.
    """
    if isinstance(value, Mapping):
        return {name: redacted(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    if not isinstance(value, str):
        return value
    for name, secret in os.environ.items():
        if re.search("TOKEN|KEY|SECRET|PASSWORD", name.upper()) and len(secret) >= 8:
            value = value.replace(secret, "***")
    return re.sub(r"\b(hf_|sk-|ghp_|wandb_v1_)[\w-]{16,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)", "***", value)
