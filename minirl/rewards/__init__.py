"""What a completion is worth: reward functions, their worker processes, reward models."""
