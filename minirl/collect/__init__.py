"""From prompts to the rewarded groups of rollouts of a step."""
