"""From prompts to rewarded rollouts: episodes run on the engine, groups of them are collected for a step."""
