"""Episodes: rollout functions, the turns that they request, and the runner that samples them on the engine."""
