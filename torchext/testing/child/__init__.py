"""What runs in the processes of a suite. Those of the baseline must not import torchext, so this is found by path."""
