"""Run agents, tools and environments that were not written for minirl. Only their runs import this package."""
