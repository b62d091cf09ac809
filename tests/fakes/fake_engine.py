"""A program that starts, answers and dies as an engine does: for launchers, sweeps and Ctrl-C.

    python fake_engine.py serve MODEL --served-model-name NAME --host H --port P

Environment: FAKE_MODE "" | "dies" (prints FAKE_LOG and exits with 3) | "slow" (never gets ready) | "stubborn"
(ignores SIGTERM, with a child in a session of its own) | "exits_after" (SIGKILLs itself after FAKE_REQUESTS
completions) | "wrong_model"; FAKE_TOKEN_S seconds per token; FAKE_PIDS a file that gets the pids.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODE = os.environ.get("FAKE_MODE", "")
TOKEN_S = float(os.environ.get("FAKE_TOKEN_S", "0.001"))
LOCK = threading.Lock()
COUNTS = {"finished": 0, "prompt": 0, "generated": 0, "running": 0}
STARTED = time.time()


def argument(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


MODEL = argument("--served-model-name", sys.argv[2] if len(sys.argv) > 2 else "m")


def metrics() -> str:
    engine = f'{{engine="0",model_name="{MODEL}"}}'
    figures = {
        "process_start_time_seconds": f"{STARTED}",
        f"vllm:num_requests_running{engine}": COUNTS["running"],
        f"vllm:num_requests_waiting{engine}": 0,
        f"vllm:kv_cache_usage_perc{engine}": 0.25,
        f"vllm:num_preemptions_total{engine}": 0,
        f"vllm:prefix_cache_queries_total{engine}": COUNTS["prompt"],
        f"vllm:prefix_cache_hits_total{engine}": 0,
        f"vllm:prompt_tokens_total{engine}": COUNTS["prompt"],
        f"vllm:generation_tokens_total{engine}": COUNTS["generated"],
        f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{MODEL}"}}': COUNTS[
            "finished"
        ],
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",enable_prefix_caching="True"}': 1,
    }
    return "# TYPE vllm:num_requests_running gauge\n" + "".join(f"{k} {v}\n" for k, v in figures.items())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # tokens leave as they come

    def log_message(self, *args: Any) -> None:
        pass

    def _send(self, status: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(503 if MODE == "slow" else 200, "")
        elif self.path == "/v1/models":
            name = "another" if MODE == "wrong_model" else MODEL
            self._send(200, json.dumps({"data": [{"id": name, "max_model_len": 4096}]}))
        elif self.path == "/metrics":
            self._send(200, metrics(), "text/plain")
        else:
            self._send(404, "{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = asked["prompt"]
        n_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        n_out = asked["max_tokens"]
        with LOCK:
            COUNTS["running"] += 1
        if asked.get("stream"):
            self._stream(n_prompt, n_out)
        else:
            choice = {"index": 0, "text": "x" * n_out, "finish_reason": "length"}
            self._send(200, json.dumps({"model": MODEL, "choices": [choice]}))
        with LOCK:
            COUNTS["running"] -= 1
            COUNTS["finished"] += 1
            COUNTS["prompt"] += n_prompt
            COUNTS["generated"] += n_out
            if MODE == "exits_after" and COUNTS["finished"] > int(os.environ["FAKE_REQUESTS"]):
                os.kill(os.getpid(), signal.SIGKILL)

    def _stream(self, n_prompt: int, n_out: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i in range(n_out):
            time.sleep(TOKEN_S)
            finish = "length" if i == n_out - 1 else None
            usage = {"prompt_tokens": n_prompt, "completion_tokens": i + 1, "total_tokens": n_prompt + i + 1}
            choice = {"index": 0, "text": "x ", "finish_reason": finish}
            self._chunk({"model": MODEL, "choices": [choice], "usage": usage})
        self._chunk({"model": MODEL, "choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: dict[str, Any]) -> None:
        self._write(f"data: {json.dumps(event)}\n\n".encode())

    def _write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that hang up are part of the tests


def note_pid(pid: int) -> None:
    if "FAKE_PIDS" in os.environ:
        with Path(os.environ["FAKE_PIDS"]).open("a") as file:
            file.write(f"{pid}\n")


def main() -> None:
    note_pid(os.getpid())
    given = {"model": sys.argv[2], "max_num_seqs": 4, "api_key": ["S3CRET"]}
    print(
        f"(APIServer pid={os.getpid()}) INFO 12-01 10:00:00 [utils.py:1] non-default args: {given}",
        flush=True,
    )
    if MODE == "dies":
        print(os.environ.get("FAKE_LOG", "ValueError: no good"), flush=True)
        sys.exit(3)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"],
            start_new_session=True,
        )
        note_pid(child.pid)
    print(
        "INFO [kv.py:1] GPU KV cache size: 1,600 tokens, Maximum concurrency for 800 tokens per "
        "request: 2.00x"
    )
    server = Server((argument("--host"), int(argument("--port"))), Handler)
    print("INFO:     Application startup complete.", flush=True)
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
