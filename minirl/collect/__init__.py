"""From prompts to rewarded rollouts: groups of them are collected for a step."""
