"""Qwen3.5's Gated DeltaNet: the recurrence and the layer."""
