"""Step-time models: a batch's shape in, seconds out."""
