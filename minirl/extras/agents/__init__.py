"""Run agents, tools and environments that were not written for minirl. Other runs do not import this package."""
