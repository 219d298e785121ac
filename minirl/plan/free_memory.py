"""The free memory of this machine, and bytes in readable form."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from minirl.ranks.process_group import local_world_size


def free_bytes(device: torch.device) -> int:
    """The free memory of this rank's GPU, or its share of the host's. Not collective."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes() // local_world_size()


def free_host_bytes() -> int:
    """The host's free memory, or the rest of the control group's limit if that is less."""
    (available,) = re.findall(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    free = 1024 * int(available)
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and limit.read_text().strip().isdecimal():
        # The kernel drops pages of files that were read when memory is short.
        (inactive,) = re.findall(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        used = int((group / "memory.current").read_text()) - int(inactive)
        free = min(free, int(limit.read_text()) - used)
    return free


def sum_of(parts: Mapping[str, float]) -> str:
    """The sum of bytes, and its parts, as text."""
    return f"{gb(sum(parts.values()))}: {listed(parts)}"


def listed(parts: Mapping[str, float]) -> str:
    """Bytes by name, as text."""
    return ", ".join(f"{name} {gb(num_bytes)}" for name, num_bytes in parts.items())


def gb(num_bytes: float) -> str:
    """A number of bytes as text, in GB (1e9) or MB (1e6)."""
    if num_bytes < 1e8:
        return f"{num_bytes / 1e6:.3g} MB"
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes < 1e12 else f"{num_bytes / 1e9:,.0f} GB"
