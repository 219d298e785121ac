"""Reward functions and the worker processes that run them, reward models, and the queue of rewarded rollouts."""
