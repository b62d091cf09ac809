"""Where a sweep's jobs run: processes of this machine, or workers of a Dask or Ray cluster."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sim.errors import BadInput

BACKENDS = ("loky", "dask", "ray")
ANSWER_WITHIN = 5.0  # seconds until an address counts as unreachable
_PORTS = {"dask": 8786, "ray": 10001}
_ADDRESS = re.compile(r"(?:[a-z]+://)?(\[[0-9a-fA-F:]+\]|[^:/\s]+)(?::(\d+))?/?")


@contextmanager
def backend(name: str, address: str | None = None, workers: int | None = None) -> Iterator[dict[str, Any]]:
    """Arguments for `joblib.Parallel` while the backend is up.

    Args:
        name: one of `BACKENDS`.
        address: of a running Dask scheduler or Ray head; without one a local cluster is started.
        workers: processes; None is one per core (of the local machine).

    Raises:
        BadInput: unknown backend, missing extra, or an address that nobody answers at.
    """
    count = workers or os.cpu_count() or 1
    if name not in BACKENDS:
        raise BadInput("--backend", name, f"must be one of {', '.join(BACKENDS)}")
    if name == "loky":
        if address is not None:
            raise BadInput("--address", address, "belongs to --backend dask or ray")
        yield {"n_jobs": count, "backend": "loky"}
        return
    if address is not None:
        check_address(name, address)
    with _dask(address, count) if name == "dask" else _ray(address, count) as arguments:
        yield arguments


def check_address(name: str, address: str) -> None:
    """Open and close a connection.

    Raises:
        BadInput: no address, or nobody answers there within seconds.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise BadInput("--address", address, f"must read HOST:PORT, e.g. localhost:{_PORTS[name]}")
    host, port = match[1].strip("[]"), int(match[2] or _PORTS[name])
    try:
        socket.create_connection((host, port), timeout=ANSWER_WITHIN).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "timed out"
        hint = f"no {name.capitalize()} answers at {host}:{port} ({reason})"
        raise BadInput("--address", address, hint) from None


@contextmanager
def _dask(address: str | None, count: int) -> Iterator[dict[str, Any]]:
    try:
        import distributed
    except ImportError:
        raise BadInput("--backend", "dask", "is not installed: pip install 'servecast[dask]'") from None
    cluster = None
    try:
        if address is None:
            cluster = distributed.LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None)
        where = cluster if cluster is not None else _with_scheme(address, "tcp")
        client = distributed.Client(where, timeout=ANSWER_WITHIN)
    except (OSError, TimeoutError, ValueError) as error:
        if cluster is not None:
            cluster.close()
        raise BadInput("--address", address, f"is no Dask scheduler ({error})") from None
    try:
        yield {"n_jobs": -1, "backend": "dask"}
    finally:
        client.close()
        if cluster is not None:
            cluster.close()


@contextmanager
def _ray(address: str | None, count: int) -> Iterator[dict[str, Any]]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise BadInput("--backend", "ray", "is not installed: pip install 'servecast[ray]'") from None
    started = not ray.is_initialized()
    if started:
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        try:
            if address is None:
                ray.init(num_cpus=count, **quiet)
            else:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise BadInput("--address", address, f"is no Ray head ({str(error).splitlines()[0]})") from None
    register_ray()
    try:
        yield {"n_jobs": count if address is None else -1, "backend": "ray"}
    finally:
        if started:
            ray.shutdown()


def _with_scheme(address: str | None, scheme: str) -> str:
    text = str(address)
    return text if "://" in text else f"{scheme}://{text}"
