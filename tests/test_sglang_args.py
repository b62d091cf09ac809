from __future__ import annotations

from dataclasses import replace

import pytest

from sim.build import build_scenario
from sim.commands.serve import parse_serve_command
from sim.engines.sglang.args import default_max_running_requests, resolve
from sim.engines.sglang.engine import ENGINE
from sim.engines.sglang.graphs import decode_batch_sizes, prefill_token_buckets
from sim.engines.sglang.scheduler import SglangScheduler
from sim.errors import BadInput
from sim.hardware.gpus import find_gpu
from sim.models.model import MlaConfig, ModelConfig
from sim.provenance import Note, Origin
from sim.scenario import EngineConfig
from tests.test_vllm_args import MODEL

MLA_MODEL = replace(
    MODEL,
    name="test/V3",
    architecture="DeepseekV3ForCausalLM",
    num_attention_heads=128,
    num_key_value_heads=128,
    mla=MlaConfig(512, 1536, 128, 64, 128),
)


def run(
    flags: str = "",
    card: str = "H100",
    model: ModelConfig = MODEL,
    version: str | None = "0.5.21",
    env: str = "",
) -> tuple[EngineConfig, tuple[Note, ...]]:
    command = parse_serve_command(f"{env} python -m sglang.launch_server --model-path test/8B {flags}")
    return resolve(command, model, find_gpu(card)[0], None, version)


@pytest.mark.parametrize(
    ("card", "chunk", "max_bs", "max_bs_tp4"),
    [
        ("T4", 2048, 8, 8),
        ("RTX 4090", 4096, 48, 160),
        ("RTX 5090", 4096, 48, 160),
        ("A100-40GB", 4096, 32, 160),
        ("L40S", 4096, 32, 160),
        ("H100", 8192, 256, 512),
        ("A100-80GB", 8192, 256, 512),
        ("H200", 8192, 256, 512),
        ("B200", 16384, 512, 512),
        ("MI300X", 16384, 512, 512),
    ],
)
def test_defaults_by_memory(card: str, chunk: int, max_bs: int, max_bs_tp4: int) -> None:
    engine, _ = run(card=card)
    assert engine["chunked_prefill_size"] == chunk
    assert engine["cuda_graph_max_bs_decode"] == max_bs
    assert engine.values["chunked_prefill_size"].origin is Origin.DEFAULT
    assert run("--tp 4", card=card)[0]["cuda_graph_max_bs_decode"] == max_bs_tp4


@pytest.mark.parametrize(
    ("card", "fraction"),
    [("H100", 0.830), ("H200", 0.903), ("B200", 0.854), ("A100-40GB", 0.823), ("A10G", 0.684)],
)
def test_memory_fraction(card: str, fraction: float) -> None:
    engine, _ = run(card=card)
    assert engine["mem_fraction_static"] == fraction
    assert "reserve" in engine.values["mem_fraction_static"].rule


def test_memory_fraction_follows_its_causes() -> None:
    # 512 + 4096 * 1.5 + 1/8 GiB + 48 * 2 MiB, no prefill graphs, of 24564 MiB
    engine, _ = run("--disable-prefill-cuda-graph", card="RTX 4090")
    assert engine["mem_fraction_static"] == round(1 - 6880 / 24564, 3)
    # nothing for decode graphs either, and chunks of 8192
    engine, _ = run("--disable-cuda-graph --chunked-prefill-size 8192", card="RTX 4090")
    assert engine["mem_fraction_static"] == round(1 - (512 + 12288 + 128) / 24564, 3)
    # large cards keep 10 GiB at least
    engine, _ = run("--disable-cuda-graph --chunked-prefill-size 2048", card="H100")
    assert engine["mem_fraction_static"] == round(1 - 10240 / 81559, 3)
    # MLA: a flat 1.5 GiB for the prefill graphs
    engine, _ = run("--tp 8", card="H200", model=MLA_MODEL)
    assert engine["mem_fraction_static"] == round(1 - (512 + 12288 + 1024 + 1024 + 1536) / 143771, 3)
    assert run("--mem-fraction-static 0.7")[0]["mem_fraction_static"] == 0.7


def test_vision_models_get_less_and_no_prefill_graphs() -> None:
    engine, notes = run(model=replace(MODEL, extra_parameters=10**9))
    # 512 + 8192 * 1.5 + 1/8 GiB + 256 * 2 MiB of 81559 MiB, then times 0.95
    assert engine["mem_fraction_static"] == pytest.approx(0.95 * round(1 - 13440 / 81559, 3))
    assert engine["cuda_graph_bs_prefill"] == ()
    assert any(n.kind == "assumed" and n.subject == "--mem-fraction-static" for n in notes)


def test_decode_graph_sizes() -> None:
    assert decode_batch_sizes(48) == (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)
    assert decode_batch_sizes(20) == (1, 2, 4, 8, 12, 16, 20)
    assert decode_batch_sizes(5, padding=False) == (1, 2, 3, 4, 5)
    assert decode_batch_sizes(600)[-6:] == (480, 496, 512, 544, 576, 600)
    assert run("--cuda-graph-bs-decode 4 1 2")[0]["cuda_graph_bs_decode"] == (1, 2, 4)
    assert run("--cuda-graph-bs-decode 4 1 2")[0]["cuda_graph_max_bs_decode"] == 4


def test_prefill_graph_buckets() -> None:
    buckets = prefill_token_buckets(8192)
    assert len(buckets) == 58
    assert (buckets[0], buckets[7], buckets[8], buckets[-1]) == (4, 32, 48, 8192)
    assert prefill_token_buckets(300)[-2:] == (256, 288)
    assert run("--tp 8", card="H200", model=MLA_MODEL)[0]["cuda_graph_bs_prefill"][-1] == 2048
    assert run("--max-total-tokens 1000")[0]["cuda_graph_bs_prefill"][-1] == 960
    assert run("--cuda-graph-max-bs-prefill 512")[0]["cuda_graph_bs_prefill"][-1] == 512
    assert run("--pp-size 2")[0]["cuda_graph_bs_prefill"] == ()


@pytest.mark.parametrize(
    ("card", "flags", "model", "page"),
    [
        ("H100", "", MODEL, 1),
        ("RTX 5090", "", MODEL, 1),
        ("B200", "", MODEL, 64),
        ("B200", "--page-size 32", MODEL, 32),
        ("B200", "--page-size 8", MODEL, 64),
        ("B200", "--attention-backend fa4", MODEL, 128),
        ("B200", "--attention-backend flashinfer", MODEL, 1),
        ("B200", "", MLA_MODEL, 64),
        ("H200", "", MLA_MODEL, 1),
        ("H200", "--attention-backend flashmla", MLA_MODEL, 64),
        ("H100", "--page-size 16", MODEL, 16),
    ],
)
def test_page_size(card: str, flags: str, model: ModelConfig, page: int) -> None:
    assert run(flags, card=card, model=model)[0]["page_size"] == page


def test_a_forced_page_size_is_said() -> None:
    _, notes = run("--page-size 8", card="B200")
    assert any(n.subject == "--page-size" and "64" in n.text for n in notes)


def test_new_token_ratio() -> None:
    engine, _ = run()
    assert engine["init_new_token_ratio"] == 0.7
    assert engine["min_new_token_ratio"] == pytest.approx(0.098)
    assert engine["new_token_ratio_decay"] == pytest.approx(0.0010033, rel=1e-4)
    assert run("--schedule-conservativeness 2")[0]["init_new_token_ratio"] == 1.0
    env = "SGLANG_INIT_NEW_TOKEN_RATIO=0.5 SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS=100"
    assert run(env=env)[0]["new_token_ratio_decay"] == pytest.approx(0.5 * 0.86 / 100)


def test_the_scheduler_starts_with_the_ratio_of_the_environment() -> None:
    env = "SGLANG_INIT_NEW_TOKEN_RATIO=0.5 SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR=0.2"
    for given, init, low in (("", 0.7, 0.098), (env, 0.5, 0.1)):
        scenario = build_scenario(
            serve=f"{given} python -m sglang.launch_server --model-path Qwen/Qwen3-8B",
            bench="vllm bench serve --dataset-name random --num-prompts 2",
            gpu="H100",
        )
        assert not any("NEW_TOKEN_RATIO" in note.subject for note in scenario.notes)
        pool = ENGINE.account(
            scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed
        )
        scheduler = ENGINE.make_scheduler(scenario.engine, pool, [], 0)
        assert isinstance(scheduler, SglangScheduler)
        assert scheduler.ratio.current == scheduler.ratio.init == pytest.approx(init)
        assert scheduler.ratio.min == pytest.approx(low)


def test_other_defaults() -> None:
    engine, notes = run()
    assert engine["schedule_policy"] == "fcfs"
    assert engine["max_prefill_tokens"] == 16384
    assert engine["max_running_requests"] is None
    assert engine["disable_overlap_schedule"] is False
    assert engine["disable_radix_cache"] is False
    assert engine["enable_mixed_chunk"] is False
    assert engine["context_length"] == 131072
    assert notes == ()


def test_request_slots_from_the_pool() -> None:
    assert default_max_running_requests(200_000, 32_768) == 3125
    assert default_max_running_requests(200_000, 131_072) == 2048
    assert default_max_running_requests(10_000_000, 32_768) == 4096
    assert default_max_running_requests(1_000, 32_768) == 500


def test_dp_attention_shares_ranks_and_shrinks_chunks() -> None:
    engine, notes = run("--tp 8 --dp 8 --enable-dp-attention", card="H200", model=MLA_MODEL)
    assert engine["chunked_prefill_size"] == 1024
    assert engine["schedule_conservativeness"] == pytest.approx(0.3)
    assert {"--dp-size", "--enable-dp-attention"} <= {n.subject for n in notes if n.kind == "not-modelled"}
    assert run("--enable-dp-attention")[0]["enable_dp_attention"] is False


def test_mixed_chunk_without_chunking_does_nothing() -> None:
    engine, notes = run("--enable-mixed-chunk --chunked-prefill-size -1")
    assert engine["enable_mixed_chunk"] is False
    assert any(n.kind == "warning" and n.subject == "--enable-mixed-chunk" for n in notes)


def test_lpm_without_radix_cache_is_fcfs() -> None:
    engine, notes = run("--schedule-policy lpm --disable-radix-cache")
    assert engine["schedule_policy"] == "fcfs"
    assert any(n.kind == "warning" and n.subject == "--schedule-policy" for n in notes)


def test_flags_without_effect_or_model_are_named() -> None:
    _, notes = run(
        "--num-continuous-decode-steps 4 --enable-hierarchical-cache --speculative-algorithm EAGLE "
        "--radix-eviction-policy lfu --disable-priority-preemption"
    )
    kinds = {n.subject: n.kind for n in notes}
    assert kinds["--num-continuous-decode-steps"] == "warning"
    assert kinds["--enable-hierarchical-cache"] == "not-modelled"
    assert kinds["--speculative-algorithm"] == "not-modelled"
    assert kinds["--radix-eviction-policy"] == "not-modelled"
    assert kinds["--disable-priority-preemption"] == "warning"


def test_unknown_versions_use_the_nearest_rules() -> None:
    engine, notes = run(version="0.4.9")
    assert (engine.version, engine.asked_version) == ("0.5.21", "0.4.9")
    assert any(n.subject == "--engine-version" for n in notes)
    with pytest.raises(BadInput, match="--cuda-graph-max-bs-decode"):
        run("--cuda-graph-max-bs 32")


@pytest.mark.parametrize(
    ("flags", "field", "word"),
    [
        ("--chunked-prefill-size 4100 --page-size 16", "--page-size", "4100"),
        ("--chunked-prefill-size 0", "--chunked-prefill-size", "-1"),
        ("--chunked-prefill-size -5", "--chunked-prefill-size", "at least -1"),
        ("--mem-fraction-static 0", "--mem-fraction-static", "greater than 0"),
        ("--mem-fraction-static 1.1", "--mem-fraction-static", "at most 1"),
        ("--max-running-requests 0", "--max-running-requests", "at least 1"),
        ("--max-total-tokens -1", "--max-total-tokens", "at least 1"),
        ("--schedule-conservativeness -1", "--schedule-conservativeness", "at least 0"),
        ("--context-length 200000", "--context-length", "131072"),
        ("--tp 3", "--tensor-parallel-size", "32 attention heads"),
        ("--tp 4 --dp 3 --enable-dp-attention", "--dp-size", "divide"),
        ("--schedule-policy hrrn", "--schedule-policy", "not modelled"),
        ("--schedule-policy best", "--schedule-policy", "must be one of"),
        ("--schedule-policy shortest-prefill-first --disable-radix-cache", "--schedule-policy", "radix"),
        ("--schedule-policy lpm --enable-priority-scheduling", "--enable-priority-scheduling", "lpm"),
        ("--retraction-policy priority", "--retraction-policy", "--enable-priority-scheduling"),
        ("--dtype bfloat17", "--dtype", "must be one of"),
    ],
)
def test_what_the_engine_refuses(flags: str, field: str, word: str) -> None:
    with pytest.raises(BadInput) as caught:
        run(flags)
    assert caught.value.field == field
    assert word in str(caught.value)


def test_fp8_weights_need_ampere() -> None:
    with pytest.raises(BadInput, match=r"--quantization: 'fp8': .*8\.0, .*T4.* has 7\.5"):
        run("--quantization fp8", card="T4")
    assert run("--quantization fp8", card="A100")[0]["quantization"] == "fp8"


def test_bad_environment_number() -> None:
    with pytest.raises(BadInput, match="SGLANG_INIT_NEW_TOKEN_RATIO"):
        run(env="SGLANG_INIT_NEW_TOKEN_RATIO=often")
