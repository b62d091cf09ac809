"""SGLang's memory account: against logged pools, by hand, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest

from sim.build import build_scenario
from sim.engines.sglang.memory import account, cell_bytes
from sim.errors import BadInput
from sim.memory import MemoryAccount, MemoryLine
from sim.models.table import load_model
from sim.provenance import Origin
from sim.scenario import Scenario

GIB = 2**30
NO_LOAD = "vllm bench serve --random-input-len 1 --random-output-len 1"


def scenario_of(serve: str, gpu: str, **options: Any) -> Scenario:
    command = f"python -m sglang.launch_server --model-path {serve}"
    return build_scenario(serve=command, bench=NO_LOAD, gpu=gpu, **options)


def account_of(serve: str, gpu: str, **options: Any) -> MemoryAccount:
    scenario = scenario_of(serve, gpu, **options)
    return account(scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed)


def line(result: MemoryAccount, name: str) -> MemoryLine:
    return next(entry for entry in result.lines if entry.name == name)


def test_the_estimate_is_near_a_logged_pool() -> None:
    result = account_of("Qwen/Qwen2.5-7B-Instruct --mem-fraction-static 0.85", "RTX 5090")
    assert result.estimated_tokens == pytest.approx(210_714, rel=0.05)
    assert result.estimated_tokens_low < 210_714 < result.estimated_tokens_high


def test_kv_memory_is_near_another_log() -> None:
    # 54.26 GiB of K and V on an H100.
    result = account_of("meta-llama/Llama-3.1-8B-Instruct --mem-fraction-static 0.88", "H100")
    assert line(result, "left for KV").bytes / GIB == pytest.approx(54.26, rel=0.02)


SMALL = "Qwen/Qwen3-8B --mem-fraction-static 0.8"


def test_the_fraction_is_of_what_is_free_before_the_load() -> None:
    result = account_of(SMALL, "L40S")
    before = line(result, "before load").bytes
    assert before == line(result, "total memory").bytes - line(result, "context").bytes
    assert line(result, "static").bytes == int(before * 0.8)
    left = line(result, "static").bytes - line(result, "weights").bytes - line(result, "load overhead").bytes
    assert line(result, "left for KV").bytes == left
    assert result.kv_cache_tokens == left // (36 * 4096)
    assert result.kv_origin is Origin.COMPUTED


def test_a_given_pool_wins_and_is_compared() -> None:
    estimate = account_of(SMALL, "L40S").estimated_tokens
    near = account_of(SMALL, "L40S", kv_cache_tokens=estimate - 10)
    assert near.kv_cache_tokens == estimate - 10
    assert [note.kind for note in near.notes if note.subject == "--kv-cache-tokens"] == ["info"]
    far = account_of(SMALL, "L40S", kv_cache_tokens=estimate // 3)
    assert [note.kind for note in far.notes if note.subject == "--kv-cache-tokens"] == ["warning"]


def test_a_pool_of_another_fraction_names_the_fraction() -> None:
    model = SMALL.split()[0]
    logged = account_of(f"{model} --mem-fraction-static 0.65", "L40S").kv_cache_tokens
    (note,) = [n for n in account_of(SMALL, "L40S", kv_cache_tokens=logged).notes if n.kind == "warning"]
    assert "--mem-fraction-static (about 0.650 would give this pool)" in note.text
    over = account_of(SMALL, "L40S", kv_cache_tokens=4 * logged)
    assert not any("would give" in n.text for n in over.notes)
    capped = account_of(f"{SMALL} --max-total-tokens {logged}", "L40S", kv_cache_tokens=2 * logged)
    assert not any("would give" in n.text for n in capped.notes)


def test_a_limit_lowers_and_never_raises() -> None:
    free = account_of(SMALL, "L40S").kv_cache_tokens
    assert account_of(f"{SMALL} --max-total-tokens 20000", "L40S").kv_cache_tokens == 20000
    assert account_of(f"{SMALL} --max-total-tokens {free * 2}", "L40S").kv_cache_tokens == free


def test_pages_round_down() -> None:
    result = account_of(f"{SMALL} --page-size 64 --max-total-tokens 20000", "L40S")
    assert result.kv_cache_tokens == 20000 // 64 * 64
    assert result.num_gpu_blocks == 20000 // 64


def test_sliding_layers_have_a_smaller_pool_of_their_own() -> None:
    scenario = scenario_of("openai/gpt-oss-20b --swa-full-tokens-ratio 0.5", "H100")
    per_layer = 8 * 64 * 2 * 2
    assert cell_bytes(scenario.model, scenario.engine) == 12 * per_layer + 0.5 * 12 * per_layer
    whole = scenario_of("openai/gpt-oss-20b --disable-hybrid-swa-memory", "H100")
    assert cell_bytes(whole.model, whole.engine) == 24 * per_layer


def test_stages_of_a_pipeline_share_weights_and_kv() -> None:
    one = account_of("Qwen/Qwen3-32B --tp-size 2", "H100")
    two = account_of("Qwen/Qwen3-32B --tp-size 2 --pp-size 2", "H100")
    assert line(two, "weights").bytes == line(one, "weights").bytes // 2
    assert two.kv_bytes_per_token == one.kv_bytes_per_token // 2
    assert two.kv_cache_tokens > 2 * one.kv_cache_tokens
    # Too large for a node of eight without stages.
    assert account_of("deepseek-ai/DeepSeek-V3 --tp-size 8 --pp-size 2", "H100").kv_cache_tokens > 0


def test_latents_are_not_divided_over_ranks() -> None:
    scenario = scenario_of("deepseek-ai/DeepSeek-V3 --tp-size 8", "H200")
    assert cell_bytes(scenario.model, scenario.engine) == 61 * 576 * 2


def test_states_share_the_memory_with_kv() -> None:
    result = account_of("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "H200")
    share = line(result, "state pool").bytes / line(result, "left for KV").bytes
    assert share == pytest.approx(0.9 / 1.9, rel=0.01)
    state = load_model("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8").state
    assert state is not None
    assert line(result, "state pool").bytes % state.bytes_per_sequence == 0


def test_a_pool_shorter_than_the_context_starts_all_the_same() -> None:
    result = account_of(f"{SMALL} --max-total-tokens 5000", "L40S")
    assert any(note.subject == "--context-length" and "never fit" in note.text for note in result.notes)


@pytest.mark.parametrize(
    ("serve", "gpu", "flag"),
    [
        ("Qwen/Qwen2.5-72B-Instruct", "H100", "--tp-size"),
        ("Qwen/Qwen2.5-32B-Instruct --mem-fraction-static 0.6", "H100", "--mem-fraction-static"),
    ],
)
def test_what_the_engine_refuses(serve: str, gpu: str, flag: str) -> None:
    with pytest.raises(BadInput) as refused:
        account_of(serve, gpu)
    assert refused.value.field == flag
