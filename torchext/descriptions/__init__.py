"""Descriptions of GPUs and of runs, which commands use without importing PyTorch."""
