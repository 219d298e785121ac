"""Qwen3.5's gated delta net: its recurrence and its layer."""
