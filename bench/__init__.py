"""The bench: the same scenario on a real engine, measured and distrusted."""
