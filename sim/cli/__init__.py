"""The commands that predict, print and compare; click only."""
