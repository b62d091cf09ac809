"""The simulator: scenarios in, predicted benchmark results out."""
