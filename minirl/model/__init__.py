"""The forward pass: configuration, layers, attention kernels, Hugging Face weights."""
