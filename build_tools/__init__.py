"""Implementation of setup.py, except the description of the targets."""
