"""Qwen3.5's gated delta net: the recurrence and the layer."""
