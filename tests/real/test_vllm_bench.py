"""`servecast bench` on a real vLLM: facts that the prompts imply, never timings."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from bench.fetch import fetch
from bench.probe.reading import read_steps
from sim.results import BenchResult
from sim.results_io.files import read_result
from tests.real.bench_runs import Engine, start

pytestmark = pytest.mark.real

PREFIX, SUFFIX, OUT, BLOCK, PROMPTS = 256, 48, 8, 32, 12
# What may be said against a run on a machine that is busy with something else; everything else is a fault.
TIMING = {"client_lag", "client_limited", "cold_start"}


@pytest.fixture(params=["process", "docker"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(f"{request.param}_engine")


def serve(model: Path, flags: str = "") -> str:
    return (
        f"vllm serve {model} --served-model-name m --max-model-len 1024 --max-num-seqs 16 "
        f"--max-num-batched-tokens 512 --block-size {BLOCK} {flags}"
    )


def random_load(prompts: int, concurrency: int, tokens_in: int = 64, tokens_out: int = 16) -> str:
    return (
        f"--dataset-name random --random-input-len {tokens_in} --random-output-len {tokens_out} "
        f"--num-prompts {prompts} --max-concurrency {concurrency}"
    )


def reasons(result: BenchResult) -> set[str]:
    return {note.subject for note in result.verdict.reasons}


def test_what_is_measured_is_what_the_prompts_imply(engine: Engine, model: Path, tmp_path: Path) -> None:
    load = random_load(PROMPTS, 1, SUFFIX, OUT) + f" --random-prefix-len {PREFIX}"
    run = start(
        tmp_path,
        engine,
        serve(model, "--num-gpu-blocks-override 512 --enable-prompt-tokens-details"),
        load,
        "--probe",
    )
    status, output = run.wait()
    assert status == 0, output
    result = read_result(run.out / "run-c1.json")
    assert result.verdict.status != "INVALID"
    assert reasons(result) <= TIMING
    # Tokens: asked for, counted by the client, counted by the server.
    assert result.aggregates["completed"] == PROMPTS
    assert result.records is not None
    assert set(result.records.prompt_len.tolist()) == {PREFIX + SUFFIX}
    assert set(result.records.output_len.tolist()) == {OUT}
    assert result.server["prompt_tokens"] == PROMPTS * (PREFIX + SUFFIX)
    assert result.server["generation_tokens"] == PROMPTS * OUT
    assert result.server["finished"] == PROMPTS
    # The first prompt fills the cache, every other one finds the whole blocks of the prefix.
    hit = PREFIX // BLOCK * BLOCK
    assert result.server["prefix_cache_queries"] == PROMPTS * (PREFIX + SUFFIX)
    assert result.server["prefix_cache_hits"] == (PROMPTS - 1) * hit
    assert result.records.cached_tokens.tolist() == [0] + [hit] * (PROMPTS - 1)
    assert result.server["num_preemptions"] == 0
    # The engine's own words: pool and flags.
    start_facts = result.extra["start"]
    assert start_facts["version"].startswith("0.28.0")
    assert start_facts["kv_pools"][0]["tokens"] == 512 * BLOCK == result.server["kv_cache_tokens"]
    assert start_facts["kv_pools"][0]["format_id"] == "vllm-v1-oneline"
    assert result.server["num_gpu_blocks"] == 512
    resolved = start_facts["resolved"]
    assert (resolved["max_num_batched_tokens"], resolved["max_num_seqs"]) == (512, 16)
    assert (resolved["max_model_len"], resolved["enable_prefix_caching"]) == (1024, True)
    assert resolved["enforce_eager"] is True
    names = list(start_facts["milestones_s"])
    assert names[-1] == "ready"
    assert {"configured", "kv_cache", "http", "health"} <= set(names)
    launch = result.extra["launch"]
    assert launch["launch"] == engine.kind
    assert fetch(f"http://127.0.0.1:{launch['port']}", "/health").status == 0
    if engine.kind == "docker":
        assert launch["image_id"].startswith("sha256:")
    # The step probe saw every prompt token that was not in the cache, and every output token.
    steps = [record for record in read_steps(run.out / "run.steps.jsonl") if record["ev"] == "step"]
    scheduled = sum(sum(step["scheduled"].values()) for step in steps)
    readiness = 1
    assert (
        scheduled
        == PREFIX + SUFFIX + (PROMPTS - 1) * (PREFIX + SUFFIX - hit) + PROMPTS * (OUT - 1) + readiness
    )
    assert all(step["dt_ms"] > 0 for step in steps)
    assert result.extra["probe"]["cost"]["steps"] == len(steps)
    assert run.nothing_left()


def test_a_starved_pool_preempts_and_every_answer_is_whole(
    process_engine: Engine, model: Path, tmp_path: Path
) -> None:
    run = start(
        tmp_path,
        process_engine,
        serve(model, "--num-gpu-blocks-override 64 --no-enable-prefix-caching"),
        random_load(32, 16, 100, 200),
    )
    status, output = run.wait()
    assert status == 0, output
    result = read_result(run.out / "run-c16.json")
    assert reasons(result) <= TIMING
    assert result.records is not None
    assert set(result.records.output_len.tolist()) == {200}
    assert result.server["num_preemptions"] is not None
    assert result.server["num_preemptions"] > 0
    assert result.server["kv_cache_tokens"] == 64 * BLOCK
    assert result.server["prefix_cache_hits"] == 0
    assert result.series is not None
    assert result.series.running.max() <= 16
    assert run.nothing_left()


def test_a_server_that_is_killed_makes_the_run_invalid(
    process_engine: Engine, model: Path, tmp_path: Path
) -> None:
    run = start(
        tmp_path, process_engine, serve(model, "--num-gpu-blocks-override 512"), random_load(4000, 4, 64, 64)
    )
    run.wait_for(lambda: "Application startup complete" in run.log())
    # The server logs an answer when it begins: of 25, at least 20 have ended.
    run.wait_for(lambda: run.log().count("POST /v1/completions") > 25)
    server = min(run.processes(), key=lambda pid: Path(f"/proc/{pid}").stat().st_ctime_ns)
    os.kill(server, signal.SIGKILL)
    status, output = run.wait()
    assert status == 3, output
    result = read_result(run.out / "run-c4.json")
    assert result.verdict.status == "INVALID"
    assert "engine_died" in reasons(result)
    assert result.records is not None
    finished = [index for index, status in enumerate(result.records.status) if status == "ok"]
    assert finished
    assert all(result.records.output_len[index] == 64 for index in finished)
    assert len(finished) < 4000
    assert run.nothing_left()


def test_interrupted_while_starting(engine: Engine, model: Path, tmp_path: Path) -> None:
    run = start(tmp_path, engine, serve(model), random_load(8, 1))
    run.wait_for(lambda: "non-default args" in run.log())
    run.process.send_signal(signal.SIGINT if engine.kind == "docker" else signal.SIGTERM)
    status, output = run.wait()
    assert status == 130, output
    assert run.nothing_left()
    assert not run.out.exists()


def test_interrupted_under_load_and_then_again(engine: Engine, model: Path, tmp_path: Path) -> None:
    run = start(tmp_path, engine, serve(model, "--num-gpu-blocks-override 512"), random_load(4000, 2, 64, 32))
    run.wait_for(lambda: "Application startup complete" in run.log())
    run.wait_for(lambda: run.log().count("POST /v1/completions") > 25)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # the stop is under way, and must not be cut short
    run.process.send_signal(signal.SIGINT)
    status, output = run.wait()
    assert status == 130, output
    assert run.nothing_left()
    result = read_result(run.out / "run-c2.json")
    assert result.verdict.status == "INVALID"
    assert "interrupted" in reasons(result)
    assert result.records is not None
    assert result.records.status.count("ok") > 0
    names = {path.name.partition(".")[2] for path in run.out.iterdir()}
    kept = {"json", "requests.csv", "metrics_before.prom", "metrics_after.prom", "series.csv", "engine.log"}
    assert names <= kept


def test_interrupted_while_stopping(engine: Engine, model: Path, tmp_path: Path) -> None:
    # In a container on the host's network: where there is no bridge, that is the way.
    network = ("--network", "host") if engine.kind == "docker" else ()
    run = start(tmp_path, engine, serve(model), random_load(8, 1), *network)
    run.wait_for(lambda: (run.out / "run-c1.json").exists())
    run.process.send_signal(signal.SIGTERM)
    status, output = run.wait()
    assert status == 130, output
    assert run.nothing_left()
    assert read_result(run.out / "run-c1.json").aggregates["completed"] == 8


def test_shared_memory_that_is_too_small_is_named(docker_engine: Engine, model: Path, tmp_path: Path) -> None:
    run = start(tmp_path, docker_engine, serve(model), random_load(8, 1), "--shm-size", "64m")
    status, output = run.wait()
    assert status == 1, output
    assert "shm_too_small" in output
    assert run.nothing_left()
