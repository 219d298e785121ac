"""Remove secrets from values that are written to files, which people share."""

import os
import re
from collections.abc import Mapping
from typing import Any

# Environment variables whose values are secret.
_SECRET_NAMES = re.compile("TOKEN|KEY|SECRET|PASSWORD")
# Shorter values of such variables ("1", "none") are hardly secrets, and would be found inside other words.
_MIN_SECRET_LENGTH = 8
# Tokens of known services by their prefix, and "user:password" in front of the "@" of a URL.
_SECRET_TEXTS = re.compile(r"\b(hf_|sk-|ghp_|wandb_v1_)[\w-]{16,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def redacted(value: Any) -> Any:
    """Return the value (flags, or any JSON value) with "***" in place of each secret.

    Secrets are the values of environment variables whose names contain TOKEN, KEY, SECRET or PASSWORD, texts
    that look like a token of a known service, and user names with passwords in URLs.
    """
    if isinstance(value, Mapping):
        return {name: redacted(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    if not isinstance(value, str):
        return value
    for name, secret in os.environ.items():
        is_secret = _SECRET_NAMES.search(name.upper()) is not None
        if is_secret and len(secret) >= _MIN_SECRET_LENGTH:
            value = value.replace(secret, "***")
    return _SECRET_TEXTS.sub("***", value)
