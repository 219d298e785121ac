"""Rank processes: startup, signals, errors, timing and the process group."""
