"""Predicted beside measured: same rules on both sides, and how far to trust the difference."""
