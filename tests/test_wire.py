"""Chunked coding and the body that goes around httpcore."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.chunked import BodyBroken, ChunkDecoder
from bench.client import Client
from bench.payload import Target, request_body
from tests.fakes.fault_server import FaultServer


def encode(*payloads: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in payloads) + b"0\r\n\r\n"


def decode(*reads: bytes) -> tuple[bytes, bytes | None]:
    """Payload, and what is left from the last chunk on."""
    decoder = ChunkDecoder()
    payload = b""
    for i, read in enumerate(reads):
        payload += decoder.feed(read)
        if decoder.rest is not None:
            return payload, decoder.rest + b"".join(reads[i + 1 :])
    return payload, None


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_any_cut_gives_the_same_payload(payloads, draw):
    stream = encode(*payloads)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decode(*reads) == (b"".join(payloads), b"0\r\n\r\n")


def test_extensions_and_upper_case_sizes():
    assert decode(b"A;name=v\r\n0123456789\r\n0\r\nx: y\r\n\r\n") == (b"0123456789", b"0\r\nx: y\r\n\r\n")


@pytest.mark.parametrize(
    "stream", [b"zz\r\nab\r\n", b"-1\r\nab\r\n", b"\r\nab", b"2\r\nabc\r\n0\r\n\r\n", b"1" * 2000]
)
def test_broken_framing_is_noticed(stream):
    with pytest.raises(BodyBroken):
        decode(stream)


async def statuses(server: FaultServer, count: int, at_once: int) -> list[str]:
    target = Target(server.url, "m")
    body = request_body(target, [1, 2], 3)
    got: list[str] = []
    async with Client(target) as client:
        gate = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with gate:
                got.append((await client.send(body)).outcome.status)

        await asyncio.gather(*(one() for _ in range(count)))
    return got


def test_connections_are_kept_alive_and_as_many_as_needed():
    async def run() -> tuple[list[str], int, int]:
        async with FaultServer(interval=0.005) as server:
            got = await statuses(server, 60, 20)
            return got, server.connections, server.in_flight_peak

    got, connections, peak = asyncio.run(run())
    assert got == ["ok"] * 60
    assert peak == 20
    assert connections == 20


def test_more_streams_than_httpx_would_open_by_default():
    async def run() -> tuple[list[str], int]:
        async with FaultServer(first_delay=0.5) as server:
            got = await statuses(server, 150, 150)
            return got, server.in_flight_peak

    got, peak = asyncio.run(run())
    assert got == ["ok"] * 150
    assert peak == 150


def test_a_broken_connection_is_not_used_again():
    async def run() -> list[str]:
        async with FaultServer("reset_mid_token", every=3) as server:
            return await statuses(server, 30, 3)

    got = asyncio.run(run())
    assert got.count("truncated") == 10
    assert got.count("ok") == 20
