"""Sweeps, serial runs and the bench command, against a program that behaves as an engine does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench, doctor
from bench.driver import Progress
from bench.enrich import complete
from bench.failures import EngineFailed
from bench.launch import LaunchOptions
from bench.loadgen import run_load
from bench.run import BenchOptions, _key
from bench.serial import points_for, run_serial, subjects_of
from bench.servers.base import free_port
from bench.session import Reporter
from bench.sweep import finished, points_of
from bench.telemetry import GpuProcess, GpuSample, GpusSilent
from bench.watch import Watcher
from sim.build import read_source
from sim.errors import BadInput, NotComparable
from sim.fingerprint import model_fingerprint
from sim.results_io.files import read_result
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, WorkloadSpec
from sim.workload.sweep_prompts import prompts_for
from tests.real.dummy_model import write

pytestmark = pytest.mark.usefixtures("any_machine")

ROOT = Path(__file__).parents[1]
FAKE = Path(__file__).parent / "fakes" / "fake_engine.py"


@pytest.mark.parametrize(("concurrency", "prompts"), [(1, 20), (10, 20), (16, 32), (64, 128), (128, 256)])
def test_prompts_scale_with_concurrency(concurrency, prompts):
    assert prompts_for(concurrency) == prompts


def test_a_load_of_shared_prefixes_keeps_its_prompts():
    dataset = PrefixRepetitionDataset(num_prefixes=40)
    prompts = [p.spec.num_prompts for p in points_of(WorkloadSpec(dataset, 200), concurrencies=[1, 16, 64])]
    assert prompts == [200, 200, 200]
    (few,) = points_of(WorkloadSpec(dataset, 10), concurrencies=[16])
    assert few.spec.num_prompts == 40


def test_every_point_has_its_own_seed_and_prompts():
    points = points_of(WorkloadSpec(seed=5), concurrencies=[1, 16, 64])
    assert [(p.label, p.seed, p.spec.num_prompts) for p in points] == [
        ("c1", 5, 20),
        ("c16", 6, 32),
        ("c64", 7, 128),
    ]


def test_a_number_of_prompts_that_was_asked_for_holds():
    points = points_of(WorkloadSpec(), concurrencies=[1, 64], num_prompts=50)
    assert {point.spec.num_prompts for point in points} == {50}


def test_a_rate_sweep_keeps_the_loads_prompts():
    points = points_of(WorkloadSpec(num_prompts=70), rates=[0.5, float("inf")])
    assert [(p.label, p.spec.request_rate, p.spec.num_prompts) for p in points] == [
        ("r0.5", 0.5, 70),
        ("rinf", float("inf"), 70),
    ]


def test_both_make_every_pair():
    points = points_of(WorkloadSpec(), concurrencies=[4, 8], rates=[1, 2])
    assert [point.label for point in points] == ["r1-c4", "r1-c8", "r2-c4", "r2-c8"]
    assert len({point.seed for point in points}) == 4


def test_a_trace_keeps_its_length():
    spec = WorkloadSpec(dataset=FileDataset("azure", "x.csv"), num_prompts=300)
    assert points_of(spec, concurrencies=[4])[0].spec.num_prompts == 300


def test_neither_is_one_point():
    assert [p.label for p in points_of(WorkloadSpec(max_concurrency=3, request_rate=2.0))] == ["r2-c3"]


def test_the_same_point_twice_is_refused():
    with pytest.raises(BadInput, match="twice"):
        points_of(WorkloadSpec(), concurrencies=[4, 4])


@pytest.fixture
def scenario(tmp_path):
    model = write(tmp_path / "tiny")

    def make(name="fake", flags="", load="--num-prompts 8 --max-concurrency 4"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(
            f"serve: vllm serve {model} --served-model-name m --load-format dummy --block-size 16 {flags}\n"
            f"bench: vllm bench serve --dataset-name random --random-input-len 30 --random-output-len 5 "
            f"--ignore-eos --metric-percentiles 50 {load}\n"
            "gpu: cpu\n"
        )
        return str(path)

    return make


def arguments(*words, program=f"{sys.executable} -S {FAKE}", **env):
    extra = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    return [*words, "--program", program, *extra]


def run(*words, **env):
    return CliRunner().invoke(bench, arguments(*words, **env))


def pids_alive(path):
    return [pid for pid in path.read_text().split() if is_alive(pid)]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_run_from_launch_to_verdict(scenario, tmp_path):
    out, pids = tmp_path / "out", tmp_path / "pids"
    path = scenario()
    outcome = run(path, "--result-dir", str(out), "--num-warmups", "3", "--plots", FAKE_PIDS=str(pids))
    assert outcome.exit_code == 0, outcome.output
    result = read_result(out / "fake-c4.json")
    assert result.aggregates["completed"] == 8
    assert result.verdict.status != "INVALID"
    # Warm-ups and the readiness check came before the counters were read.
    assert result.server["finished"] == 8
    assert result.server["generation_tokens"] == 40
    assert result.server["prompt_tokens"] == 240
    assert result.server["kv_cache_tokens"] == 1600
    assert result.server["num_gpu_blocks"] == 100
    assert result.identity["engine"] == "vllm"
    own = read_source(file=path).build().model
    assert result.identity["model_sha"] == model_fingerprint(own)
    assert result.identity["workload"]["max_concurrency"] == 4
    start = result.extra["start"]
    assert start["phases_s"]["ready"] >= 0
    assert start["kv_pools"][0]["format_id"] == "vllm-v1-oneline"
    assert start["given"]["max_num_seqs"] == 4
    assert start["given"]["api_key"] == "***"
    assert "'api_key': [***]" in (out / "fake.engine.log").read_text()
    assert not any(b"S3CRET" in path.read_bytes() for path in out.iterdir())
    names = {path.name for path in out.iterdir()}
    assert {"fake-c4.requests.csv", "fake-c4.metrics_before.prom", "fake.engine.log", "fake-c4.png"} <= names
    assert pids_alive(pids) == []
    head = json.loads((out / "fake-c4.json").read_text())
    assert (head["completed"], head["num_prompts"], head["max_concurrency"]) == (8, 8, 4)


def test_a_sweep_goes_on_where_it_was_broken_off(scenario, tmp_path):
    file, out, pids = scenario(), tmp_path / "out", tmp_path / "pids"
    words = [file, "--result-dir", str(out), "--concurrency", "1,2", "--num-prompts", "4"]
    assert run(*words, FAKE_PIDS=str(pids)).exit_code == 0
    first = (out / "fake-c1.json").read_bytes()
    (out / "fake-c2.json").unlink()
    assert "--resume" in str(run(*words, FAKE_PIDS=str(pids)).exception)
    assert run(*words, "--resume", FAKE_PIDS=str(pids)).exit_code == 0
    assert (out / "fake-c1.json").read_bytes() == first
    assert (out / "fake-c2.json").exists()
    started = len(pids.read_text().split())
    assert run(*words, "--resume", FAKE_PIDS=str(pids)).exit_code == 0
    assert len(pids.read_text().split()) == started  # nothing to do: no engine was started
    assert run(*words, "--force", FAKE_PIDS=str(pids)).exit_code == 0
    assert (out / "fake-c1.json").read_bytes() != first


def test_a_point_of_another_load_or_engine_is_not_taken_for_this_one(scenario, tmp_path):
    out = tmp_path / "out"
    assert run(scenario(), "--result-dir", str(out)).exit_code == 0
    path = out / "fake-c4.json"
    key = read_result(path).extra["point"]
    assert finished(path, key) is not None
    assert finished(path, "another") is None
    assert finished(out / "none.json", key) is None
    (out / "broken.json").write_text("{")
    assert finished(out / "broken.json", key) is None


def test_engines_one_after_the_other_get_the_same_prompts(scenario, tmp_path):
    out, pids = tmp_path / "out", tmp_path / "pids"
    files = [scenario("a"), scenario("b", "--max-num-seqs 2")]
    outcome = run(*files, "--result-dir", str(out), "--concurrency", "1,2", FAKE_PIDS=str(pids))
    assert outcome.exit_code == 0, outcome.output
    assert "max_num_seqs" in outcome.output
    assert "differs" in outcome.output
    (pair,) = json.loads((out / "alignment.json").read_text())
    knobs = {tuple(knob["names"]): knob for knob in pair["knobs"]}
    assert knobs["max_num_seqs", "max_num_seqs"]["values"][1] == 2
    for label in ("c1", "c2"):
        a, b = (read_result(out / f"{stem}-{label}.json") for stem in "ab")
        assert a.identity["workload"] == b.identity["workload"]
        assert a.extra["seed"] == b.extra["seed"]
    assert pids_alive(pids) == []


def test_an_engine_that_is_killed_makes_the_run_invalid_and_keeps_what_finished(scenario, tmp_path):
    out, pids = tmp_path / "out", tmp_path / "pids"
    load = "--num-prompts 30 --max-concurrency 2"
    env = {"FAKE_MODE": "exits_after", "FAKE_REQUESTS": "12", "FAKE_PIDS": str(pids)}
    outcome = run(scenario(load=load), "--result-dir", str(out), **env)
    assert isinstance(outcome.exception, NotComparable)
    assert outcome.exception.exit_status == 3
    result = read_result(out / "fake-c2.json")
    assert result.verdict.status == "INVALID"
    assert "engine_died" in {note.subject for note in result.verdict.reasons}
    assert "SIGKILL" in result.verdict.reasons[0].text
    assert 5 <= result.records.status.count("ok") <= 13
    assert pids_alive(pids) == []
    assert finished(out / "fake-c2.json", result.extra["point"]) is None


def test_an_engine_that_does_not_start_is_named_with_its_reason_and_its_log_kept(scenario, tmp_path):
    out = tmp_path / "out"
    env = {"FAKE_MODE": "dies", "FAKE_LOG": "CUDA error: no kernel image is available"}
    outcome = run(scenario(), "--result-dir", str(out), **env)
    assert outcome.exit_code == 1
    assert "gpu_arch_unsupported" in str(outcome.exception)
    assert [path.name for path in out.iterdir()] == ["fake.engine.log"]


def test_a_server_that_somebody_else_runs(scenario, tmp_path):
    port = free_port()
    words = [sys.executable, "-S", str(FAKE), "serve", "m", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as engine:
        out, url = tmp_path / "out", f"http://127.0.0.1:{port}"
        outcome = run(scenario(), "--result-dir", str(out), "--base-url", url, "--stall-timeout", "10")
        assert outcome.exit_code == 0, (outcome.output, outcome.exception)
        assert read_result(out / "fake-c4.json").aggregates["completed"] == 8
        assert engine.poll() is None
        engine.kill()


class Gpus:
    """One GPU that still holds `leak` bytes once the engine is gone."""

    def __init__(self, leak):
        self.leak, self.looks = leak, 0

    def info(self):
        return ()

    def sample(self):
        self.looks += 1
        used = self.leak if self.looks > 1 else 0  # the first look is the baseline
        return (GpuSample(0, used, 80 << 30, 0.5, power=300.0),)

    def processes(self):
        return (GpuProcess(4242, self.leak, "VLLM::Worker"),)


def run_on(gpus, files, out, pids):
    sources = [read_source(file=file) for file in files]
    subjects = subjects_of(sources)
    plans = [(subject, points_for(subject)) for subject in subjects]
    program = (sys.executable, "-S", str(FAKE))
    launch = LaunchOptions(program=program, env={"FAKE_PIDS": str(pids)}, memory_timeout=0.1)
    return run_serial(plans, BenchOptions(launch, out), gpus, Reporter())


def test_a_host_that_is_dirty_starts_no_other_engine(scenario, tmp_path):
    out, pids = tmp_path / "out", tmp_path / "pids"
    with pytest.raises(EngineFailed) as caught:
        run_on(Gpus(22 << 30), [scenario("a"), scenario("b")], out, pids)
    failure = caught.value.failure
    assert failure.kind == "gpu_memory_not_freed"
    assert "22528 MiB" in failure.line
    assert "4242" in failure.fix
    assert (out / "a-c4.json").exists()
    assert not (out / "b-c4.json").exists()
    assert len(pids.read_text().split()) == 1


def test_telemetry_is_kept_with_the_run(scenario, tmp_path):
    ((result,),) = run_on(Gpus(0), [scenario("a")], tmp_path / "out", tmp_path / "pids")
    assert result.extra["gpus"][0]["mean_power"] == 300.0
    assert result.extra["gpus"][0]["mean_sm_clock"] is None
    assert (tmp_path / "out" / "a-c4.gpu.csv").read_text().startswith("time_s,index,memory_used")


class BrokenGpus(Gpus):
    """GPUs whose driver has no answer to the looks named."""

    def __init__(self, broken):
        super().__init__(0)
        self.broken = broken

    def sample(self):
        if self.looks + 1 in self.broken:
            self.looks += 1
            raise GpusSilent("GPU is lost")
        return super().sample()


@pytest.mark.parametrize(("broken", "words"), [([1], "not watched"), ([2], "1 looks at the GPUs")])
def test_gpus_that_do_not_answer_end_no_run(scenario, tmp_path, broken, words):
    ((result,),) = run_on(BrokenGpus(broken), [scenario("a")], tmp_path / "out", tmp_path / "pids")
    assert result.aggregates["completed"] == 8
    (note,) = [note for note in result.notes if note.subject == "gpus"]
    assert words in note.text
    assert "GPU is lost" in note.text


def test_a_driver_that_is_silent_after_a_stop_is_said_so(scenario, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(EngineFailed, match="gpus_silent"):
        run_on(BrokenGpus(range(2, 10_000)), [scenario("a")], out, tmp_path / "pids")
    assert (out / "a-c4.json").exists()


def test_slow_looks_at_the_gpus_hold_no_scrape_up():
    class Slow(Gpus):
        def sample(self):
            time.sleep(0.5)
            return super().sample()

    class Server:
        base_url = "http://127.0.0.1:1"

        def exited(self):
            return None

    class Scrapes(Watcher):
        def scrape(self):
            return "# TYPE x gauge\n"

    watcher = Scrapes(Server(), gpus=Slow(0), interval=0.02)
    watcher.begin()
    wait_for(lambda: len(watcher.seen.scrapes) >= 10 and watcher.seen.gpu, 20)
    seen = watcher.finish()
    assert len(seen.gpu) < len(seen.scrapes)


def test_times_count_from_the_runs_own_start(scenario, tmp_path, monkeypatch):
    starts = []

    def load(*args, outcome, on_progress, **options):
        result = run_load(*args, outcome=outcome, **options)
        on_progress(Progress(0.0, 8, 8, 8, 0, 40))  # a process that has ended tells no later time
        starts.append(outcome.start)
        return result

    def seen(result, context):
        starts.append(context.begun)
        return complete(result, context)

    monkeypatch.setattr("bench.run.run_load", load)
    monkeypatch.setattr("bench.run.complete", seen)
    run_on(None, [scenario("a")], tmp_path / "out", tmp_path / "pids")
    assert starts[0] == starts[1]


def test_files_of_an_earlier_run_do_not_stay_beside_a_new_result(scenario, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    old = [out / f"a-c4.{end}" for end in ("gpu.csv", "png", "metrics_before.prom")]
    others = [out / name for name in ("a-c44.png", "notes.txt")]
    for path in (*old, *others):
        path.write_text("old")
    run_on(None, [scenario("a")], out, tmp_path / "pids")
    assert not (out / "a-c4.gpu.csv").exists()
    assert not (out / "a-c4.png").exists()
    assert (out / "a-c4.metrics_before.prom").read_text() != "old"
    assert all(path.read_text() == "old" for path in others)


def test_another_launch_is_another_point(scenario, tmp_path):
    (subject,) = subjects_of([read_source(file=scenario("a"))])
    (point,) = points_for(subject)
    launches = [
        LaunchOptions(),
        LaunchOptions(program=("/venv/bin/vllm",)),
        LaunchOptions(base_url="http://127.0.0.1:1"),
        LaunchOptions(kind="docker"),
        LaunchOptions(kind="docker", gpus=("0",)),
        LaunchOptions(kind="docker", mounts=((tmp_path, "/x"),)),
        LaunchOptions(kind="docker", network="host"),
        LaunchOptions(kind="docker", shm_bytes=1),
    ]
    keys = [_key(subject, BenchOptions(launch, tmp_path), point) for launch in launches]
    assert len(set(keys)) == len(keys)
    assert keys[0] == _key(subject, BenchOptions(LaunchOptions(kind="process"), tmp_path), point)


def test_prompts_that_the_load_names_hold_in_a_sweep(scenario):
    def counts(load):
        (subject,) = subjects_of([read_source(file=scenario("a", load=load))])
        return [point.spec.num_prompts for point in points_for(subject, concurrencies=[1, 16])]

    assert counts("--num-prompts 70") == [70, 70]
    assert counts("") == [20, 32]


def start(words, tmp_path):
    """The command as a process of its own, as a user runs it."""
    code = "from cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "bench", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_leaves_nothing(scenario, tmp_path, number):
    out, pids = tmp_path / "out", tmp_path / "pids"
    env = {"FAKE_MODE": "slow", "FAKE_PIDS": str(pids)}
    process = start(arguments(scenario(), "--result-dir", str(out), **env), tmp_path)
    wait_for(lambda: pids.exists() and pids.read_text().strip())
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert pids_alive(pids) == []
    assert not out.exists()


def test_an_interrupted_load_keeps_what_was_measured(scenario, tmp_path):
    out, pids = tmp_path / "out", tmp_path / "pids"
    env = {"FAKE_PIDS": str(pids), "FAKE_TOKEN_S": "0.05"}
    load = "--num-prompts 400 --max-concurrency 2"
    process = start(arguments(scenario(load=load), "--result-dir", str(out), **env), tmp_path)
    log = out / "fake.engine.log"
    wait_for(lambda: log.exists() and "startup complete" in log.read_text())
    time.sleep(2.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert pids_alive(pids) == []
    result = read_result(out / "fake-c2.json")
    assert result.verdict.status == "INVALID"
    assert "interrupted" in {note.subject for note in result.verdict.reasons}
    assert 0 < result.records.status.count("ok") < 400
    assert not [path for path in out.iterdir() if ".tmp" in path.name or path.suffix == ".part"]


def test_an_interrupt_while_stopping_does_not_cut_the_stop_short(scenario, tmp_path):
    out, pids = tmp_path / "out", tmp_path / "pids"
    env = {"FAKE_MODE": "stubborn", "FAKE_PIDS": str(pids)}
    words = [scenario(), "--result-dir", str(out), "--stop-timeout", "2"]
    process = start(arguments(*words, **env), tmp_path)
    wait_for(lambda: (out / "fake-c4.json").exists())
    time.sleep(0.3)  # the stubborn engine takes its time now
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert pids_alive(pids) == []
    assert read_result(out / "fake-c4.json").aggregates["completed"] == 8


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "x"], "--concurrency"),
        (["--request-rate", "-1"], "--request-rate"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--launch", "url"], "--base-url"),
        (["--shm-size", "lots"], "--shm-size"),
        (["--mount", "here"], "--mount"),
        (["--mount", "/no/such:/x"], "--mount"),
        (["--env", "NAME"], "--env"),
        (["--stall-timeout", "0"], "--stall-timeout"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--shm-size", "1g"], "--shm-size"),
        (["--base-url", "http://127.0.0.1:1", "--gpus", "0"], "--gpus"),
        (["--base-url", "x", "--launch", "url"], "--base-url"),
    ],
)
def test_bad_options_are_named(scenario, tmp_path, words, field):
    outcome = CliRunner().invoke(bench, [scenario(), "--result-dir", str(tmp_path / "out"), *words])
    assert isinstance(outcome.exception, BadInput)
    assert outcome.exception.field == field
    assert not (tmp_path / "out").exists()


def test_doctor_prints_what_it_found(tmp_path):
    outcome = CliRunner().invoke(doctor, ["--result-dir", str(tmp_path), "--model", str(tmp_path)])
    assert outcome.exit_code == 1
    assert "fail    model: hf_cache_incomplete" in outcome.output
    assert "disk:" in outcome.output


@pytest.mark.parametrize("place", ["file/results", "/proc/results"])
def test_a_folder_that_cannot_be_is_refused_before_anything_starts(scenario, tmp_path, place):
    (tmp_path / "file").write_text("")
    pids = tmp_path / "pids"
    outcome = run(scenario(), "--result-dir", str(tmp_path / place), FAKE_PIDS=str(pids))
    assert isinstance(outcome.exception, BadInput)
    assert "--result-dir" in str(outcome.exception)
    assert not pids.exists()
