"""Kernels for CUDA alone, each with a twin on the CPU. They are imported when a tensor is on a GPU."""
