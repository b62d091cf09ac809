"""What is sent: prompt and output lengths, and which prompts begin alike.

Draw order follows each client, so that the lengths are the ones that it would send with the same seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.provenance import Note
from sim.request import Segment
from sim.workload.spec import PrefixRepetitionDataset, RandomDataset
from sim.workload.table import OwnPrompts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Requests without their send times, in the order in which the client sends them.

    Attributes:
        segments: one tuple of segments per request.
        output_lens: tokens to generate, one per request, each at least 1.
        arrivals: send times that came with the data, ascending [s]; None if there are none.
        sessions: id of the session of each request, or None.
        priorities: one per request, or None.
        forces_ignore_eos: the client ignores stop tokens for this data set, whatever its flag says.
        notes: what the user should know of the data.
    """

    segments: Sequence[tuple[Segment, ...]]
    output_lens: Sequence[int] | Ints
    arrivals: Floats | None = None
    sessions: list[str | None] | None = None
    priorities: list[int] | None = None
    forces_ignore_eos: bool = False
    notes: tuple[Note, ...] = field(default_factory=tuple)

    def __len__(self) -> int:
        return len(self.output_lens)


def _check_ratio(value: float) -> float:
    if not 0.0 <= value < 1.0:
        raise BadInput("--random-range-ratio", value, "must be at least 0 and below 1")
    return value


def _check_lengths(dataset: RandomDataset) -> None:
    for flag, value, low in (
        ("--random-input-len", dataset.input_len, 0),
        ("--random-output-len", dataset.output_len, 1),
        ("--random-prefix-len", dataset.prefix_len, 0),
    ):
        if value < low:
            raise BadInput(flag, value, f"must be at least {low}")


def _starts(n: int, vocab_size: int, offsets: Ints) -> list[int]:
    """Token id (or its index among the allowed ids) with which each random prompt begins."""
    starts: list[int] = ((offsets + np.arange(n)) % vocab_size).tolist()
    return starts


def _random_segments(
    prefix_len: int, lens: list[int], keys: list[int] | None, special: int
) -> Sequence[tuple[Segment, ...]]:
    """Prefix (if any), then the rest under its key (None: the request's number); `special` tokens first."""
    head: tuple[Segment, ...] = (("special", special),) if special else ()
    if prefix_len:
        head = (*head, ("prefix", prefix_len))
    if not head and keys is None:
        return OwnPrompts(lens)
    if keys is None:
        keys = list(range(len(lens)))
    if not head:
        return [((key, length),) for key, length in zip(keys, lens, strict=True)]
    return [(*head, (key, length)) if length else head for key, length in zip(keys, lens, strict=True)]


def vllm_random(dataset: RandomDataset, n: int, seed: int) -> Prompts:
    """`vllm bench serve --dataset-name random` (vllm/benchmarks/datasets, 0.28).

    numpy's default_rng(seed) draws all input lengths, then all output lengths, then all start offsets.
    Lengths that a tokenizer changes by not being one-to-one are not modelled: the client asks for these.

    Raises:
        BadInput: naming the flag.
    """
    _check_lengths(dataset)
    ratio = _check_ratio(dataset.range_ratio)
    given = dataset.output_range_ratio
    output_ratio = ratio if given is None else _check_ratio(given)
    special = dataset.num_special_tokens
    real_len = max(0, dataset.input_len - special)
    low, high = math.floor(real_len * (1 - ratio)), math.ceil(real_len * (1 + ratio))
    if dataset.prefix_len + low < 1:
        raise BadInput("--random-input-len", dataset.input_len, "leaves the shortest prompts without tokens")
    output_low = max(math.floor(dataset.output_len * (1 - output_ratio)), 1)
    output_high = max(math.ceil(dataset.output_len * (1 + output_ratio)), 1)
    rng = np.random.default_rng(seed)
    input_lens: list[int] = rng.integers(low, high + 1, size=n).tolist()
    output_lens: Ints = rng.integers(output_low, output_high + 1, size=n)
    keys = None
    if dataset.vocab_size is not None:
        keys = _starts(n, dataset.vocab_size, rng.integers(0, dataset.vocab_size, size=n))
    segments = _random_segments(dataset.prefix_len, input_lens, keys, special)
    return Prompts(segments, output_lens, forces_ignore_eos=True)


def sglang_random(dataset: RandomDataset, n: int, rng: np.random.RandomState) -> Prompts:
    """`sglang.bench_serving --dataset-name random` or `random-ids` (sglang/benchmark/datasets, 0.5.21).

    Lengths are uniform in [max(1, int(L * range_ratio)), L]: a ratio of 0 means 1 to L. With a vocabulary
    size the data set is `random-ids`, whose start offsets come from the same stream.

    Raises:
        BadInput: naming the flag.
    """
    _check_lengths(dataset)
    ratio = dataset.range_ratio
    if not 0.0 <= ratio <= 1.0:
        raise BadInput("--random-range-ratio", ratio, "must be between 0 and 1")
    if dataset.input_len < 1:
        raise BadInput("--random-input-len", dataset.input_len, "must be at least 1")
    if dataset.prefix_len:
        raise BadInput("--random-prefix-len", dataset.prefix_len, "sglang.bench_serving has no shared prefix")
    input_lens = rng.randint(max(int(dataset.input_len * ratio), 1), dataset.input_len + 1, size=n)
    output_lens = rng.randint(max(int(dataset.output_len * ratio), 1), dataset.output_len + 1, size=n)
    special = dataset.num_special_tokens
    lens: list[int] = np.maximum(1, input_lens - special).tolist()
    keys = None
    if dataset.vocab_size is not None:
        offsets = rng.randint(0, dataset.vocab_size, size=n)
        keys = _starts(n, dataset.vocab_size, offsets.astype(np.int64))
    return Prompts(_random_segments(0, lens, keys, special), output_lens.astype(np.int64))


def prefix_repetition(dataset: PrefixRepetitionDataset, n: int, seed: int) -> Prompts:
    """`vllm bench serve --dataset-name prefix_repetition` (vllm/benchmarks/datasets, 0.28).

    n // num_prefixes requests per prefix, the remainder dropped, shuffled by Python's generator.

    Raises:
        BadInput: naming the flag.
    """
    for flag, value, low in (
        ("--prefix-repetition-prefix-len", dataset.prefix_len, 0),
        ("--prefix-repetition-suffix-len", dataset.suffix_len, 0),
        ("--prefix-repetition-num-prefixes", dataset.num_prefixes, 1),
        ("--prefix-repetition-output-len", dataset.output_len, 1),
    ):
        if value < low:
            raise BadInput(flag, value, f"must be at least {low}")
    if dataset.prefix_len + dataset.suffix_len < 1:
        raise BadInput("--prefix-repetition-suffix-len", dataset.suffix_len, "leaves prompts without tokens")
    per_prefix = n // dataset.num_prefixes
    if per_prefix == 0:
        raise BadInput("--num-prompts", n, f"must be at least {dataset.num_prefixes}, one per prefix")
    order = list(range(per_prefix * dataset.num_prefixes))
    if dataset.shuffle:
        random.Random(seed).shuffle(order)
    segments: list[tuple[Segment, ...]] = []
    for i in order:
        parts: tuple[Segment, Segment] = (
            (f"prefix:{i // per_prefix}", dataset.prefix_len),
            (i, dataset.suffix_len),
        )
        segments.append(tuple(part for part in parts if part[1]))
    notes: tuple[Note, ...] = ()
    if len(order) != n:
        text = f"{n} asked for, {len(order)} sent: {per_prefix} for each prefix, the rest is dropped"
        notes = (Note("info", "--num-prompts", text),)
    return Prompts(segments, [dataset.output_len] * len(order), notes=notes)
