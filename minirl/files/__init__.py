"""Atomic writes, JSON files, safetensors files and user code."""
