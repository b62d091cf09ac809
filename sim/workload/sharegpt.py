"""ShareGPT-style files: conversations, or the lengths of prompts and answers."""

from __future__ import annotations

import math
import random
from typing import Any, Literal

from sim.errors import BadInput
from sim.provenance import Note
from sim.request import Segment
from sim.workload.datasets import Prompts
from sim.workload.files import INPUT_NAMES, OUTPUT_NAMES, json_lines, parse_json, pick, read_text, whole
from sim.workload.spec import FileDataset

BYTES_PER_TOKEN = 4.0  # English text under today's vocabularies: 4 to 4.5 bytes; no tokenizer is at hand
# vLLM: is_valid_sequence, vllm/benchmarks/datasets, 0.28
MIN_LEN, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
# SGLang: sample_sharegpt_requests, sglang/benchmark/datasets/sharegpt.py, 0.5.21
MIN_LEN_SGLANG = 2


def estimate_tokens(text: str) -> int:
    """Tokens of a text by its size in bytes: a stand-in for a tokenizer, good to some 20 % on prose."""
    return math.ceil(len(text.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN)  # half an emoji, too


def read_sharegpt(
    dataset: FileDataset, n: int, seed: int, client: Literal["vllm", "sglang"] = "vllm"
) -> Prompts:
    """The first `n` usable entries after the client's own shuffle.

    Of too few, vLLM's client draws some again at random; SGLang's sends those there are.

    Entries are conversations (`conversations: [{"value": ...}, {"value": ...}, ...]`; the first two turns
    count, entries with fewer are skipped, and too short or too long ones too, as the client does) or lengths
    (`input_len`, `output_len` and their usual aliases; none is skipped but for `context_len`). Order of
    draws: ShareGPTDataset, vllm/benchmarks/datasets, 0.28.

    Raises:
        BadInput: naming file and entry.
    """
    entries = _entries(dataset.path)
    with_text = [(where, e["conversations"]) for where, e in entries if "conversations" in e]
    if with_text and len(with_text) < len(entries):
        raise BadInput(dataset.path, None, "mixes conversations and lengths; use one of the two")
    lengths = (
        _conversations(with_text, dataset, n, seed, client)
        if with_text
        else _plain(entries, dataset, n, seed)
    )
    if not lengths:
        least = f"{MIN_LEN} to {MAX_PROMPT}" if client == "vllm" else f"at least {MIN_LEN_SGLANG}"
        hint = f"holds no usable entry (two turns, {least} prompt tokens)"
        raise BadInput("--dataset-path", dataset.path, hint)
    notes = []
    if with_text:
        text = f"lengths are estimated at {BYTES_PER_TOKEN:g} bytes per token; give lengths to be exact"
        notes.append(Note("assumed", dataset.path, text))
    rows = list(range(len(lengths)))
    if len(rows) < n and client == "sglang":
        text = f"{len(rows)} usable entries for {n} prompts: all are sent, once"
        notes.append(Note("warning", dataset.path, text))
    elif len(rows) < n:
        notes.append(
            Note("info", dataset.path, f"{len(rows)} usable entries for {n} prompts: some are repeated")
        )
        rng = random.Random(seed)
        rows += [rng.choice(rows[: len(lengths)]) for _ in range(n - len(rows))]
    # A repeated entry is the same text again, so it hits the prefix cache: the key is the entry's.
    segments: list[tuple[Segment, ...]] = [((row, lengths[row][0]),) for row in rows]
    return Prompts(segments, [lengths[row][1] for row in rows], notes=tuple(notes))


def _entries(path: str) -> list[tuple[str, dict[str, Any]]]:
    """(where, entry) of a JSON list or of JSON lines."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        values = parse_json(text, path)
        found = [(f"{path} entry {i}", value) for i, value in enumerate(values)]
    else:
        found = [(f"{path} line {line}", value) for line, value in json_lines(text, path)]
    for where, value in found:
        if not isinstance(value, dict):
            raise BadInput(where, None, "must be a JSON object")
    return found


def _shuffled(count: int, dataset: FileDataset, seed: int) -> list[int]:
    order = list(range(count))
    if dataset.shuffle:
        random.Random(seed).shuffle(order)
    return order


def _conversations(
    entries: list[tuple[str, Any]], dataset: FileDataset, n: int, seed: int, client: Literal["vllm", "sglang"]
) -> list[tuple[int, int]]:
    """(prompt, output) tokens of conversations, as many as asked for."""
    for where, turns in entries:
        if not isinstance(turns, list):
            raise BadInput(f"{where} conversations", None, "must be a list of turns")
    usable = [(where, turns) for where, turns in entries if len(turns) >= 2]
    lengths: list[tuple[int, int]] = []
    for index in _shuffled(len(usable), dataset, seed):
        if len(lengths) == n:
            break
        where, turns = usable[index]
        try:
            prompt, answer = (str(turn["value"]) for turn in turns[:2])
        except (KeyError, TypeError):
            raise BadInput(where, None, 'conversation turns must be objects with a "value"') from None
        tokens = estimate_tokens(prompt)
        output = dataset.output_len or estimate_tokens(answer)
        if _sends(dataset, client, tokens, output):
            lengths.append((tokens, output))
    return lengths


def _sends(dataset: FileDataset, client: Literal["vllm", "sglang"], prompt: int, output: int) -> bool:
    """Whether a client sends a conversation of so many tokens."""
    if client == "sglang":
        return prompt >= MIN_LEN_SGLANG and output >= MIN_LEN_SGLANG and _fits(dataset, prompt + output)
    too_short = prompt < MIN_LEN or (dataset.output_len is None and output < MIN_LEN)
    return not (too_short or prompt > MAX_PROMPT or prompt + output > MAX_TOTAL)


def _fits(dataset: FileDataset, total: int) -> bool:
    return dataset.context_len is None or total <= dataset.context_len


def _plain(
    entries: list[tuple[str, dict[str, Any]]], dataset: FileDataset, n: int, seed: int
) -> list[tuple[int, int]]:
    """(prompt, output) tokens of a file of lengths."""
    lengths: list[tuple[int, int]] = []
    for index in _shuffled(len(entries), dataset, seed):
        if len(lengths) == n:
            break
        where, entry = entries[index]
        tokens = whole(pick(entry, INPUT_NAMES, where), where, "input_len", 1)
        output = dataset.output_len or whole(pick(entry, OUTPUT_NAMES, where), where, "output_len", 1)
        if _fits(dataset, tokens + output):
            lengths.append((tokens, output))
    return lengths
