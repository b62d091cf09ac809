"""Calibration: measured runs in, profiles and verdicts out."""
