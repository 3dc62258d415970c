"""A folder for `PYTHONPATH`: Python runs its `sitecustomize.py` at startup."""
