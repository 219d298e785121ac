"""Annex: what runs on CUDA alone, each with a twin on the CPU. Its files are imported when a tensor is on a GPU."""
