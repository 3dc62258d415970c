"""The processes of ranks: how they are started, watched and ended, and their reports."""
