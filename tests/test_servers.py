import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.failures import EngineFailed
from bench.fetch import fetch
from bench.servers.base import (
    Exit,
    LaunchSpec,
    free_port,
    public_command,
    public_env,
    require_free_port,
)
from bench.servers.process import ProcessServer
from bench.servers.ready import Readiness, http_look, wait_ready
from bench.servers.url import UrlServer
from sim.errors import BadInput
from sim.interrupts import as_keyboard_interrupt, uninterrupted

FAKE = str(Path(__file__).parent / "fakes" / "fake_engine.py")


def spec(tmp_path, mode="", **env):
    command = (sys.executable, "-S", FAKE, "serve", "model", "--served-model-name", "m")
    pids = str(tmp_path / "pids")
    return LaunchSpec(
        "vllm",
        command,
        "m",
        tmp_path / "engine.log",
        env={"FAKE_MODE": mode, "FAKE_PIDS": pids, **env},
    )


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(tmp_path):
    return [int(line) for line in (tmp_path / "pids").read_text().split()]


def ready(server, **options):
    return wait_ready(server, http_look(server.base_url, "m"), "m", poll=0.02, **options)


@pytest.fixture
def stopping():
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.callback(server.stop)


def test_a_process_from_start_to_stop(tmp_path, stopping):
    server = ProcessServer(spec(tmp_path))
    stopping(server)
    server.start()
    times = ready(server)
    names = [name for name, _ in times.milestones]
    assert names[-1] == "ready"
    assert {"configured", "kv_cache", "http", "port", "health"} <= set(names)
    assert sum(times.phases().values()) == pytest.approx(times.ready)
    assert "GPU KV cache size: 1,600 tokens" in server.logs()
    assert server.exited() is None
    server.stop()
    assert not any(alive(pid) for pid in pids(tmp_path))
    assert fetch(server.base_url, "/health").status == 0
    server.stop()


def test_an_engine_that_dies_while_starting_is_told_at_once_with_its_reason(tmp_path, stopping):
    log = "ValueError: No available memory for the cache blocks."
    server = ProcessServer(spec(tmp_path, "dies", FAKE_LOG=log))
    stopping(server)
    server.start()
    with pytest.raises(EngineFailed) as caught:
        ready(server, stall_timeout=60)
    assert caught.value.failure.kind == "negative_kv"
    assert server.exited().code == 3


def test_children_that_left_the_session_and_ignore_sigterm_go_too(tmp_path, stopping):
    server = ProcessServer(spec(tmp_path, "stubborn"), patience=0.4)
    stopping(server)
    server.start()
    ready(server)
    assert len(pids(tmp_path)) == 2
    assert all(alive(pid) for pid in pids(tmp_path))
    server.stop()
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_nobody_else_is_touched(tmp_path, stopping):
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as bystander:
        server = ProcessServer(spec(tmp_path))
        stopping(server)
        server.start()
        server.stop()
        assert bystander.poll() is None
        bystander.kill()


def test_workers_are_found_though_the_leader_was_killed(tmp_path, stopping):
    server = ProcessServer(spec(tmp_path, "stubborn"), patience=0.4)
    stopping(server)
    server.start()
    ready(server)
    os.kill(server.pid, signal.SIGKILL)
    while server.exited() is None:
        time.sleep(0.01)
    assert server.exited() == Exit(-9)
    server.stop()
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_no_such_program(tmp_path):
    server = ProcessServer(LaunchSpec("vllm", ("/no/such/vllm", "serve"), "m", tmp_path / "log"))
    with pytest.raises(EngineFailed, match="command_not_found"):
        server.start()
    server.stop()


def test_user_words_never_meet_a_shell(tmp_path, stopping):
    canary = tmp_path / "canary"
    words = (*spec(tmp_path).command, "--note", f"$(touch {canary}); touch {canary}")
    server = ProcessServer(LaunchSpec("vllm", words, "m", tmp_path / "log"))
    stopping(server)
    server.start()
    ready(server)
    assert not canary.exists()


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineFailed, match="port_taken"):
            require_free_port(port)
    assert require_free_port(free_port())


def test_wrong_model(tmp_path, stopping):
    server = ProcessServer(spec(tmp_path, "wrong_model"))
    stopping(server)
    server.start()
    with pytest.raises(EngineFailed, match="lists another, not m"):
        ready(server)


class Scripted:
    """A server and a clock that follow a timeline of (time, what is seen, exit)."""

    kind = "docker"
    base_url = "http://127.0.0.1:1"

    def __init__(self, timeline):
        self.now = 0.0
        self.timeline = timeline

    def _state(self):
        return next(state for time_, state in reversed([(0.0, {}), *self.timeline]) if time_ <= self.now)

    def exited(self):
        code = self._state().get("exit")
        return None if code is None else Exit(code)

    def logs(self):
        return "\n".join(state["log"] for at, state in self.timeline if at <= self.now and "log" in state)

    def log_size(self):
        return len(self.logs())

    def look(self):
        state = self._state()
        return Readiness(
            port_open="health" in state,
            health=state.get("health") == 200,
            models=state.get("models"),
            completion=state.get("completion", False),
            locked=state.get("locked", False),
        )

    def sleep(self, seconds):
        self.now += seconds

    def wait(self, **options):
        return wait_ready(self, self.look, "m", poll=1.0, clock=lambda: self.now, sleep=self.sleep, **options)


def test_ready_is_not_an_open_port_nor_a_listed_model():
    server = Scripted(
        [
            (20.0, {"health": 503, "models": ("m",)}),
            (60.0, {"health": 503, "log": "Capturing CUDA graphs 40%"}),
            (90.0, {"health": 200, "models": ("m",)}),
            (97.0, {"health": 200, "models": ("m",), "completion": True}),
        ]
    )
    times = server.wait(stall_timeout=50)
    assert times.ready == 97.0
    assert dict(times.milestones)["port"] == 20.0
    assert dict(times.milestones)["health"] == 90.0


def test_what_the_log_says_while_a_look_finds_everything_counts_as_before_ready():
    class Quick(Scripted):
        def look(self):
            self.now += 5.0  # a look takes a while: the engine may come up within a single one
            return super().look()

    server = Quick([(3.0, {"log": "Application startup complete", "models": ("m",), "completion": True})])
    assert [name for name, _ in server.wait().milestones] == ["http", "ready"]


def test_an_exit_ends_the_wait_when_it_happens():
    server = Scripted([(15.0, {"exit": 1})])
    with pytest.raises(EngineFailed, match="engine_exited_during_startup"):
        server.wait(stall_timeout=3600)
    assert server.now == 15.0


def test_an_address_where_nothing_listens_is_no_engine_that_exited():
    server = Scripted([(6.0, {"exit": -1})])
    server.kind = "url"
    with pytest.raises(EngineFailed, match=r"connection_refused.*nothing listens there") as failed:
        server.wait(stall_timeout=3600)
    assert "exited" not in str(failed.value)
    assert failed.value.exit_status == 1


def test_a_start_may_take_an_hour_while_it_moves():
    steps = [(60.0 * minute, {"log": f"Downloading {minute} %"}) for minute in range(1, 61)]
    end = (3660.0, {"health": 200, "models": ("m",), "completion": True})
    assert Scripted([*steps, end]).wait(stall_timeout=120).ready == 3660.0


def test_without_a_log_a_start_that_stalls_says_what_was_seen():
    server = Scripted([(10.0, {"health": 503})])
    with pytest.raises(EngineFailed, match=r"start_stalled: .*hangs \(it says nothing\)"):
        server.wait(stall_timeout=100)


@contextlib.contextmanager
def answering(statuses, body=b""):
    """A server with the status named for each path, and 404 elsewhere; gives its address and what it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            got.append((self.path, self.headers["authorization"]))
            self.send_response(statuses.get(self.path, 404))
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("health", "is_ready"), [(404, True), (200, True), (503, False)])
def test_a_server_without_a_health_route_is_told_by_what_it_completes(health, is_ready):
    statuses = {"/health": health, "/v1/models": 200, "/v1/completions": 200}
    with answering(statuses, b'{"data": [{"id": "m"}], "choices": [{"text": "x"}]}') as (address, _):
        assert http_look(f"http://{address}", "m")().completion == is_ready


def test_a_start_that_does_not_move_is_given_up():
    server = Scripted([(10.0, {"log": "Loading weights"})])
    with pytest.raises(EngineFailed, match=r"start_stalled \(Loading weights\)"):
        server.wait(stall_timeout=100)
    assert server.now == pytest.approx(111, abs=2)


def test_a_server_that_lists_its_model_but_completes_nothing_is_given_up():
    server = Scripted([(5.0, {"health": 200, "models": ("m",)})])
    with pytest.raises(EngineFailed, match="no_completion"):
        server.wait(stall_timeout=3600)


def test_a_server_that_wants_a_key_says_so_at_once():
    server = Scripted([(5.0, {"health": 200, "locked": True})])
    with pytest.raises(EngineFailed, match="OPENAI_API_KEY"):
        server.wait(stall_timeout=3600)
    assert server.now == 5.0


@pytest.mark.parametrize(
    "statuses", [{"/health": 401}, {"/health": 403}, {"/health": 200, "/v1/models": 401}]
)
def test_a_server_that_wants_a_key_is_locked_wherever_it_says_so(statuses):
    with answering(statuses) as (address, _):
        assert http_look(f"http://{address}", "m")().locked


@pytest.mark.parametrize("statuses", [{"/health": 200}, {"/health": 307}])
def test_an_address_without_an_api_is_given_up_after_a_grace(statuses, monkeypatch):
    monkeypatch.setattr("bench.servers.ready._GRACE_S", 0.1)
    with answering(statuses) as (address, _), pytest.raises(EngineFailed, match=r"no_api.*--base-url"):
        ready(UrlServer(f"http://{address}"), stall_timeout=20)


def test_an_engine_of_ours_may_have_no_api_yet():
    class Early(Scripted):
        def look(self):
            return replace(super().look(), elsewhere=self.now < 100.0)

    assert Early([(100.0, {"health": 200, "models": ("m",), "completion": True})]).wait().ready == 100.0


def test_a_trailing_v1_of_an_address_is_not_asked_for_twice(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with answering({"/health": 200}) as (address, got):
        assert UrlServer(f"http://bob:hun%40ter2@{address}/v1/").exited() is None
    assert got == [("/health", "Basic Ym9iOmh1bkB0ZXIy")]


def test_a_host_that_is_none_is_told_after_a_grace(monkeypatch):
    def fails(*args, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.create_connection", fails)
    monkeypatch.setattr("bench.servers.url.GRACE", 0.1)
    with pytest.raises(EngineFailed, match=r"unknown_host.*spelling"):
        ready(UrlServer("http://no.such.host:8000"), stall_timeout=20)


@pytest.mark.parametrize("url", ["http://h:99999", "http://h:80x"])
def test_a_port_that_is_none_is_refused(url):
    with pytest.raises(BadInput, match="port"):
        UrlServer(url)


def test_a_url_server_is_gone_only_after_it_was_there(tmp_path, stopping):
    engine = ProcessServer(spec(tmp_path))
    stopping(engine)
    engine.start()
    server = UrlServer(engine.base_url)
    server.start()
    ready(engine)
    assert server.exited() is None
    server.stop()
    assert server.exited() is None
    engine.stop()
    assert server.exited() is not None
    assert UrlServer(engine.base_url).exited() is None


def test_addresses_are_checked_and_shown_without_a_password():
    with pytest.raises(BadInput, match="--base-url"):
        UrlServer("ftp://x")
    assert "secret" not in str(UrlServer("http://user:secret@127.0.0.1:1").facts())


def test_secrets_are_not_shown():
    assert public_command(("vllm", "--api-key", "s1", "--max-num-seqs", "4", "--hf-token=s2")) == [
        "vllm",
        "--api-key",
        "***",
        "--max-num-seqs",
        "4",
        "--hf-token=***",
    ]
    assert public_env({"HF_TOKEN": "s", "VLLM_X": "1"}) == {"HF_TOKEN": "***", "VLLM_X": "1"}


@pytest.mark.parametrize("name", ["MY_APIKEY", "DB_PASSWD", "AWS_CREDENTIALS", "HF_TOKEN", "KEY_OF_MINE"])
def test_variables_of_secret_names_are_not_shown(name):
    assert public_env({name: "S3CRET"}) == {name: "***"}


def test_secrets_in_values_are_not_shown():
    env = {"https_proxy": "http://bob:S3CRET@proxy:3128", "CACHE": "redis://:S3CRET@host/0"}
    assert public_env(env) == {"https_proxy": "http://bob:***@proxy:3128", "CACHE": "redis://:***@host/0"}
    words = public_command(("vllm", "--api_key", "S3CRET", "--hf-overrides", '{"auth_token": "S3CRET"}'))
    assert "S3CRET" not in " ".join(words)


def test_interrupts_wait_until_the_work_is_done():
    done = []

    def work():
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        done.append("never")

    with as_keyboard_interrupt(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]


def test_sigterm_and_sighup_are_ctrl_c_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        with as_keyboard_interrupt(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with as_keyboard_interrupt(), uninterrupted():
        signal.raise_signal(signal.SIGHUP)  # nohup asked for this
    signal.signal(signal.SIGHUP, hangup)


def test_other_threads_have_no_signals_to_hold():
    ran = []

    def work():
        with as_keyboard_interrupt(), uninterrupted():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]
