"""Code that runs in the processes of a suite, found by path: baseline processes must not import torchext."""
