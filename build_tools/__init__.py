"""What setup.py is made of, beside the description of what is built."""
