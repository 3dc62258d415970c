"""What several features need, and none of them owns."""
