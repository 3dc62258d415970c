"""Tools that several features share."""
