"""Episodes: rollout functions, the turns that they request, and the runner that samples these turns on the engine."""
