"""Sweeps: nothing lost, nothing twice, whatever dies on the way."""

import importlib.util
import json
import os
import signal
import threading
from dataclasses import replace
from functools import partial

import pytest
from joblib.externals.loky.process_executor import BrokenProcessPool

from sim.build import read_source
from sim.errors import BadInput
from sim.planning import parallel
from sim.planning.backends import backend, check_address, within
from sim.planning.jobs import Job, run_job
from sim.planning.outcome import WORKER_DIED, Outcome
from sim.planning.parallel import Sweep
from sim.planning.results_file import ResultsFile, fingerprint
from sim.workload.spec import FileDataset

SERVE = "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 1024 --max-num-seqs 8"
BENCH = (
    "vllm bench serve --dataset-name random --random-input-len 64 --random-output-len 4 "
    "--random-range-ratio 0.5 --request-rate 20 --num-prompts 5"
)


def jobs(count):
    base = read_source(serve=SERVE, bench=BENCH, gpu="L4").build()
    return [
        Job(f"point {i}", replace(base, seed=i, workload=replace(base.workload, seed=i)))
        for i in range(count)
    ]


def constant(job):
    """A job that costs nothing."""
    return Outcome(figures={"seed": job.scenario.seed})


def kill_own_worker_once(marker, job):
    """The third job takes its worker down the first time it runs."""
    if job.scenario.seed == 2:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return constant(job)


def kill_own_worker(job):
    """The third job takes down every worker that it runs on."""
    if job.scenario.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return constant(job)


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def interrupt_at(seed):
    def run(job):
        if job.scenario.seed == seed:
            raise Interrupted
        return constant(job)

    return run


def keys(path):
    return [json.loads(line)["key"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_results_come_in_the_order_of_the_jobs_and_as_they_would_alone():
    work = jobs(4)
    assert Sweep(workers=2)(work) == [run_job(job) for job in work]


@pytest.mark.filterwarnings("ignore:A worker stopped")
def test_a_killed_worker_costs_no_result(tmp_path):
    out = tmp_path / "sweep.jsonl"
    found = Sweep(workers=2, out=out, run=partial(kill_own_worker_once, tmp_path / "killed"))(jobs(8))
    assert (tmp_path / "killed").exists()
    assert [o.figures["seed"] for o in found] == list(range(8))
    assert keys(out) == [f"point {i}" for i in range(8)]


@pytest.mark.filterwarnings("ignore:A worker stopped")
def test_a_job_that_kills_every_worker_fails_alone(monkeypatch):
    def always_breaks(*args):
        raise BrokenProcessPool
        yield

    monkeypatch.setattr(parallel, "_stream", always_breaks)
    found = Sweep(workers=2, run=kill_own_worker)(jobs(3)[1:])
    assert [o.failure is not None for o in found] == [False, True]
    assert "worker died" in found[1].failure


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    out, whole = tmp_path / "sweep.jsonl", tmp_path / "whole.jsonl"
    work = jobs(6)
    with pytest.raises(Interrupted):
        Sweep(workers=1, out=out, run=interrupt_at(3))(work)
    assert len(keys(out)) == 3
    ran = []
    Sweep(workers=1, out=out, run=lambda job: ran.append(job.key) or constant(job))(work)
    assert ran == ["point 3", "point 4", "point 5"]
    Sweep(workers=1, out=whole, run=constant)(work)
    assert out.read_bytes() == whole.read_bytes()


def test_half_a_line_is_dropped_and_run_again(tmp_path):
    out = tmp_path / "sweep.jsonl"
    work = jobs(3)
    Sweep(workers=1, out=out, run=constant)(work)
    data = out.read_bytes()
    out.write_bytes(data[:-10])
    assert len(ResultsFile(out).done(work)) == 2
    Sweep(workers=1, out=out, run=constant)(work)
    assert out.read_bytes() == data


@pytest.mark.parametrize("text", ["serve: vllm serve m", '{"duration": 1.5}'])
def test_a_file_of_something_else_without_a_line_end_is_left_alone(tmp_path, text):
    path = tmp_path / "precious"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"precious line 1.*not a result of a sweep"):
        ResultsFile(path)
    assert path.read_text() == text


def test_order_of_arrival_does_not_show(tmp_path):
    work = jobs(4)
    file = ResultsFile(tmp_path / "a.jsonl")
    for job in reversed(work):
        file.append(job, constant(job))
        file.append(job, Outcome(failure="a second result of the same job"))
    file.finish(work)
    Sweep(workers=1, out=tmp_path / "b.jsonl", run=constant)(work)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_results_of_other_settings_are_refused(tmp_path):
    out = tmp_path / "sweep.jsonl"
    work = jobs(2)
    Sweep(workers=1, out=out, run=constant)(work)
    other = [replace(work[0], scenario=replace(work[0].scenario, seed=99)), work[1]]
    with pytest.raises(BadInput, match="other settings"):
        Sweep(workers=1, out=out, run=constant)(other)
    assert fingerprint(work[0]) != fingerprint(other[0])


def test_results_are_not_reused_once_the_trace_has_changed(tmp_path):
    out, trace = tmp_path / "sweep.jsonl", tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0, "input_len": 5, "output_len": 2}\n', encoding="utf-8")
    (job,) = jobs(1)
    spec = replace(job.scenario.workload, dataset=FileDataset("lengths", str(trace)))
    work = [replace(job, scenario=replace(job.scenario, workload=spec))]
    Sweep(workers=1, out=out, run=constant)(work)
    assert ResultsFile(out).done(work)
    trace.write_text('{"arrival": 0, "input_len": 50, "output_len": 2}\n', encoding="utf-8")
    with pytest.raises(BadInput, match="other settings"):
        ResultsFile(out).done(work)


def test_a_run_lost_with_its_worker_is_tried_again(tmp_path):
    out, work = tmp_path / "sweep.jsonl", jobs(3)

    def lost(job):
        return Outcome(failure=f"{WORKER_DIED} (Killed)") if job.scenario.seed == 1 else constant(job)

    Sweep(workers=1, out=out, run=lost)(work)
    ran = []
    found = Sweep(workers=1, out=out, run=lambda job: ran.append(job.key) or constant(job))(work)
    assert ran == ["point 1"]
    assert [o.failure for o in found] == [None] * 3
    assert keys(out) == ["point 0", "point 1", "point 2"]
    # The second try may be cut off before the file is put in order.
    both = json.dumps({"key": "point 1", "job": fingerprint(work[1]), "outcome": lost(work[1]).to_dict()})
    out.write_text(both + "\n" + out.read_text(encoding="utf-8"), encoding="utf-8")
    assert len(ResultsFile(out).done(work)) == 3


def test_a_file_of_something_else_is_refused_by_line(tmp_path):
    out = tmp_path / "notes.txt"
    out.write_text('{"key": "a"}\n', encoding="utf-8")
    with pytest.raises(BadInput, match="line 1"):
        Sweep(out=out)
    with pytest.raises(BadInput, match="folder"):
        Sweep(out=tmp_path / "none" / "sweep.jsonl")


def test_two_jobs_of_one_name_are_refused():
    work = jobs(1)
    with pytest.raises(BadInput, match="same name"):
        Sweep(run=constant)([*work, *work])


def test_progress_tells_what_is_left():
    told = []
    Sweep(workers=1, run=constant, progress=lambda *args: told.append(args))(jobs(3))
    assert [(done, total) for done, total, _ in told] == [(1, 3), (2, 3), (3, 3)]
    assert told[-1][2] == 0.0
    assert told[0][2] is None  # one run alone says nothing of the pace


def test_time_left_weighs_runs_by_what_they_send(monkeypatch):
    """Nine short runs, then a long one that is as much work as all of them."""
    now = [0.0]
    monkeypatch.setattr("sim.planning.parallel.time.monotonic", lambda: now[0])
    work = jobs(10)
    each = work[0].scenario.workload.num_prompts
    last = work[-1].scenario
    longer = replace(last, workload=replace(last.workload, num_prompts=9 * each))
    work[-1] = replace(work[-1], scenario=longer)
    told = []

    def run(job):
        now[0] += job.scenario.workload.num_prompts
        return constant(job)

    Sweep(workers=1, run=run, progress=lambda *args: told.append(args))(work)
    assert told[8][2] == pytest.approx(9 * each)


def test_unreachable_addresses_are_told():
    for name in ("dask", "ray"):
        with pytest.raises(BadInput, match=r"answers at 127\.0\.0\.1:9"):
            check_address(name, "127.0.0.1:9")
        with pytest.raises(BadInput, match="HOST:PORT"):
            check_address(name, "no such place")


@pytest.mark.parametrize(("name", "address"), [("spark", None), ("loky", "localhost:1")])
def test_backends_that_make_no_sense(name, address):
    with pytest.raises(BadInput), backend(name, address):
        pass


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_a_cluster_gives_the_same_file(name, tmp_path):
    library = {"dask": "distributed", "ray": "ray"}[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed (extra {name})")
    work = jobs(4)
    Sweep(workers=1, out=tmp_path / "here.jsonl")(work)
    Sweep(workers=2, backend=name, out=tmp_path / "there.jsonl")(work)
    assert (tmp_path / "here.jsonl").read_bytes() == (tmp_path / "there.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_a_missing_extra_is_named(name):
    library = {"dask": "distributed", "ray": "ray"}[name]
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed")
    with pytest.raises(BadInput, match=rf"pip install '\.\[{name}\]'"), backend(name):
        pass


def test_a_call_that_does_not_come_back_is_given_up():
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, never.wait)
    never.set()
    assert within(60, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(60, lambda: {}["absent"])


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "."])
def test_results_go_to_a_file_that_can_be_read_again(path):
    with pytest.raises(BadInput):
        ResultsFile(path)
