import sys
from types import ModuleType, SimpleNamespace

import pytest

from bench.probe import servecast_step_probe as probe
from bench.probe.reading import SCHEDULER, probe_cost, read_steps


class Scheduler:
    """As much of vLLM's scheduler as the probe stands before."""

    def __init__(self, vllm_config=None, rank=0):
        self.vllm_config = vllm_config
        self.running, self.waiting = ["a"], []
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 7))
        self.parallel_config = SimpleNamespace(data_parallel_rank=rank)
        self.cache_config = SimpleNamespace(num_gpu_blocks=64)
        self.block_size = 16
        self.calls = []
        self.outputs = []

    def add_request(self, request):
        self.calls.append(("add", request.request_id))

    def schedule(self, throttle_prefills=False):
        return self.outputs.pop(0)

    def update_from_output(self, output, runner_output):
        self.calls.append(("update", runner_output))
        return "engine outputs"

    def shutdown(self):
        self.calls.append("shutdown")


def output(new=(), cached=(), preempted=()):
    """A batch: new and cached are (id, tokens, computed)."""
    scheduled = {name: tokens for name, tokens, _ in (*new, *cached)}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=n, num_computed_tokens=c) for n, _, c in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[n for n, _, _ in cached], num_computed_tokens=[c for _, _, c in cached]
        ),
        preempted_req_ids=set(preempted),
    )


@pytest.fixture
def clock(monkeypatch):
    times = SimpleNamespace(now=100.0)
    monkeypatch.setattr(probe, "_clock", lambda: times.now)
    monkeypatch.setattr(probe, "_FLUSH_S", 0.0)
    return times


def test_a_step_is_noted_with_its_batch_and_time(tmp_path, clock):
    path = tmp_path / "steps.jsonl"
    scheduler = Scheduler()
    scheduler.outputs = [
        output(new=[("r0", 100, 32)]),
        output(),
        output(cached=[("r0", 1, 132)], preempted=["r1"]),
    ]
    probe.StepProbe(scheduler, path)
    scheduler.add_request(SimpleNamespace(request_id="r0", num_prompt_tokens=132, max_tokens=5))
    first = scheduler.schedule()
    clock.now += 0.25
    assert scheduler.update_from_output(first, "tokens") == "engine outputs"
    scheduler.schedule()  # an empty step is no step
    clock.now += 1.0
    second = scheduler.schedule(throttle_prefills=True)
    clock.now += 0.05
    scheduler.update_from_output(second, "tokens")
    scheduler.shutdown()
    start, add, one, two = read_steps(path)
    assert (start["ev"], start["num_gpu_blocks"], start["block_size"]) == ("start", 64, 16)
    assert (add["id"], add["prompt_len"], add["max_tokens"], add["step"]) == ("r0", 132, 5, 0)
    assert (one["scheduled"], one["computed"], one["new"]) == ({"r0": 100}, {"r0": 32}, ["r0"])
    assert one["dt_ms"] == pytest.approx(250)
    assert (two["step"], two["preempted"], two["free_blocks"]) == (2, ["r1"], 7)
    assert two["dt_ms"] == pytest.approx(50)
    assert scheduler.calls == [("add", "r0"), ("update", "tokens"), ("update", "tokens"), "shutdown"]
    cost = probe_cost(path)
    assert (cost.steps, cost.share) == (2, 0.0)


def test_with_two_steps_in_flight_a_step_begins_when_the_one_before_ends(tmp_path, clock):
    path = tmp_path / "steps.jsonl"
    scheduler = Scheduler()
    scheduler.outputs = [output(cached=[("r0", 1, 10)]), output(cached=[("r0", 1, 11)])]
    probe.StepProbe(scheduler, path)
    first = scheduler.schedule()
    clock.now += 0.01
    second = scheduler.schedule()
    clock.now += 0.09
    scheduler.update_from_output(first, None)
    clock.now += 0.08
    scheduler.update_from_output(second, None)
    scheduler.shutdown()
    steps = [record for record in read_steps(path) if record["ev"] == "step"]
    assert [step["dt_ms"] for step in steps] == [pytest.approx(100), pytest.approx(80)]


def test_every_data_parallel_rank_has_its_file(tmp_path, clock):
    scheduler = Scheduler(rank=1)
    probe.StepProbe(scheduler, tmp_path / "steps.jsonl")
    scheduler.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["steps.jsonl.dp1"]


@pytest.mark.parametrize(("async_scheduling", "kind"), [(True, "AsyncScheduler"), (False, "Scheduler")])
def test_the_engine_keeps_the_kind_of_scheduler_that_it_would_have_made(
    tmp_path, monkeypatch, clock, async_scheduling, kind
):
    for name in ("scheduler", "async_scheduler"):
        module = ModuleType(f"vllm.v1.core.sched.{name}")
        module.Scheduler = Scheduler
        module.AsyncScheduler = type("AsyncScheduler", (Scheduler,), {})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("SERVECAST_STEPS", str(tmp_path / "steps.jsonl"))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=async_scheduling))
    scheduler = probe.make_scheduler(vllm_config=config)
    assert type(scheduler).__name__ == kind
    scheduler.shutdown()
    assert next(iter(read_steps(tmp_path / "steps.jsonl")))["scheduler"] == kind
    assert SCHEDULER == "servecast_step_probe.make_scheduler"


def test_a_line_cut_by_a_kill_ends_the_reading(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"ev": "start"}\n{"ev": "st')
    assert [record["ev"] for record in read_steps(path)] == ["start"]
    assert probe_cost(path) is None
