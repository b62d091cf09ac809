"""The clock: a replica that steps one engine under one client, in SimPy, step by step or in leaps."""
