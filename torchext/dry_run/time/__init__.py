"""A lower bound of the time of a step."""
