"""`servecast memory`: the memory account, line by line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from sim.cli.options import ScenarioOptions, scenario_options
from sim.cli.outputs import check_outputs
from sim.engines.sglang.args import default_max_running_requests
from sim.engines.sglang.memory import account as sglang_account
from sim.engines.vllm.memory import account as vllm_account
from sim.memory import MemoryAccount, attention_ranks, rank_model, request_bytes
from sim.models.weights import (
    active_parameters,
    count_parameters,
    expected_distinct_experts,
    state_bytes_per_sequence,
    step_weight_bytes,
    with_quantization,
)
from sim.provenance import Note, Origin
from sim.results_io.atomic import write_text
from sim.scenario import Scenario

GIB = 2**30
_ACCOUNTS = {"vllm": vllm_account, "sglang": sglang_account}

# The account asks for no load; this one never contradicts a small --max-model-len.
_NO_LOAD = "vllm bench serve --random-input-len 1 --random-output-len 1"


@click.command()
@scenario_options
@click.option("--json", "json_path", metavar="FILE|-", help="Write the account as JSON.")
def memory(inputs: ScenarioOptions, json_path: str | None) -> None:
    """Print where one GPU's memory goes, line by line, and the KV pool that remains.

    Every figure says where it comes from: given, the engine's default, computed, or assumed. Ranges bound
    what the engine measures at start-up.
    """
    if inputs.bench is None and not inputs.files:
        inputs = replace(inputs, bench=_NO_LOAD)
    sources = inputs.sources()
    check_outputs({"--json": json_path}, inputs.reads(sources))
    accounts = []
    for source in sources:
        scenario = source.build()
        account = _ACCOUNTS[scenario.engine.name](
            scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed
        )
        accounts.append((scenario, account))
    if json_path is not None:
        documents = [account_json(scenario, account) for scenario, account in accounts]
        text = _dump(documents[0] if len(documents) == 1 else documents)
        if json_path == "-":
            click.echo(text, nl=False)
            return
        write_text(json_path, text, "--json")
    for position, (scenario, account) in enumerate(accounts):
        if position:
            click.echo()
        for note in _relevant(scenario.notes):
            click.echo(f"{note.kind}: {note.subject}: {note.text}", err=True)
        click.echo(account_text(scenario, account))


def account_text(scenario: Scenario, account: MemoryAccount) -> str:
    """The account as a table, the pool as the engine logs it, and what follows from both."""
    engine, model = scenario.engine, scenario.model
    parameters = count_parameters(model)
    rows = [
        f"{engine.name} {engine.asked_version}, {model.name}, {scenario.gpu.name}"
        + (f" x {scenario.gpu_count}" if scenario.gpu_count > 1 else "")
        + ", one rank",
        f"{parameters.total:,} parameters, {active_parameters(model):,} active per token"
        + _experts_text(scenario, account.kv_cache_tokens),
        _heads_text(scenario),
        "",
        f"{'':16}{'GiB':>9}  {'range':<17}{'origin':<10}",
    ]
    for line in account.lines:
        span = f"{line.low / GIB:.2f} .. {line.high / GIB:.2f}" if line.low != line.high else ""
        rows.append(f"{line.name:<16}{line.bytes / GIB:>9.3f}  {span:<17}{line.origin:<10}{line.rule}")
    rows += ["", *_pool_text(scenario, account)]
    if account.notes:
        rows += ["", *(f"{note.kind}: {note.subject}: {note.text}" for note in account.notes)]
    return "\n".join(rows)


def _experts_text(scenario: Scenario, tokens: int) -> str:
    moe = scenario.model.moe
    if moe is None:
        return ""
    batch = _max_batch(scenario, tokens)
    touched = expected_distinct_experts(moe.num_experts, moe.num_experts_per_tok, batch)
    tp = int(scenario.engine["tensor_parallel_size"])
    read = step_weight_bytes(with_quantization(scenario.model, scenario.engine["quantization"]), batch, tp)
    return (
        f"; a decode step of {batch} sequences meets {touched:.1f} of {moe.num_experts} experts "
        f"and reads {read / GIB:.2f} GiB of weights"
    )


def _heads_text(scenario: Scenario) -> str:
    model, ranks = scenario.model, attention_ranks(scenario.engine)
    if model.mla is not None:
        latent = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        return f"latent KV of {latent} elements per token and layer, the same on every rank"
    origin = dict(model.defaulted).get("head_dim", "config.json")
    heads = max(1, model.num_key_value_heads // ranks)
    shared = f", {heads} on each of {ranks} ranks" if ranks > 1 else ""
    return f"{model.num_key_value_heads} KV heads{shared}, head_dim {model.head_dim} ({origin})"


def _max_batch(scenario: Scenario, tokens: int) -> int:
    if scenario.engine.name == "vllm":
        return int(scenario.engine["max_num_seqs"])
    limit = scenario.engine["max_running_requests"]
    return int(limit or default_max_running_requests(tokens, int(scenario.engine["context_length"])))


def account_json(scenario: Scenario, account: MemoryAccount) -> dict[str, Any]:
    """The account as a JSON-ready dict; sizes in bytes."""
    return {
        "engine": scenario.engine.name,
        "version": scenario.engine.asked_version,
        "model": scenario.model.name,
        "gpu": scenario.gpu.name,
        "gpu_count": scenario.gpu_count,
        "total_memory_bytes": scenario.gpu.memory_bytes,
        "parameters": {
            "total": count_parameters(scenario.model).total,
            "active": active_parameters(scenario.model),
        },
        "lines": [
            {
                "name": line.name,
                "bytes": line.bytes,
                "low": line.low,
                "high": line.high,
                "origin": str(line.origin),
                "rule": line.rule,
            }
            for line in account.lines
        ],
        "head_dim": scenario.model.head_dim,
        "head_dim_origin": dict(scenario.model.defaulted).get("head_dim", "config.json"),
        "kv_bytes_per_token": account.kv_bytes_per_token,
        "state_bytes_per_sequence": _state_bytes(scenario),
        "kv_pool_bytes": account.kv_pool_bytes,
        "block_size": account.block_size,
        "num_gpu_blocks": account.num_gpu_blocks,
        "kv_cache_tokens": account.kv_cache_tokens,
        "kv_origin": str(account.kv_origin),
        "estimated_tokens": account.estimated_tokens,
        "estimated_tokens_low": account.estimated_tokens_low,
        "estimated_tokens_high": account.estimated_tokens_high,
        "residual_tokens": _residual(account),
        "request_tokens": _longest(scenario, account),
        "kv_bytes_per_request": request_bytes(scenario, _longest(scenario, account)),
        "max_concurrency": account.max_concurrency,
        "notes": [
            {"kind": note.kind, "subject": note.subject, "text": note.text}
            for note in (*_relevant(scenario.notes), *account.notes)
        ],
    }


def _pool_text(scenario: Scenario, account: MemoryAccount) -> list[str]:
    length, state = _longest(scenario, account), _state_bytes(scenario)
    rows = [
        f"KV per token      {account.kv_bytes_per_token:,} bytes"
        + (f", and {state:,} bytes of state per sequence" if state else ""),
        f"KV per request    {request_bytes(scenario, length):,} bytes at {length:,} tokens",
        f"blocks            {account.num_gpu_blocks:,} of {account.block_size} tokens",
        f"KV cache size     {account.kv_cache_tokens:,} tokens ({account.kv_origin})",
        f"concurrency       {account.max_concurrency:.2f}x for {length:,} tokens per request",
    ]
    if account.kv_origin is Origin.COMPUTED:
        rows.append(
            f"estimate          {account.estimated_tokens:,} tokens, "
            f"{account.estimated_tokens_low:,} .. {account.estimated_tokens_high:,}"
        )
    else:
        residual = _residual(account)
        share = residual / account.kv_cache_tokens if residual is not None else 0.0
        rows.append(
            f"estimate          {account.estimated_tokens:,} tokens; residual {residual:+,} ({share:+.1%})"
        )
    return rows


def _longest(scenario: Scenario, account: MemoryAccount) -> int:
    """The request that the account's concurrency counts [tokens]: vLLM's --max-model-len -1 shrinks it."""
    if scenario.engine.name == "sglang":
        return int(scenario.engine["context_length"])
    return account.longest or int(scenario.engine["max_model_len"])


def _residual(account: MemoryAccount) -> int | None:
    """Estimate less the given figure [tokens]; None where nothing was given."""
    if account.kv_origin is Origin.COMPUTED:
        return None
    return account.estimated_tokens - account.kv_cache_tokens


def _state_bytes(scenario: Scenario) -> int:
    return state_bytes_per_sequence(rank_model(scenario), attention_ranks(scenario.engine))


def _relevant(notes: tuple[Note, ...]) -> tuple[Note, ...]:
    """Notes on the server; the load does not matter here."""
    return tuple(
        note for note in notes if not note.subject.startswith(("--bench", "--random", "--num-prompts"))
    )


def _dump(document: Mapping[str, Any] | list[dict[str, Any]]) -> str:
    return json.dumps(document, indent=2) + "\n"
