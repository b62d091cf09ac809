"""Engines under test: started as a process or a container, or already running somewhere."""
