"""The processes of a run: how each begins and ends, and the process group."""
