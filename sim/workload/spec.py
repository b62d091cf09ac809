"""The description of a load, in `vllm bench serve`'s own words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class RandomDataset:
    """`--dataset-name random`: lengths uniform around a nominal value, contents random.

    Lengths are integers uniform in [floor(L * (1 - range_ratio)), ceil(L * (1 + range_ratio))]
    (vllm/benchmarks/datasets, 0.28). `style` "sglang" draws as sglang.bench_serving does instead.

    Attributes:
        output_range_ratio: for outputs, where it differs (`{"input": .., "output": ..}`); None: the same.
        num_special_tokens: what the tokenizer adds to a prompt; the client takes them off before it draws,
            the server puts them back on.
        vocab_size: the tokenizer's; with it, prompts that begin at the same token id share their beginning
            as they really do; without it, no two prompts share anything but the common prefix. In the
            "sglang" style a given vocabulary also says that the data set is `random-ids`.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    style: Literal["vllm", "sglang"] = "vllm"
    output_range_ratio: float | None = None
    num_special_tokens: int = 0
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class PrefixRepetitionDataset:
    """`--dataset-name prefix_repetition`: `num_prefixes` shared prefixes, each with its own suffixes.

    `shuffle` is False under `--disable-shuffle`: then all requests of one prefix follow each other.
    """

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128
    shuffle: bool = True


@dataclass(frozen=True, slots=True)
class FileDataset:
    """Lengths (and, for traces, arrival times and shared prefixes) from a file.

    `kind`: "sharegpt" (ShareGPT JSON, or JSON/JSONL of lengths), "azure" (CSV), "mooncake" (JSONL),
    "vllm-result" (detailed result of `vllm bench serve`), "lengths" (JSONL of arrival, lengths, prefix).
    `output_len` replaces every output length of the file. `shuffle` and `context_len` (longer ones, prompt
    and output together, are left out by SGLang's client) concern "sharegpt" only.
    """

    kind: Literal["sharegpt", "azure", "mooncake", "vllm-result", "lengths"]
    path: str
    output_len: int | None = None
    shuffle: bool = True
    context_len: int | None = None


Dataset = RandomDataset | PrefixRepetitionDataset | FileDataset


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """One run of a benchmark client.

    Attributes:
        request_rate: requests/s; inf sends everything at once (or as `max_concurrency` lets through).
        burstiness: gamma shape of the gaps: 1 Poisson, below 1 bursty, above 1 smoother, inf constant.
        max_concurrency: a request is sent only while fewer than this many are in flight.
        ramp_up: ("linear" | "exponential", start rate, end rate), or None.
        use_trace_arrivals: send at the times that the file gives, instead of `request_rate`.
        rate_scale: multiplies the trace's rate (2.0: twice as fast).
        ignore_eos: outputs always have their full length.
        goodput: metric ("ttft", "tpot", "e2el") -> limit [ms].
        seed: the client's `--seed`.
        duration: stop sending after this many seconds, or None.
    """

    dataset: Dataset = field(default_factory=RandomDataset)
    num_prompts: int = 1000
    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up: tuple[Literal["linear", "exponential"], float, float] | None = None
    use_trace_arrivals: bool = False
    rate_scale: float = 1.0
    ignore_eos: bool = True
    num_warmups: int = 0
    goodput: tuple[tuple[str, float], ...] = ()
    percentiles: tuple[float, ...] = (99.0,)
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    seed: int = 0
    duration: float | None = None
    endpoint: str = "/v1/completions"
    client: Literal["vllm", "sglang"] = "vllm"

    @property
    def closed_loop(self) -> bool:
        """Whether the load has no schedule of its own: a request goes out as soon as a place is free."""
        return self.request_rate == float("inf") and self.ramp_up is None and not self.use_trace_arrivals
