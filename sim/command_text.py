"""A scenario written out as the commands that a shell takes."""

from __future__ import annotations

import json
import math
import shlex

from sim.build import ScenarioSource
from sim.commands.bench import ClientName, default_spec, parse_bench_command
from sim.commands.serve import launch_words
from sim.errors import BadInput
from sim.secrets import without_secrets
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec


def serve_text(source: ScenarioSource) -> str:
    """The launch command of a source, ready for a shell.

    Raises:
        BadInput: the source cannot be built.
    """
    engine = source.build().engine
    model = source.serve.model or source.model
    start = (
        ["vllm", "serve", model]
        if engine.name == "vllm"
        else ["python", "-m", "sglang.launch_server", "--model-path", model]
    )
    env = [f"{name}={shlex.quote(value)}" for name, value in engine.env.items()]
    return without_secrets(" ".join([*env, shlex.join([*start, *launch_words(engine)])]))


def bench_text(source: ScenarioSource) -> str:
    """The benchmark command of a source, ready for a shell: as given where that says all of the load."""
    spec = source.bench.spec
    start = _client_words(source.bench.client)
    given = [word for g in source.bench.given if not g.flag.secret for word in (g.spelling, *g.words)]
    text = shlex.join([*start, *given])
    try:
        if parse_bench_command(text).spec == spec:
            return without_secrets(text)
    except BadInput:
        pass
    words = [] if source.bench.model is None else ["--model", source.bench.model]
    return shlex.join([*start, *words, *spec_words(spec)])


def load_line(spec: WorkloadSpec) -> str:
    """The benchmark command of a load, ready for a shell; the client asks the server for its model."""
    return shlex.join([*_client_words(spec.client), *spec_words(spec)])


def _client_words(client: ClientName) -> list[str]:
    return ["vllm", "bench", "serve"] if client == "vllm" else ["python", "-m", "sglang.bench_serving"]


def spec_words(spec: WorkloadSpec) -> list[str]:
    """A load as flags of `vllm bench serve`; what its defaults say already is left out, the length aside."""
    base = default_spec(spec.client)
    words = _dataset_words(spec)
    warmups = "--num-warmups" if spec.client == "vllm" else "--warmup-requests"
    numbers = {
        "--num-prompts": (spec.num_prompts, None),
        "--request-rate": (spec.request_rate, base.request_rate),
        "--burstiness": (spec.burstiness, base.burstiness),
        "--max-concurrency": (spec.max_concurrency, base.max_concurrency),
        warmups: (spec.num_warmups, base.num_warmups),
        "--seed": (spec.seed, base.seed),
        "--rate-scale": (spec.rate_scale, base.rate_scale),
        "--duration": (spec.duration, base.duration),
    }
    for flag, (value, default) in numbers.items():
        if value is not None and value != default:
            words += [flag, _number(value)]
    if spec.ramp_up is not None:
        strategy, low, high = spec.ramp_up
        words += ["--ramp-up-strategy", strategy]
        words += ["--ramp-up-start-rps", _number(low), "--ramp-up-end-rps", _number(high)]
    if spec.endpoint != base.endpoint:
        words += _endpoint_words(spec)
    if spec.goodput:
        words += ["--goodput", *(f"{name}:{_number(limit)}" for name, limit in spec.goodput)]
    if spec.percentiles != base.percentiles:
        words += ["--metric-percentiles", ",".join(_number(q) for q in spec.percentiles)]
    if spec.use_trace_arrivals:
        words.append("--use-trace-arrivals")
    elif isinstance(spec.dataset, FileDataset) and spec.request_rate == math.inf:
        words += ["--request-rate", "inf"]  # without a word a trace is sent at its own times
    if spec.client == "vllm" and spec.ignore_eos and not isinstance(spec.dataset, RandomDataset):
        words.append("--ignore-eos")
    if spec.client == "sglang" and not spec.ignore_eos:
        words.append("--disable-ignore-eos")
    return words


def _endpoint_words(spec: WorkloadSpec) -> list[str]:
    chat = spec.endpoint.endswith("/chat/completions")
    if spec.client == "vllm":
        return ["--endpoint", spec.endpoint, *(["--backend", "openai-chat"] if chat else [])]
    if spec.endpoint.endswith("/generate"):
        return ["--backend", "sglang"]
    return ["--backend", "sglang-oai-chat" if chat else "sglang-oai"]


def _dataset_words(spec: WorkloadSpec) -> list[str]:
    dataset = spec.dataset
    if isinstance(dataset, RandomDataset):
        words = ["--dataset-name", "random", "--random-input-len", str(dataset.input_len)]
        words += ["--random-output-len", str(dataset.output_len)]
        if dataset.output_range_ratio is not None:
            both = {"input": dataset.range_ratio, "output": dataset.output_range_ratio}
            words += ["--random-range-ratio", json.dumps(both)]
        elif dataset.range_ratio or dataset.style == "sglang":
            words += ["--random-range-ratio", _number(dataset.range_ratio)]
        if dataset.prefix_len:
            words += ["--random-prefix-len", str(dataset.prefix_len)]
        return words
    if isinstance(dataset, PrefixRepetitionDataset) and spec.client == "sglang":
        words = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(dataset.num_prefixes)]
        words += ["--gsp-prompts-per-group", str(max(1, spec.num_prompts // max(1, dataset.num_prefixes)))]
        words += ["--gsp-system-prompt-len", str(dataset.prefix_len)]
        words += ["--gsp-question-len", str(dataset.suffix_len), "--gsp-output-len", str(dataset.output_len)]
        return words if dataset.shuffle else [*words, "--gsp-ordered"]
    if isinstance(dataset, PrefixRepetitionDataset):
        words = ["--dataset-name", "prefix_repetition"]
        for name in ("prefix_len", "suffix_len", "num_prefixes", "output_len"):
            words += [f"--prefix-repetition-{name.replace('_', '-')}", str(getattr(dataset, name))]
        return words if dataset.shuffle else [*words, "--disable-shuffle"]
    assert isinstance(dataset, FileDataset)
    words = ["--dataset-name", dataset.kind, "--dataset-path", dataset.path]
    if dataset.output_len is not None:
        flag = "--sharegpt-output-len" if dataset.kind == "sharegpt" else "--output-len"
        words += [flag, str(dataset.output_len)]
    if dataset.context_len is not None:
        words += ["--sharegpt-context-len", str(dataset.context_len)]
    return words if dataset.shuffle else [*words, "--disable-shuffle"]


def _number(value: float) -> str:
    if isinstance(value, float) and math.isfinite(value) and value != int(value):
        return repr(value)
    return str(int(value)) if math.isfinite(value) else "inf"


def predict_text(source: ScenarioSource, profile: str | None = None) -> str:
    """The `servecast predict` command that makes this prediction again, with the pool that was assumed."""
    words = ["servecast", "predict", "--gpu", source.gpu]
    if source.serve.model != source.model:
        words += ["--model", source.model]
    if source.gpu_count is not None:
        words += ["--gpu-count", str(source.gpu_count)]
    if source.engine_version is not None:
        words += ["--engine-version", source.engine_version]
    if source.observed.kv_cache_tokens is not None:
        words += ["--kv-cache-tokens", str(source.observed.kv_cache_tokens)]
    if source.observed.num_gpu_blocks is not None:
        words += ["--num-gpu-blocks", str(source.observed.num_gpu_blocks)]
    if source.seed is not None:
        words += ["--seed", str(source.seed)]
    if profile is not None:
        words += ["--profile", profile]
    return shlex.join([*words, "--serve", serve_text(source), "--bench", bench_text(source)])
