"""A folder for the path of Python, which runs `sitecustomize.py` when it starts."""
