"""CUDA-only kernels, each with a CPU counterpart. They are imported only when a tensor is on a GPU."""
