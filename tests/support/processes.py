"""Check whether processes run, and limit file sizes."""

import resource
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_limit(num_bytes):
    """Make writes beyond this file size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def is_alive(pid):
    """Return whether a process is running. Zombies do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
