"""Fake CUDA devices: their functions, memory, streams, graphs and libraries."""
