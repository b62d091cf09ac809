"""Where a sweep's jobs run: processes of this machine, or workers of a Dask or Ray cluster."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sim.errors import BadInput

BACKENDS = ("loky", "dask", "ray")
ANSWER_WITHIN = 5.0  # seconds until an address counts as unreachable
JOIN_WITHIN = 15.0  # a head that is there lets a client in within seconds
RAY_BATCH = 8
# Simulations leave a busy machine's own raylet little time to answer.
PATIENT = {"health_check_timeout_ms": 60_000, "health_check_failure_threshold": 20}
_PORTS = {"dask": 8786, "ray": 6379}
_MISSING = "is not installed; in servecast's folder: pip install '.[{}]'"
_RAY_CLIENT_PORT = 10001  # of `ray://`, which needs Ray's own extra "client"
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
    usual = _RAY_CLIENT_PORT if address.startswith("ray://") else _PORTS[name]
    host, port = match[1].strip("[]"), int(match[2] or usual)
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
        raise BadInput("--backend", "dask", _MISSING.format("dask")) from None
    cluster = None
    try:
        if address is None:
            cluster = distributed.LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None)
            client = distributed.Client(cluster, timeout=ANSWER_WITHIN)
        else:
            where = _with_scheme(address, "tcp")
            # The time-out of its own does not count once somebody has taken the call.
            client = within(JOIN_WITHIN, lambda: distributed.Client(where, timeout=ANSWER_WITHIN))
    except Exception as error:  # whatever a stranger at that port may answer
        if cluster is not None:
            cluster.close()
        raise BadInput("--address", address, f"is no Dask scheduler ({_one_line(error)})") from None
    from joblib import parallel_config

    try:
        # Only the context manager knows the backend by name before it was ever used.
        with parallel_config(backend="dask"):
            yield {"n_jobs": -1}
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
        raise BadInput("--backend", "ray", _MISSING.format("ray")) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    started = not ray.is_initialized()
    if started:
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        try:
            if address is None:
                ray.init(num_cpus=count, _system_config=PATIENT, **quiet)
            else:
                within(
                    JOIN_WITHIN,
                    lambda: ray.init(address=address, log_to_driver=False, configure_logging=False),
                )
        except Exception as error:  # whatever a stranger at that port may answer
            raise BadInput("--address", address, f"is no Ray head ({_one_line(error)})") from None
    register_ray()
    try:
        # Ray's pool takes a fifth of a second per task, however small, and does not batch them itself.
        yield {"n_jobs": count if address is None else -1, "backend": "ray", "batch_size": RAY_BATCH}
    finally:
        if started:
            ray.shutdown()


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns if it does so in time; what still hangs then is left to a daemon thread.

    Raises:
        TimeoutError, or what `call` raises.
    """
    returned: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if raised:
        raise raised[0]
    return returned[0]


def _one_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _with_scheme(address: str, scheme: str) -> str:
    return address if "://" in address else f"{scheme}://{address}"
