"""Models: a config.json read, its layers and weights counted, and the table of those that are shipped."""
