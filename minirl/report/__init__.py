"""What a run says: metrics, the console, files and Weights & Biases."""
