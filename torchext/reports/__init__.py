"""Reports: their model, and how they are written, read and compared."""
