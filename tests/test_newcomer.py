"""Newcomers that fit for certain are taken in by a short way, which leaves the same records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.engines.base import Scheduler, StepPlan
from sim.engines.sglang.newcomer import WelcomingSglangScheduler
from sim.engines.vllm.newcomer import WelcomingVllmScheduler
from sim.request import Request
from tests.engines_for_tests import sglang, vllm
from tests.leap_workloads import BentSteps, Case, differences, draw
from tests.test_sglang_leap import crowded

MODEL = BentSteps(step=1.0, seq=0.0, context=1e-4, token=0.0)
ENGINES: dict[str, Callable[..., Scheduler]] = {"vllm": vllm, "sglang": sglang}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many newcomers each call of the short way took in; 0: the plain scheduler had to decide."""
    counts: list[int] = []
    for kind in (WelcomingVllmScheduler, WelcomingSglangScheduler):

        def counting(self: Any, short_way: Callable[[Any], StepPlan | None] = kind._take_all_in) -> Any:
            plan = short_way(self)
            counts.append(0 if plan is None else len(plan.cached))
            return plan

        monkeypatch.setattr(kind, "_take_all_in", counting)
    return counts


def leave_the_same_records(engine: str, requests: list[Request], **config: Any) -> None:
    case = Case(lambda: ENGINES[engine](**config), requests, MODEL, {"fast": False})
    plain, leapt = case.outcome(leap=False), case.outcome(leap=True)
    assert not isinstance(leapt, str)
    assert leapt.path == "leaps"
    assert not differences(plain, leapt)


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("vllm", {}),
    ("vllm", {"async_scheduling": True}),
    ("vllm", {"async_scheduling": True, "enable_prefix_caching": False}),
    ("sglang", {}),
    ("sglang", {"disable_overlap_schedule": False}),
    ("sglang", {"disable_overlap_schedule": False, "page_size": 16}),
]


@pytest.mark.parametrize(("engine", "config"), CONFIGS)
def test_who_comes_alone_is_taken_in(taken: list[int], engine: str, config: dict[str, Any]) -> None:
    requests = [Request(str(i), ((f"p{i}", 20 + i % 7),), 30, 7.3 * i) for i in range(40)]
    leave_the_same_records(engine, requests, **config)
    assert sum(taken) == 40
    assert taken.count(0) == 0


@pytest.mark.parametrize(("engine", "config"), CONFIGS)
def test_several_are_taken_in_together(taken: list[int], engine: str, config: dict[str, Any]) -> None:
    requests = [Request(str(i), ((f"p{i}", 15),), 12, 20.0 * (i // 3)) for i in range(30)]
    leave_the_same_records(engine, requests, **config)
    assert taken == [3] * 10


@pytest.mark.parametrize(
    ("engine", "config"),
    [
        ("vllm", {"max_num_batched_tokens": 19}),
        ("vllm", {"num_gpu_blocks": 5}),
        ("sglang", {"chunked_prefill_size": 16}),
        ("sglang", {"max_prefill_tokens": 20}),
        ("sglang", {"max_total_tokens": 62}),
    ],
)
def test_who_may_not_fit_is_left_to_the_plain_scheduler(
    taken: list[int], engine: str, config: dict[str, Any]
) -> None:
    requests = [Request(str(i), ((f"p{i}", 20),), 40, 5.0 * i) for i in range(20)]
    leave_the_same_records(engine, requests, **config)
    assert taken.count(0) > 10


@pytest.mark.parametrize(("engine", "slots"), [("vllm", "max_num_seqs"), ("sglang", "max_running_requests")])
def test_nobody_is_taken_in_without_a_slot(taken: list[int], engine: str, slots: str) -> None:
    requests = [Request(str(i), ((f"p{i}", 20),), 40, 5.0 * i) for i in range(20)]
    leave_the_same_records(engine, requests, **{slots: 2})
    assert 2 <= sum(taken) < 20


def test_a_prefix_hit_goes_the_short_way_too(taken: list[int]) -> None:
    requests = [Request(str(i), (("family", 32), (f"own{i}", 5)), 12, 9.0 * i) for i in range(12)]
    leave_the_same_records("vllm", requests)
    assert sum(taken) == 12


def test_where_sglang_may_find_a_prefix_the_short_way_is_closed(taken: list[int]) -> None:
    requests = [Request(str(i), (("family", 32), (f"own{i}", 5)), 12, 9.0 * i) for i in range(12)]
    leave_the_same_records("sglang", requests)
    leave_the_same_records("sglang", requests[:1], schedule_policy="lof")
    leave_the_same_records("sglang", requests[:1], disable_radix_cache=True)
    assert not taken


def test_random_workloads_go_both_ways(taken: list[int]) -> None:
    for make in (lambda seed: draw("vllm", seed), lambda seed: draw("sglang", seed), crowded):
        taken.clear()
        for seed in range(500, 520):
            case = make(seed)
            assert not differences(case.outcome(leap=False), case.outcome(leap=True)), seed
        assert sum(taken) > 20
        assert 0 in taken
