"""Adaptations of libraries that depend on GPUs or on other ranks: one file for each, with its name."""
