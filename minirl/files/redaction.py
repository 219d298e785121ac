"""Values without secrets, for files that people share."""

import os
import re
from collections.abc import Mapping
from typing import Any


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
