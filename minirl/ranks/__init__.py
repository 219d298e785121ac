"""The processes of a run: the process group, and the watchdog that ends them together."""
