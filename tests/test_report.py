import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from sim.figures.metrics import summarise
from sim.figures.regime import Regime
from sim.output.report import render
from sim.provenance import Note
from sim.results import BenchResult, RequestRecords, ServerSeries, Verdict
from sim.workload.spec import WorkloadSpec

ANSI = re.compile(r"\x1b\[\d+m")


def result(n=20, wait=0.0, spec=None, **more):
    due = np.arange(n) * 0.5
    sent = due + wait
    ttft = np.full(n, 0.25)
    ttft[-1] = 2.25  # an outlier that makes the P99
    records = RequestRecords(
        request_id=tuple(map(str, range(n))),
        scheduled=due,
        sent=sent,
        first_token=sent + ttft,
        last_token=sent + ttft + 0.75,
        prompt_len=np.full(n, 100),
        output_len=np.full(n, 4),
        cached_tokens=np.full(n, 0),
        status=("ok",) * n,
        itls=np.full(3 * n, 0.25),
        itl_offsets=np.arange(n + 1) * 3,
        queue=np.full(n, 0.05),
        prefill=np.full(n, 0.15),
        preemptions=np.zeros(n, dtype=int),
    )
    spec = spec or WorkloadSpec(request_rate=2.0)
    made = BenchResult(
        origin="predicted",
        tool="servecast predict",
        identity={
            "engine": "vllm",
            "engine_version": "0.28.0",
            "model": "m",
            "gpu": "G",
            "request_rate": 2.0,
        },
        duration=12.5,
        aggregates=summarise(records, spec, 12.5),
        records=records,
    )
    return replace(made, **more)


def line(text, label):
    found = [entry for entry in text.splitlines() if entry.startswith(label)]
    assert len(found) == 1, (label, found)
    return found[0]


def test_the_core_is_laid_out_as_the_bench_prints_it():
    text = render(result(200))
    start = text.index("============ Serving Benchmark Result ============")
    core = text[start : text.index("=" * 50, start + 60) + 50].splitlines()
    assert core[:9] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     200",
        "Failed requests:                         0",
        "Request rate configured (RPS):           2.00",
        "Benchmark duration (s):                  12.50",
        "Total input tokens:                      20000",
        "Total generated tokens:                  800",
        "Request throughput (req/s):              16.00",
        "Output token throughput (tok/s):         64.00",
    ]
    titles = [entry.strip("-") for entry in core if entry.startswith("--")]
    assert titles == [
        "Time to First Token",
        "Time per Output Token (excl. 1st token)",
        "Inter-token Latency",
        "End-to-end Latency",
    ]
    assert "Mean TTFT (ms):                          260.00" in core
    assert "P99 ITL (ms):                            250.00" in core
    assert core[-1] == "=" * 50


def test_percentiles_of_few_samples_carry_n_and_their_bounds():
    few = render(result(20))
    assert "n = 20, 95 %: 250.00 to no upper bound" in line(few, "P99 TTFT")
    assert "n =" not in line(few, "Mean TTFT")
    hundred_fifty = render(result(150))
    assert "n = 150, 95 %: 250.00 to no upper bound" in line(hundred_fifty, "P99 TTFT")
    assert "n =" not in line(hundred_fifty, "Median TTFT")
    assert "n =" not in render(result(1000))
    reported = result(20, records=None, aggregates={"completed": 20, "failed": 0, "p99_ttft_ms": 5.0})
    assert line(render(reported), "P99 TTFT").endswith("n = 20, too few to reach it")


def test_the_verdict_comes_first_with_its_reasons():
    verdict = Verdict("INVALID", (Note("warning", "failures", "7 of 20 requests failed"),))
    lines = render(result(verdict=verdict)).splitlines()
    assert lines[0] == "predicted: vllm · 0.28.0 · m · G"
    assert lines[1] == "verdict: INVALID"
    assert lines[2] == "  failures: 7 of 20 requests failed"


def saturated(**more):
    regime = Regime("saturated", 2.0, 1.5, 1.6, 1.25, 0.4, 9, 2.0, 1.0)
    return result(extra={"regime": asdict(regime)}, **more)


def test_past_saturation_the_rate_stands_instead_of_ttft_and_e2el():
    text = render(saturated())
    assert "saturated: 2 requests/s offered, about 1.6 sustainable, queue grows 0.4/s" in text
    assert "TTFT is not stated" in text
    assert "E2EL is not stated" in text
    assert "P99 TTFT" not in text
    assert "Mean TPOT" in text
    stable = render(result(extra={"regime": asdict(Regime("stable", 2.0))}))
    assert "stable: 2 requests/s offered" in stable
    assert "P99 TTFT" in stable


def test_the_parts_of_ttft_add_up():
    parts = {"client_wait": 50.0, "front_end": 10.0, "queue": 60.0, "prefill": 70.0, "stream": 10.0}
    text = render(result(extra={"ttft_parts_ms": parts}))
    shares = [float(share) for share in re.findall(r" (\d+\.\d)%", text)]
    assert sum(shares) == pytest.approx(100.0)
    assert line(text, "Prefill").split()[:3] == ["Prefill", "(ms):", "70.00"]
    closed = {"state": "closed-loop", "sustainable_rate": 1.5}
    looped = render(
        replace(result(extra={"ttft_parts_ms": parts, "regime": closed}), identity={"max_concurrency": 8})
    )
    assert "Client wait" not in looped  # by design, and no part of TTFT
    assert "closed loop of 8, 1.5 requests/s answered" in looped
    from_records = render(result())
    assert "Queue, running step's end included (ms): 50.00" in from_records
    assert "Queue (ms):                              50.00" in render(result(origin="measured"))
    assert "Prefill (ms):                            150.00" in from_records


def test_past_saturation_the_parts_of_ttft_are_shares_only():
    text = render(saturated())
    assert line(text, "Queue, running step's end included (%)").split(": ")[1].split()[0] == "14.29"
    assert line(text, "Prefill (%)").split()[2] == "42.86"
    assert "(ms)" not in text[text.index("Where Mean TTFT Goes") : text.index("KV Cache")]
    assert "Shares of this test alone" in text


def test_what_users_wait_for_is_shown_where_the_client_holds_back():
    held = render(result(wait=1.0))
    assert "client-limited" in line(held, "Mean dispatch delay")
    assert line(held, "Mean TTFT from schedule").split()[-1] == "1350.00"
    assert "schedule" not in render(result()).replace("from the Schedule", "schedule")


def test_what_only_the_engine_knows_is_shown():
    time = np.linspace(0.0, 12.0, 25)
    text = render(
        result(
            server={
                "num_preemptions": 35,
                "kv_cache_tokens": 194896,
                "max_kv_usage": 0.875,
                "prefix_cache_queries": 1000,
                "prefix_cache_hits": 784,
            },
            series=ServerSeries(time, time, np.zeros(25), time / 12.0),
            extra={"device_time": {"compute": 2.5, "bandwidth": 5.0}, "waiting_time": {"kv": 1.25}},
        )
    )
    assert line(text, "KV cache (tokens)").split()[-1] == "194896"
    assert line(text, "Peak KV use").split()[-1] == "87.50"
    assert line(text, "Preemptions").split()[-1] == "35"
    assert "784 of 1,000 tokens" in line(text, "Prefix cache hit rate (%):              ".strip())
    assert line(text, "bandwidth").split()[5] == "40.0"
    assert line(text, "kv (%").split()[5] == "10.0"
    assert text.index("bandwidth (%") < text.index("compute (%")
    spark = line(text, "KV use over time").split()[-1]
    assert len(spark) == 40
    assert (spark[0], spark[-1]) == ("▁", "█")


def test_notes_come_by_weight_and_wrap():
    notes = (
        Note("info", "data", "short"),
        Note("assumed", "roofline", "long " * 60),
        Note("warning", "steadiness", "mind"),
    )
    lines = render(result(notes=notes)).splitlines()
    at = lines.index("----------------------Notes-----------------------")
    assert lines[at + 1] == "warning: steadiness: mind"
    assert lines[at + 2].startswith("assumed: roofline")
    assert lines[-1] == "info: data: short"
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("made", [result(), result(wait=1.0), saturated(), result(1)])
def test_every_report_fits_100_columns_and_colours_change_nothing_else(made):
    plain, coloured = render(made), render(made, colour=True)
    assert not ANSI.search(plain)
    assert ANSI.search(coloured)
    assert ANSI.sub("", coloured) == plain
    assert max(map(len, plain.splitlines())) <= 100
    assert all(entry == entry.rstrip() for entry in plain.splitlines())


def test_unknown_is_called_unknown_and_never_zero():
    empty = BenchResult("measured", "guidellm", {}, 3.0, {"completed": 4, "failed": None})
    text = render(empty)
    assert line(text, "Failed requests").split()[-1] == "unknown"
    assert line(text, "Total input tokens").split()[-1] == "unknown"
    assert "TTFT" not in text
    assert "Preemptions" not in text


def test_goodput_says_how_many_requests_met_every_limit():
    spec = WorkloadSpec(request_rate=2.0, goodput=(("ttft", 300.0),))
    assert "95.0% of all requests met every limit" in line(render(result(20, spec=spec)), "Request goodput")


def test_unknown_samples_of_the_server_are_blanks_and_no_zeros():
    time, nan = np.linspace(0.0, 12.0, 40), np.full(40, np.nan)
    text = render(result(series=ServerSeries(time, nan, nan, nan)))
    for label in ("Peak KV use (%)", "KV use over time", "Running over time", "Waiting over time"):
        assert line(text, label).split(": ")[1].strip() == "unknown"
    some = np.full(40, 0.5)
    some[10:20] = np.nan
    text = render(result(series=ServerSeries(time, 8 * some, nan, some)))
    assert line(text, "Peak KV use").split()[-1] == "50.00"
    spark = line(text, "KV use over time")[41:]
    assert len(spark) == 40
    assert " " * 9 in spark
    assert set(spark) == {" ", "▅"}
    assert line(text, "Running over time").endswith("█ max 4")
