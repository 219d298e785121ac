"""Run agents, tools and environments that were not written for minirl. Only runs that use them import this package."""
