"""A fake OpenAI-compatible server that can be told to misbehave.

async with FaultServer("reset_mid_token") as server: ...     # in the caller's loop
with fault_server_thread("http_503") as url: ...              # in a thread of its own
python -m tests.fakes.fault_server --fault no_done --port 9000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tests.fakes.faults import FAULTS
from tests.fakes.stream_server import StreamServer


class FaultServer(StreamServer):
    """A `StreamServer` with one of the named faults, or "none"."""

    def __init__(self, fault: str = "none", **options: Any) -> None:
        super().__init__(None if fault == "none" else FAULTS[fault], **options)


@contextlib.contextmanager
def fault_server_thread(fault: str = "none", **options: Any) -> Iterator[str]:
    """Run a `FaultServer` in a thread; gives its URL."""
    started = threading.Event()
    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop
    url = ""

    async def main() -> None:
        nonlocal stop, loop, url
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with FaultServer(fault, **options) as server:
            url = server.url
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


async def _main(options: argparse.Namespace) -> None:
    async with FaultServer(
        options.fault, model=options.model, interval=options.interval, port=options.port
    ) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="none", choices=["none", *sorted(FAULTS)])
    parser.add_argument("--model", default="m")
    parser.add_argument("--interval", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_main(parser.parse_args()))
