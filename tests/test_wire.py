"""Chunked coding and the body that goes around httpcore."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.chunked import BodyBroken, ChunkDecoder
from bench.client import Client
from bench.payload import Target, Timeouts, request_body
from bench.wire import Drainer
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


async def statuses(
    server: FaultServer, count: int, at_once: int, timeouts: Timeouts | None = None
) -> list[str]:
    target = Target(server.url, "m", timeouts=timeouts or Timeouts())
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


def test_an_answer_of_an_unknown_shape_holds_no_other_up():
    async def run() -> list[str]:
        async with FaultServer("odd_shape", every=5, interval=0.01) as server:
            return await statuses(server, 40, 20, Timeouts(first_token=30.0, idle=30.0, total=30.0))

    got = asyncio.run(run())
    assert got.count("server_error") == 8
    assert got.count("ok") == 32


def test_whatever_one_wire_meets_the_others_are_drained():
    drained = []

    class Stub:
        def __init__(self, name: str) -> None:
            self.name = name

        def drain(self) -> None:
            if self.name == "bad":
                raise RuntimeError("bad")
            drained.append(self.name)

    async def run() -> list[str]:
        told = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: told.append(str(context["exception"]))
        )
        drainer = Drainer()
        for name in ("bad", "a", "b"):
            drainer.add(Stub(name))
        await asyncio.sleep(0.01)
        drainer.add(Stub("bad"))
        await asyncio.sleep(0.01)
        drainer.add(Stub("c"))
        await asyncio.sleep(0.01)
        return told

    assert asyncio.run(run()) == ["bad", "bad"]
    assert drained == ["a", "b", "c"]
