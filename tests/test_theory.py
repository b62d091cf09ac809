"""With unit step times the engine is a queue that theory knows."""

import numpy as np
import pytest
from scipy import stats

from sim.loop.run import run
from sim.request import Request
from tests.engines_for_tests import FixedSteps, sglang, vllm

REPLICATIONS = 8
REQUESTS = 2000
WARM_UP = 200
SERVICE = 1.0


def mean_waits(rate, make):
    """Mean wait from arrival to first scheduling of each replication, start-up left out [s]."""
    waits = []
    for seed in range(REPLICATIONS):
        gaps = np.random.default_rng([seed, 2026]).exponential(1.0 / rate, REQUESTS)
        arrivals = np.cumsum(gaps).tolist()
        requests = [Request(str(i), ((i, 1),), 1, t) for i, t in enumerate(arrivals)]
        outcome = run(make(), requests, FixedSteps(step=SERVICE))
        waits.append(float(outcome.ttft_parts.queue[WARM_UP:].mean()))
    return np.array(waits)


def agrees(waits, expected):
    low, high = stats.t.interval(
        0.99, len(waits) - 1, loc=waits.mean(), scale=waits.std(ddof=1) / np.sqrt(len(waits))
    )
    return low <= expected <= high


def md1_wait(rate):
    """Mean wait in queue of M/D/1 (Pollaczek and Khinchine)."""
    rho = rate * SERVICE
    return rho * SERVICE / (2.0 * (1.0 - rho))


def batch_service_wait(rate, batch, size=600):
    """Mean wait in queue where up to `batch` customers are served together for a fixed time.

    Bailey's embedded chain (J. R. Stat. Soc. B 16, 1954) with service on arrival at an idle server: X is the
    number that a service leaves behind. Time averages follow from the cycle between two services.
    """
    arrivals = stats.poisson.pmf(np.arange(size), rate * SERVICE)
    chain = np.zeros((size, size))
    for left in range(size):
        kept = max(left - batch, 0)
        chain[left, kept:] = arrivals[: size - kept]
        chain[left, -1] += 1.0 - chain[left].sum()
    system = np.vstack([chain.T - np.eye(size), np.ones(size)])
    share = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0]
    kept = np.maximum(np.arange(size) - batch, 0)
    waiting_time = (share * kept).sum() * SERVICE + rate * SERVICE**2 / 2.0
    cycle = SERVICE + share[0] / rate
    return waiting_time / cycle / rate


def test_the_batch_formula_holds_the_single_server_as_a_special_case():
    assert batch_service_wait(0.6, 1, size=200) == pytest.approx(md1_wait(0.6), rel=1e-6)


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_one_sequence_at_a_time_is_an_md1_queue(rate):
    waits = mean_waits(rate, lambda: vllm(max_num_seqs=1))
    assert agrees(waits, md1_wait(rate))
    assert waits.mean() == pytest.approx(md1_wait(rate), rel=0.15)


@pytest.mark.parametrize(("batch", "rate"), [(4, 2.0), (4, 3.2), (8, 6.0)])
def test_a_full_batch_per_step_is_a_batch_service_queue(batch, rate):
    waits = mean_waits(rate, lambda: vllm(max_num_seqs=batch))
    expected = batch_service_wait(rate, batch, size=300)
    assert agrees(waits, expected)
    assert waits.mean() == pytest.approx(expected, rel=0.1)


def test_sglang_without_overlap_is_the_same_queue():
    waits = mean_waits(0.8, lambda: sglang(max_running_requests=1))
    assert agrees(waits, md1_wait(0.8))
