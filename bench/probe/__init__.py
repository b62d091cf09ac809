"""A step recorder for a live vLLM, and the reading of what it wrote.

`servecast_step_probe.py` in this folder runs inside the engine; nothing else here does.
"""
