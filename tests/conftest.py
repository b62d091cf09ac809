"""Fixtures for tests of more than one module."""

import pytest


@pytest.fixture
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs in real time pass on a busy machine: how late a client may be has tests of its own."""
    monkeypatch.setattr("bench.overhead.SLIP_FLOOR", 30.0)
    monkeypatch.setattr("bench.overhead.CPU_LIMIT", 2.0)
    monkeypatch.setattr("bench.enrich.LAG_FLOOR_MS", 30_000.0)
