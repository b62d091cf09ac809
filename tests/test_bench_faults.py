"""Every fault over a real socket: its class, and that none of them counts as a success."""

import asyncio
from dataclasses import replace

import pytest

from bench.client import Client, Exchange
from bench.payload import Target, Timeouts, request_body
from tests.fakes.fault_server import FaultServer
from tests.fakes.faults import FAULTS

GENEROUS = Timeouts(connect=20.0, first_token=20.0, idle=20.0, total=20.0)
FINE = {"none", "no_done", "utf8_split", "never_ends", "until_close", "sized_stream"}
CLASSES = {
    "reset_before_headers": ("server_error", ""),
    "close_before_headers": ("server_error", ""),
    "reset_in_headers": ("server_error", ""),
    "reset_after_headers": ("truncated", ""),
    "reset_mid_token": ("truncated", ""),
    "end_mid_stream": ("truncated", ""),
    "http_400": ("refused", ""),
    "http_404": ("refused", ""),
    "http_429": ("refused", ""),
    "http_500": ("server_error", ""),
    "http_503": ("server_error", ""),
    "echoes_key": ("refused", ""),
    "error_first": ("server_error", ""),
    "error_after_tokens": ("server_error", ""),
    "error_event": ("server_error", ""),
    "error_as_json": ("server_error", ""),
    "not_streamed": ("server_error", ""),
    "abort_reason": ("server_error", ""),
    "empty": ("empty", ""),
    "half_utf8": ("server_error", ""),
    "half_utf8_end": ("truncated", ""),
    "long_line": ("server_error", ""),
    "slow_loris": ("timeout", "first_token"),
    "slow_loris_headers": ("timeout", "first_token"),
    "drips_tokens": ("timeout", "total"),
    "stops_answering": ("timeout", "idle"),
    "never_answers": ("timeout", "first_token"),
    "wrong_model": ("server_error", ""),
    "bad_json": ("server_error", ""),
    "odd_shape": ("server_error", ""),
    "bad_chunk_size": ("truncated", ""),
}


async def exchange(fault: str, timeouts: Timeouts = GENEROUS, endpoint: str = "/v1/completions") -> Exchange:
    async with FaultServer(fault) as server:
        target = Target(server.url, "m", endpoint, timeouts=timeouts)
        async with Client(target) as client:
            prompt = [1, 2, 3] if target.takes_token_ids else "one two three"
            return await client.send(request_body(target, prompt, 4))


def test_every_fault_has_a_class_here():
    assert set(CLASSES) | FINE == {"none", *FAULTS}
    assert not set(CLASSES) & FINE


@pytest.mark.parametrize("fault", sorted(CLASSES))
def test_fault_is_classified(fault, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    expected = CLASSES[fault]
    # Only the limit that is to be met is tight, so that a busy machine meets no other.
    timeouts = replace(GENEROUS, **{expected[1]: 0.3}) if expected[1] else GENEROUS
    got = asyncio.run(exchange(fault, timeouts))
    assert (got.outcome.status, got.timeout) == expected
    assert got.outcome.status != "ok"
    assert got.outcome.detail or got.outcome.status == "empty"
    assert "sk-secret" not in repr(got)


@pytest.mark.parametrize("fault", sorted(FINE))
def test_odd_but_complete_answers_are_successes(fault):
    got = asyncio.run(exchange(fault))
    assert got.outcome.status == "ok", got.outcome.detail
    assert got.outcome.first_token is not None


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("fault", ["none", "error_after_tokens", "abort_reason", "end_mid_stream"])
def test_other_endpoints_tell_good_from_bad(endpoint, fault):
    got = asyncio.run(exchange(fault, endpoint=endpoint))
    assert (got.outcome.status == "ok") == (fault == "none")


def test_nobody_listening_is_refused():
    async def run() -> Exchange:
        async with FaultServer() as server:
            url = server.url
        target = Target(url, "m", timeouts=GENEROUS)
        async with Client(target) as client:
            return await client.send(request_body(target, [1], 1))

    got = asyncio.run(run())
    assert got.outcome.status == "refused"
    assert got.connected is None


def test_partial_tokens_of_a_failed_answer_are_kept():
    got = asyncio.run(exchange("error_after_tokens"))
    assert got.outcome.output_tokens == 2
    assert got.outcome.error_code == 500
    assert "engine died" in got.outcome.detail


def test_an_error_before_any_token_has_neither_time_nor_tokens():
    got = asyncio.run(exchange("error_first"))
    assert got.outcome.first_token is None
    assert got.outcome.output_tokens == 0
