"""Whether the requests of a load fit the longest sequence that an engine takes."""

from __future__ import annotations

import math

from sim.errors import BadInput
from sim.provenance import Note
from sim.scenario import EngineConfig, EngineName
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec

LENGTH_FLAG: dict[EngineName, str] = {"vllm": "--max-model-len", "sglang": "--context-length"}
LENGTH_KEY: dict[EngineName, str] = {"vllm": "max_model_len", "sglang": "context_length"}


def check_lengths(spec: WorkloadSpec, engine: EngineConfig) -> list[Note]:
    """Refuse a load whose ordinary request the server would refuse.

    Raises:
        BadInput: the nominal prompt, or prompt and output, exceed the engine's longest sequence.
    """
    flag, limit = LENGTH_FLAG[engine.name], int(engine[LENGTH_KEY[engine.name]])
    dataset = spec.dataset
    if isinstance(dataset, FileDataset):
        return []
    if isinstance(dataset, PrefixRepetitionDataset):
        prompt = longest = dataset.prefix_len + dataset.suffix_len
        input_flag, output_flag = "--prefix-repetition-prefix-len", "--prefix-repetition-output-len"
        longest_output = dataset.output_len
    else:
        prompt = dataset.prefix_len + dataset.input_len
        longest, longest_output = _longest(dataset)
        input_flag, output_flag = "--random-input-len", "--random-output-len"
    if prompt >= limit:
        raise BadInput(
            input_flag,
            prompt,
            f"a prompt of {prompt} tokens does not fit {flag} {limit}: shorten it or raise {flag}",
        )
    if prompt + dataset.output_len > limit:
        raise BadInput(
            output_flag,
            dataset.output_len,
            f"{prompt} + {dataset.output_len} tokens exceed {flag} {limit}, so the server refuses every "
            f"request: lower {input_flag} or {output_flag}, or raise {flag}",
        )
    if longest + longest_output > limit:
        return [
            Note(
                "warning",
                "--random-range-ratio",
                f"the longest requests ({longest} + {longest_output} tokens) exceed {flag} {limit}; "
                "the server refuses those",
            )
        ]
    return []


def _longest(dataset: RandomDataset) -> tuple[int, int]:
    if dataset.style == "sglang":
        return dataset.prefix_len + dataset.input_len, dataset.output_len
    output_ratio = dataset.range_ratio if dataset.output_range_ratio is None else dataset.output_range_ratio
    return (
        dataset.prefix_len + math.ceil(dataset.input_len * (1 + dataset.range_ratio)),
        math.ceil(dataset.output_len * (1 + output_ratio)),
    )
