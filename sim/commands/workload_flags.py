"""The meaning of the benchmark clients' flags: flags on top of a `WorkloadSpec`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from sim.commands.given import Given
from sim.commands.numbers import real
from sim.errors import BadInput
from sim.jsontext import load_json
from sim.provenance import Note
from sim.workload.spec import Dataset, FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_FILE_KINDS: dict[str, Literal["sharegpt", "azure", "mooncake", "vllm-result", "lengths"]] = {
    "sharegpt": "sharegpt",
    "azure": "azure",
    "mooncake": "mooncake",
    "timed_trace": "mooncake",
    "vllm-result": "vllm-result",
    "lengths": "lengths",
}


READY_CHECK = "--ready-check-timeout-sec"


def apply_vllm_flags(given: Given, base: WorkloadSpec, from_text: bool) -> tuple[WorkloadSpec, list[Note]]:
    """Apply `vllm bench serve` flags to `base`.

    `from_text` says that `base` is the bare command, so what the data set's name implies is set anew.

    Raises:
        BadInput: a value that the client refuses or that cannot be simulated.
    """
    notes: list[Note] = []
    dataset = _vllm_dataset(given, base.dataset)
    changes = _common(given, base)
    if given.has("--num-warmups"):
        changes["num_warmups"] = given.integer("--num-warmups", minimum=0)
    if given.integer(READY_CHECK, minimum=0):
        # Like a warm-up it sends the first prompt, which the run then finds in the prefix cache.
        changes["num_warmups"] = changes.get("num_warmups", base.num_warmups) + 1
        notes.append(
            Note("info", READY_CHECK, "sends the first prompt once before the run: one warm-up more")
        )
    burstiness = _burstiness(given)
    if burstiness is not None:
        changes["burstiness"] = burstiness
    ramp_up = _ramp_up(given)
    if ramp_up is not None:
        changes["ramp_up"] = ramp_up
    goodput = given.word("--goodput")
    if goodput is not None:
        changes["goodput"] = parse_goodput(goodput.split())
    percentiles = given.word("--metric-percentiles")
    if percentiles is not None:
        changes["percentiles"] = parse_percentiles(percentiles)
    metrics = given.word("--percentile-metrics")
    if metrics is not None:
        changes["percentile_metrics"] = parse_metrics(metrics)
    endpoint = given.word("--endpoint")
    if endpoint is not None:
        changes["endpoint"] = endpoint
    if from_text or given.has("--ignore-eos"):
        changes["ignore_eos"] = isinstance(dataset, RandomDataset) or given.truth("--ignore-eos") is True
    changes.update(_replay(given, dataset, from_text))
    spec = replace(base, dataset=dataset, **changes)
    return spec, notes + _assumptions(given, spec)


def apply_sglang_flags(given: Given, base: WorkloadSpec, from_text: bool) -> tuple[WorkloadSpec, list[Note]]:
    """Apply `sglang.bench_serving` flags to `base`; see `apply_vllm_flags`."""
    dataset, notes = _sglang_dataset(given, base.dataset, from_text)
    changes = _common(given, base)
    if isinstance(dataset, PrefixRepetitionDataset):
        changes.update(_group_prompts(given, dataset, base))
    if given.has("--warmup-requests"):
        changes["num_warmups"] = given.integer("--warmup-requests", minimum=0)
    if from_text or given.has("--disable-ignore-eos"):
        changes["ignore_eos"] = given.truth("--disable-ignore-eos") is not True
    slowdown = given.number("--mooncake-slowdown-factor", above=0.0)
    if slowdown is not None:
        changes["rate_scale"] = 1.0 / slowdown
    backend = given.word("--backend")
    if backend is not None:
        chat = "/v1/chat/completions" if backend.endswith("-chat") else "/v1/completions"
        changes["endpoint"] = _SGLANG_ENDPOINTS.get(backend, chat)
    changes.update(_replay(given, dataset, from_text))
    spec = replace(base, dataset=dataset, **changes)
    return spec, notes + _assumptions(given, spec)


_SGLANG_ENDPOINTS = {"sglang": "/generate", "sglang-native": "/generate"}


def parse_goodput(pairs: list[str]) -> tuple[tuple[str, float], ...]:
    """`ttft:500 tpot:50` -> limits in ms.

    Raises:
        BadInput: no such pair, no such metric, or a negative limit.
    """
    limits: dict[str, float] = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        if not colon or name not in GOODPUT_METRICS:
            raise BadInput(
                "--goodput", pair, f"must be METRIC:MILLISECONDS with one of {', '.join(GOODPUT_METRICS)}"
            )
        limits[name] = real("--goodput", value, minimum=0.0)
    return tuple(limits.items())


def parse_percentiles(text: str) -> tuple[float, ...]:
    """`50,90,99` -> numbers within (0, 100]."""
    return tuple(
        real("--metric-percentiles", part, above=0.0, maximum=100.0)
        for part in text.split(",")
        if part.strip()
    )


def parse_metrics(text: str) -> tuple[str, ...]:
    """`ttft,tpot` -> known metric names."""
    metrics = tuple(part.strip() for part in text.split(",") if part.strip())
    for metric in metrics:
        if metric not in METRICS:
            raise BadInput("--percentile-metrics", metric, f"must be one of {', '.join(METRICS)}")
    return metrics


def _common(given: Given, base: WorkloadSpec) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for flag, key, minimum in (
        ("--num-prompts", "num_prompts", 1),
        ("--max-concurrency", "max_concurrency", 1),
    ):
        value = given.integer(flag, minimum=minimum)
        if value is not None:
            changes[key] = value
    seed = given.integer("--seed", minimum=0)
    if seed is not None:
        changes["seed"] = seed
    rate = given.word("--request-rate")
    if rate is not None:
        changes["request_rate"] = real("--request-rate", rate, above=0.0, infinite=True)
        changes["ramp_up"] = None  # one of the two: a ramp sets the rate itself
    return changes


def _replay(given: Given, dataset: Dataset, from_text: bool) -> dict[str, Any]:
    """Trace replay: the trace's own times unless a schedule was given (vLLM: `--no-self-timed`)."""
    changes: dict[str, Any] = {}
    scale = given.number("--rate-scale", above=0.0)
    if scale is not None:
        changes["rate_scale"] = scale
    duration = given.number("--duration", above=0.0)
    if duration is not None:
        changes["duration"] = duration
    scheduled = given.has("--request-rate") or given.has("--ramp-up-strategy")
    if scheduled or (given.has("--dataset-name") and not _is_trace(dataset)):
        changes["use_trace_arrivals"] = False
    elif from_text and _is_trace(dataset):
        changes["use_trace_arrivals"] = True
    for flag in ("--use-trace-timestamps", "--self-timed", "--use-trace-arrivals"):
        asked = given.truth(flag)
        if asked is not None:
            changes["use_trace_arrivals"] = asked
    return changes


def _is_trace(dataset: Dataset) -> bool:
    """Whether a data set may bring its own send times."""
    return isinstance(dataset, FileDataset) and dataset.kind != "sharegpt"


def _burstiness(given: Given) -> float | None:
    text = given.word("--burstiness")
    return None if text is None else real("--burstiness", text, above=0.0, infinite=True)


def _ramp_up(given: Given) -> tuple[Literal["linear", "exponential"], float, float] | None:
    strategy = given.word("--ramp-up-strategy")
    start = given.integer("--ramp-up-start-rps", minimum=0)
    end = given.integer("--ramp-up-end-rps", minimum=0)
    if strategy is None:
        if start is not None or end is not None:
            raise BadInput("--ramp-up-start-rps", start, "needs --ramp-up-strategy linear or exponential")
        return None
    if given.has("--request-rate") and given.word("--request-rate") != "inf":
        raise BadInput(
            "--request-rate", given.word("--request-rate"), "must be left out with --ramp-up-strategy"
        )
    if start is None or end is None:
        raise BadInput("--ramp-up-strategy", strategy, "needs --ramp-up-start-rps and --ramp-up-end-rps")
    if start > end:
        raise BadInput("--ramp-up-start-rps", start, f"must not exceed --ramp-up-end-rps ({end})")
    if strategy == "exponential" and start == 0:
        raise BadInput("--ramp-up-start-rps", start, "must be at least 1 for an exponential ramp")
    if end == 0:
        raise BadInput("--ramp-up-end-rps", end, "must be at least 1")
    return ("linear" if strategy == "linear" else "exponential"), float(start), float(end)


def _vllm_dataset(given: Given, base: Dataset) -> Dataset:
    name = given.word("--dataset-name") or _name_of(base)
    output = given.integer("--output-len")
    if name == "random":
        own = base if isinstance(base, RandomDataset) else RandomDataset()
        ratio, output_ratio = _range_ratio(given, own)
        return replace(
            own,
            input_len=_first(
                given.integer("--input-len"), given.integer("--random-input-len"), own.input_len
            ),
            output_len=_first(output, given.integer("--random-output-len"), own.output_len),
            prefix_len=_first(given.integer("--random-prefix-len", minimum=0), None, own.prefix_len),
            range_ratio=ratio,
            output_range_ratio=output_ratio,
        )
    if name == "prefix_repetition":
        prefix = base if isinstance(base, PrefixRepetitionDataset) else PrefixRepetitionDataset()
        return replace(
            prefix,
            prefix_len=_first(
                given.integer("--prefix-repetition-prefix-len", minimum=0), None, prefix.prefix_len
            ),
            suffix_len=_first(given.integer("--prefix-repetition-suffix-len"), None, prefix.suffix_len),
            num_prefixes=_first(given.integer("--prefix-repetition-num-prefixes"), None, prefix.num_prefixes),
            output_len=_first(output, given.integer("--prefix-repetition-output-len"), prefix.output_len),
            shuffle=_shuffle(given, "--disable-shuffle", prefix.shuffle),
        )
    return _file_dataset(given, base, name, output)


def _file_dataset(given: Given, base: Dataset, name: str, output: int | None) -> FileDataset:
    if name not in _FILE_KINDS:
        raise BadInput(
            "--dataset-name",
            name,
            "known to the client, but not modelled: it needs its texts and a tokenizer; record the lengths "
            "and use sharegpt, or use random or prefix_repetition",
        )
    kind = _FILE_KINDS[name]
    own = base if isinstance(base, FileDataset) and base.kind == kind else None
    path = given.word("--dataset-path") or (own.path if own else None)
    if not path:
        raise BadInput("--dataset-path", None, f"must name a local file for the data set {name}")
    lengths = (output, given.integer("--sharegpt-output-len"), own.output_len if own else None)
    if name == "timed_trace":
        _check_timed_trace(given)
    return FileDataset(
        kind=kind,
        path=path,
        output_len=next((n for n in lengths if n is not None), None),
        shuffle=_shuffle(given, "--disable-shuffle", own.shuffle if own else True),
        context_len=given.integer("--sharegpt-context-len") or (own.context_len if own else None),
    )


def _shuffle(given: Given, unset: str, before: bool) -> bool:
    """Whether the client shuffles: `unset` is the flag that keeps it from doing so."""
    asked = given.truth(unset)
    return before if asked is None else not asked


def _check_timed_trace(given: Given) -> None:
    """Only Mooncake's form is read: blocks of 512 tokens, times in milliseconds."""
    if (given.integer("--timed-trace-chunk-hash-size") or 16) != 512:
        raise BadInput(
            "--timed-trace-chunk-hash-size",
            given.word("--timed-trace-chunk-hash-size") or "16",
            "only traces with 512 tokens per hash (Mooncake's) are modelled",
        )
    if not math.isclose(given.number("--timed-trace-sec-multiplier", above=0.0) or 1.0, 0.001):
        raise BadInput(
            "--timed-trace-sec-multiplier",
            given.word("--timed-trace-sec-multiplier") or "1",
            "only traces with milliseconds (0.001) are modelled",
        )


def _sglang_dataset(given: Given, base: Dataset, from_text: bool) -> tuple[Dataset, list[Note]]:
    name = given.word("--dataset-name") or ("sharegpt" if from_text else _name_of(base))
    if name in {"random", "random-ids"}:
        own = base if isinstance(base, RandomDataset) else RandomDataset(1024, 1024, style="sglang")
        ratio = given.number("--random-range-ratio", minimum=0.0, maximum=1.0)
        return replace(
            own,
            style="sglang",
            input_len=_first(given.integer("--random-input-len"), None, own.input_len),
            output_len=_first(given.integer("--random-output-len"), None, own.output_len),
            range_ratio=own.range_ratio if ratio is None else ratio,
        ), _sglang_range_note(ratio if ratio is not None else own.range_ratio)
    if name in {"generated-shared-prefix", "prefix_repetition"}:
        own_prefix = (
            base if isinstance(base, PrefixRepetitionDataset) else PrefixRepetitionDataset(2048, 128, 64, 256)
        )
        ratio = given.number("--gsp-range-ratio", minimum=0.0, maximum=1.0)
        if ratio not in (None, 1.0):
            raise BadInput("--gsp-range-ratio", str(ratio), "only 1.0 (fixed lengths) is modelled")
        return replace(
            own_prefix,
            prefix_len=_first(
                given.integer("--gsp-system-prompt-len", minimum=0), None, own_prefix.prefix_len
            ),
            suffix_len=_first(given.integer("--gsp-question-len"), None, own_prefix.suffix_len),
            num_prefixes=_first(given.integer("--gsp-num-groups"), None, own_prefix.num_prefixes),
            output_len=_first(given.integer("--gsp-output-len"), None, own_prefix.output_len),
            shuffle=_shuffle(given, "--gsp-ordered", own_prefix.shuffle),
        ), []
    return _file_dataset(given, base, name, None), []


def _group_prompts(given: Given, dataset: PrefixRepetitionDataset, base: WorkloadSpec) -> dict[str, int]:
    """generated-shared-prefix sends so many prompts per group, whatever `--num-prompts` says."""
    sizes = ("--gsp-num-groups", "--gsp-prompts-per-group")
    own = base.dataset if isinstance(base.dataset, PrefixRepetitionDataset) else None
    if own is not None and not any(map(given.has, sizes)):
        return {}
    before = 16 if own is None else max(1, base.num_prompts // own.num_prefixes)
    per_group = given.integer("--gsp-prompts-per-group") or before
    return {"num_prompts": dataset.num_prefixes * per_group}


def _sglang_range_note(ratio: float) -> list[Note]:
    if ratio:
        return []
    return [
        Note(
            "warning",
            "--random-range-ratio",
            "0 means lengths from 1 to the nominal one in this client; 1.0 is the fixed length",
        )
    ]


def _name_of(dataset: Dataset) -> str:
    if isinstance(dataset, RandomDataset):
        return "random"
    return "prefix_repetition" if isinstance(dataset, PrefixRepetitionDataset) else dataset.kind


def _range_ratio(given: Given, own: RandomDataset) -> tuple[float, float | None]:
    """A number, or `{"input": …, "output": …}`; each within [0, 1)."""
    flag = "--random-range-ratio"
    text = given.word(flag)
    if text is None:
        return own.range_ratio, own.output_range_ratio
    if not text.lstrip().startswith("{"):
        return _ratio(flag, text), None
    try:
        both = load_json(text)
    except json.JSONDecodeError:
        raise BadInput(flag, text, 'is not JSON; expected {"input": 0.3, "output": 0.5}') from None
    if not isinstance(both, Mapping) or set(both) != {"input", "output"}:
        raise BadInput(flag, text, "needs the keys input and output")
    return _ratio(flag, str(both["input"])), _ratio(flag, str(both["output"]))


def _ratio(flag: str, text: str) -> float:
    value = real(flag, text, minimum=0.0)
    if value >= 1.0:
        raise BadInput(flag, text, "must be below 1")
    return value


def _first(first: int | None, second: int | None, default: int) -> int:
    """The first that is not None."""
    return first if first is not None else second if second is not None else default


def _assumptions(given: Given, spec: WorkloadSpec) -> list[Note]:
    notes: list[Note] = []
    if not spec.ignore_eos:
        notes.append(
            Note(
                "assumed",
                "--ignore-eos",
                "not set: where the model would stop is unknown; every output is taken at its full length",
            )
        )
    chat = "chat" in spec.endpoint or "chat" in (given.word("--backend") or "")
    if chat:
        notes.append(
            Note("assumed", "--backend", "a chat template adds tokens to every prompt; they are not counted")
        )
    return notes
