"""Report on a run: metrics, console lines, log files and Weights & Biases."""
