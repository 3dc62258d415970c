"""Advice about the memory of a training step: remedies, the search for them, and what they cost."""
