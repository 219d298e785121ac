"""Metrics, console lines, log files and progress bars."""
