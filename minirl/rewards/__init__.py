"""Reward functions, the worker processes that run them, reward models, and rollouts with their rewards."""
