"""The engines: one folder each, which share words but no code that bends both."""
