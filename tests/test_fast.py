"""The compiled kernels leave the records of the plain code on everything they accept, and refuse the rest."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `fast` is not installed")

from sim.build import build_scenario
from sim.engines.glue import Limits
from sim.engines.sglang.scheduler import SglangScheduler
from sim.engines.vllm.scheduler import VllmScheduler
from sim.errors import ServecastError
from sim.fast.prices import flatten
from sim.loop.run import run
from sim.request import Request
from sim.simulate import roofline, simulate
from sim.steptime.buckets import GraphBuckets
from sim.steptime.cost import ModelCost
from sim.steptime.efficiencies import Efficiencies
from sim.steptime.roofline import Peaks, RooflineModel, ValidRange
from tests.engines_for_tests import SGLANG, VLLM, FixedSteps, sglang, vllm
from tests.leap_workloads import differences

BENCH = (
    "vllm bench serve --dataset-name random --random-input-len 300 --random-output-len 60 "
    "--random-range-ratio 0.5 --num-prompts 80 --request-rate 40"
)
SERVE = {"vllm": "vllm serve {}", "sglang": "python -m sglang.launch_server --model-path {}"}


def scenario(engine="vllm", model="Qwen/Qwen2.5-7B-Instruct", more="", **options):
    return build_scenario(serve=SERVE[engine].format(model), bench=f"{BENCH} {more}", gpu="H100", **options)


def random_model(rng):
    """A roofline with every term on or off."""

    def maybe(value):
        return rng.choice((0.0, value))

    cost = ModelCost(
        dense_bytes=1e9,
        lm_head_bytes=1e8,
        dense_flops_per_token=1e9,
        lm_head_flops=1e8,
        pair_flops=rng.choice((1e4, 1e6)),
        kv_bytes_per_token=rng.choice((1e4, 1e6)),
        num_layers=8,
        allreduce_bytes_per_token=1e4,
        expert_bytes=maybe(1e7),
        moe_layers=8,
        num_experts=16,
        experts_per_token=2,
        expert_flops_per_token=1e8,
        sliding_pair_flops=1e4,
        sliding_kv_bytes_per_token=maybe(3e4),
        sliding_window=rng.choice((0, 64)),
        kv_group=4.0,
    )
    efficiencies = Efficiencies(
        weight_bandwidth=0.8,
        kv_bandwidth=0.6,
        gemm_flops=0.5,
        attention_flops=0.3,
        mixed_kv_reread=maybe(0.5),
        gemm_ramp=maybe(20.0),
        ridge=rng.choice((2.0, math.inf)),
        tile_edge=maybe(0.5),
        throttle=maybe(0.2),
        throttle_relax=0.02,
        step_overhead=1e-3,
        layer_overhead=maybe(1e-5),
        sequence=maybe(1e-6),
        eager_launch=maybe(1e-4),
        piecewise_launch=maybe(2e-4),
        allreduce_latency=1e-5,
        host_schedule=maybe(rng.choice((1e-4, 1e-2))),
        host_schedule_seq=maybe(1e-5),
        host_update=maybe(1e-3),
        host_update_seq=maybe(1e-5),
        front_request=maybe(1e-3),
        front_prompt_token=maybe(1e-6),
        output_delay=maybe(1e-3),
    )
    peaks = Peaks(bandwidth=1e12, gemm_flops=1e14, attention_flops=1e14, link_bandwidth=1e11)
    buckets = rng.choice(
        (
            GraphBuckets(),
            GraphBuckets((1, 2, 4, 8), (16, 64, 256)),
            GraphBuckets((4, 8), (64,), "graph", max_padding=2.0),
        )
    )
    valid = rng.choice((None, ValidRange(200, 100, 6, 300)))
    return RooflineModel(efficiencies, cost, peaks, buckets, rng.choice((1, 2)), valid=valid)


def random_load(rng):
    rate, stopping = rng.choice((1.0, 20.0, 200.0, math.inf)), rng.choice((0.0, 0.0, 0.5))
    longest_prompt, longest_output = rng.choice((20, 200, 800)), rng.choice((3, 60, 300))
    arrival, requests = 0.0, []
    for number in range(rng.randint(1, 60)):
        if rate < math.inf:
            arrival += rng.expovariate(rate)
        output = rng.randint(1, longest_output)
        stop = rng.randint(1, output) if rng.random() < stopping else None
        prompt = ((f"own{number}", rng.randint(1, longest_prompt)),)
        requests.append(Request(str(number), prompt, output, arrival, stop))
    return requests


def random_vllm(rng, requests):
    block, slots, chunked = rng.choice((4, 16)), rng.choice((2, 8, 64)), rng.random() < 0.8
    needs = [-(-(r.prompt_len + r.max_tokens) // block) for r in requests]
    longest = max(r.prompt_len for r in requests) + rng.choice((1, 30, 4000))
    budget = rng.choice((64, 256, 2048)) if chunked else longest
    config = replace(
        VLLM,
        max_num_seqs=slots,
        max_num_batched_tokens=max(slots, budget),
        max_num_scheduled_tokens=rng.choice((None, None, 32)),
        block_size=block,
        num_gpu_blocks=max(max(needs), int(sum(needs) * rng.choice((0.1, 0.3, 1.2)))) + 1,
        enable_prefix_caching=rng.random() < 0.8,
        async_scheduling=rng.random() < 0.6,
        long_prefill_token_threshold=rng.choice((0, 0, min(24, longest))),
        long_prefill_token_threshold_adaptive=rng.random() < 0.5,
        scheduler_reserve_full_isl=rng.random() < 0.7,
        watermark=rng.choice((0.0, 0.05)),
        max_model_len=longest,
        enable_chunked_prefill=chunked,
        version=rng.choice(("0.28.0", "0.33.0")),
    )
    return lambda: VllmScheduler(config, shares_prefixes=False)


def random_sglang(rng, requests):
    page = rng.choice((1, 1, 16))
    longest = max(r.prompt_len for r in requests) + max(r.max_tokens for r in requests) + 20
    total = sum(r.prompt_len + r.max_tokens for r in requests)
    tokens = max(longest, int(total * rng.choice((0.15, 0.4, 1.3)))) + 2 * page
    config = replace(
        SGLANG,
        max_running_requests=rng.choice((2, 8, 64)),
        chunked_prefill_size=rng.choice((64, 256, 2048, -1)),
        max_prefill_tokens=rng.choice((200, 1024)),
        max_total_tokens=-(-tokens // page) * page,
        page_size=page,
        disable_overlap_schedule=rng.random() < 0.5,
        schedule_conservativeness=rng.choice((0.05, 0.3, 1.0)),
        prefill_max_requests=rng.choice((None, None, 2)),
        prefill_decode_interval=rng.choice((0, 0, 2)),
        context_length=8192,
    )
    return lambda: SglangScheduler(config)


def outcome(make, requests, model, **options):
    """What came of a run, or in which words the engine got stuck."""
    try:
        return run(make(), requests, model, **options)
    except ServecastError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("group", range(4))
def test_random_workloads_leave_the_same_records(engine, group):
    compiled = 0
    for seed in range(25 * group, 25 * group + 25):
        rng = random.Random(f"{engine}/{seed}")
        requests, model = random_load(rng), random_model(rng)
        make = (random_vllm if engine == "vllm" else random_sglang)(rng, requests)
        options = {
            "max_concurrency": rng.choice((None, None, rng.randint(1, 20))),
            "stream_interval": rng.choice((1, 1, 3)),
            "idle_poll": rng.choice((0.0, 1e-3)),
            "limits": Limits(8, 64),
        }
        plain = outcome(make, requests, model, fast=False, **options)
        fast = outcome(make, requests, model, fast=True, **options)
        compiled += isinstance(fast, str) or fast.path == "compiled"
        assert not differences(plain, fast), seed
    assert compiled == 25


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B-Instruct", "openai/gpt-oss-20b"])
@pytest.mark.parametrize("more", ["", "--max-concurrency 8 --request-rate inf"])
def test_whole_predictions_are_the_same_and_say_how_they_came(engine, model, more):
    of = scenario(engine, model, more)
    plain, fast = simulate(of, fast=False).result, simulate(of).result
    assert (plain.extra["path"], fast.extra["path"]) == ("leaps", "compiled")
    assert simulate(of, leap=False).result.extra["path"] == "steps"
    for key, value in plain.aggregates.items():
        assert fast.aggregates[key] == (None if value is None else pytest.approx(value, rel=1e-9)), key
    assert fast.records.request_id == plain.records.request_id
    assert fast.extra["device_time"] == pytest.approx(plain.extra["device_time"])


def test_a_load_as_columns_gives_what_a_list_of_requests_gives():
    of = scenario()
    from sim.workload.generate import generate

    table, listed = simulate(of), simulate(of, requests=generate(of.workload))
    assert listed.result.extra["path"] == "compiled"
    assert table.result.aggregates == listed.result.aggregates


def path(scheduler, requests, model, **options):
    return run(scheduler, requests, model, **options).path


def test_what_no_kernel_covers_is_left_to_the_plain_code():
    rng = random.Random(1)
    model = random_model(rng)
    own = [Request(str(i), ((f"p{i}", 20),), 5, 0.1 * i) for i in range(4)]
    shared = [Request(str(i), (("p", 20),), 5, 0.1 * i) for i in range(4)]
    counting = VllmScheduler(VLLM, shares_prefixes=False)
    assert path(counting, own, model) == "compiled"
    assert path(counting, own, model, fast=False) == "leaps"
    assert path(counting, own, model, leap=False) == "steps"
    assert path(counting, own, model, steps=lambda step: None) == "steps"
    assert path(counting, own, model, warmups=[replace(own[0], request_id="w")]) == "leaps"
    assert path(counting, own, model, duration=9.0) == "compiled"
    assert path(counting, own, model, duration=9.0, max_concurrency=2) == "leaps"
    assert path(counting, own, model, refuses=lambda request: request.request_id == "1") == "leaps"
    assert path(vllm(), shared, model) == "leaps"
    assert path(vllm(scheduling_policy="priority"), own, model) == "steps"
    assert path(counting, own, FixedSteps()) == "leaps"
    streaming = replace(model, efficiencies=replace(model.efficiencies, output_token=1e-4))
    assert path(counting, own, streaming) == "leaps"
    assert path(sglang(), own, model) == "compiled"
    assert path(sglang(), shared, model) == "leaps"
    assert path(sglang(disable_radix_cache=True), own, model) == "leaps"
    assert path(sglang(schedule_policy="lpm"), own, model) == "leaps"
    assert path(sglang(enable_mixed_chunk=True), own, model) == "steps"


def test_a_model_that_is_not_the_roofline_to_the_letter_is_refused():
    class Dearer(RooflineModel):
        def gpu(self, shape):
            return 2.0 * super().gpu(shape)

    model = roofline(scenario())
    assert flatten(model, ("mixed",)) is not None
    dearer = Dearer(model.efficiencies, model.cost, model.peaks, model.buckets)
    assert flatten(dearer, ("mixed",)) is None


def test_changed_prices_are_noticed(monkeypatch):
    model = roofline(scenario())
    assess = RooflineModel.assess

    def dearer(self, shape):
        seconds, resource = assess(self, shape)
        return seconds * (1.0 + 1e-9), resource

    monkeypatch.setattr(RooflineModel, "assess", dearer)
    assert flatten(model, ("mixed",)) is None


def test_a_run_that_gets_stuck_is_told_by_the_plain_code():
    model = random_model(random.Random(2))
    too_long = [Request("0", (("p", 5000),), 5)]
    with pytest.raises(Exception, match="request 0"):
        run(VllmScheduler(VLLM, shares_prefixes=False), too_long, model)


def test_records_of_a_kernel_expand_to_token_times():
    records = simulate(scenario()).result.records
    assert len(records.itls) == records.itl_offsets[-1] == (records.output_len - 1).sum()
    sums = np.add.reduceat(records.itls, records.itl_offsets[:-1])
    assert sums == pytest.approx(records.last_token - records.first_token)
