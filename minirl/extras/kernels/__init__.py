"""CUDA-only kernels, each with a CPU twin. They are imported only when a tensor is on a GPU."""
