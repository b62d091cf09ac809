"""Workloads: who asks for what, when."""
