"""Remove secrets from files, which people share, and from printed text."""

import os
import re
from collections.abc import Mapping
from typing import Any

# Words of environment variables' names. Of the short ones PATH, PATTERN and AUTHOR are others.
_WORDS = r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(?<![A-Z])(?:PASS|PAT|O?AUTH)(?![A-Z]))"
_NAME = re.compile(_WORDS)
# Short values are also parts of other words: their names end with the word, unlike AUTH_TYPE and MAX_TOKENS.
_LAST_WORD = re.compile(rf"{_WORDS}(?:(?<=CREDENTIAL)S)?[_\d]*$")
_LONG = 8
_SHORTEST = 4
_NO_SECRETS = {"true", "false", "none", "null", "auto", "default", "enabled", "disabled"}
# Tokens of known services by their prefix, web tokens, and "user:password" in front of the "@" of a URL.
_TEXTS = (
    r"\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|wandb_v1_|xox[a-z]-|AIza)[\w-]{16,}",
    r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)",
)


def redacted(value: Any) -> Any:
    """Return the value (flags, or any JSON value) with "***" instead of each secret.

    Secrets are the values of environment variables whose names say so (TOKEN, KEY, SECRET, PASSWORD, PASS, PAT, AUTH,
    CREDENTIAL), texts that look like a token of a known service, and user names with passwords in URLs. A value of 4 to
    7 characters counts if the name ends with such a word, and is only removed as a whole word.
    """
    return _masked(value, _secrets())


def escaped(text: str) -> str:
    """Return the output of user code for display: without secrets, and with control characters spelt out.

    Control characters could be escape codes of a terminal.
    """
    shown: str = redacted(text)
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in shown)


def _secrets() -> re.Pattern[str]:
    """All secrets, those of the environment as it is now."""
    values = []
    for name, value in os.environ.items():
        is_switch = value.lower() in _NO_SECRETS
        if len(value) >= _LONG and _NAME.search(name.upper()) and not is_switch:
            values.append(re.escape(value))
        elif len(value) >= _SHORTEST and _LAST_WORD.search(name.upper()) and not is_switch:
            values.append(rf"(?<!\w){re.escape(value)}(?!\w)")
    return re.compile("|".join([*sorted(values, key=len, reverse=True), *_TEXTS]))


def _masked(value: Any, secrets: re.Pattern[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(item, secrets) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, secrets) for item in value]
    return secrets.sub("***", value) if isinstance(value, str) else value
