from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.commands.serve import parse_serve_command
from sim.engines.values import nearest_version
from sim.engines.vllm.args import RULE_VERSIONS, batch_defaults, resolve
from sim.engines.vllm.graphs import default_sizes
from sim.errors import BadInput
from sim.hardware.gpus import find_gpu
from sim.hardware.spec import GpuSpec
from sim.models.model import MlaConfig, ModelConfig, QuantConfig
from sim.provenance import Note, Origin
from sim.scenario import EngineConfig

GIB = 2**30
MODEL = ModelConfig(
    name="test/8B",
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    v_head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
    dtype="bf16",
    num_full_attention_layers=32,
    num_sliding_layers=0,
    sliding_window=None,
)


def gpu(name: str = "H100") -> GpuSpec:
    return find_gpu(name)[0]


def run(
    flags: str, card: str = "H100", version: str | None = "0.28.0", model: ModelConfig = MODEL, env: str = ""
) -> tuple[EngineConfig, tuple[Note, ...]]:
    return resolve(parse_serve_command(f"{env} vllm serve test/8B {flags}"), model, gpu(card), None, version)


@pytest.mark.parametrize(
    ("card", "tokens", "seqs"),
    [
        ("H100", 8192, 1024),
        ("H200", 8192, 1024),
        ("GH200", 8192, 1024),
        ("RTX PRO 6000", 8192, 1024),
        ("B200", 16384, 1024),
        ("MI300X", 16384, 1024),
        ("A100-80GB", 2048, 256),
        ("A100-40GB", 2048, 256),
        ("L40S", 2048, 256),
        ("RTX 5090", 2048, 256),
        ("T4", 2048, 256),
        ("cpu", 2048, 128),
    ],
)
def test_budgets_by_device(card: str, tokens: int, seqs: int) -> None:
    engine, _ = run("", card)
    assert (engine["max_num_batched_tokens"], engine["max_num_seqs"]) == (tokens, seqs)
    assert engine.values["max_num_seqs"].origin is Origin.DEFAULT
    assert engine.values["max_num_seqs"].rule


def test_the_a100_rule_goes_by_name_not_by_size() -> None:
    same_size = replace(gpu("A100-80GB"), name="X", device_name="NVIDIA X")
    assert batch_defaults(same_size, "0.28.0", 1).max_num_batched_tokens == 8192


def test_gb10_leaves_the_large_tier_in_0_33() -> None:
    assert batch_defaults(gpu("GB10"), "0.28.0", 1).max_num_seqs == 1024
    assert batch_defaults(gpu("GB10"), "0.33.0", 1).max_num_seqs == 256


def test_cpu_defaults() -> None:
    engine, _ = run("-tp 2", "cpu", env="VLLM_CPU_KVCACHE_SPACE=4")
    assert engine["max_num_batched_tokens"] == 4096
    assert engine["max_num_seqs"] == 256
    assert engine["block_size"] == 128
    assert engine["async_scheduling"] is False
    assert engine["kv_cache_memory_bytes"] == 4 * GIB
    assert engine["cudagraph_capture_sizes"] == ()


def test_flags_that_the_engine_overrides_are_said() -> None:
    engine, notes = run("--async-scheduling", "cpu")
    assert engine["async_scheduling"] is False
    assert any(n.subject == "--async-scheduling" for n in notes)
    engine, notes = run("--max-num-scheduled-tokens 100000")
    assert engine["max_num_scheduled_tokens"] == 8192
    assert any(n.subject == "--max-num-scheduled-tokens" for n in notes)
    assert run("--max-num-scheduled-tokens 100")[0]["max_num_scheduled_tokens"] == 100


def test_throughput_mode_doubles_only_what_is_not_given() -> None:
    engine, _ = run("--performance-mode throughput --max-num-seqs 100")
    assert (engine["max_num_batched_tokens"], engine["max_num_seqs"]) == (16384, 100)


def test_budget_covers_max_model_len_without_chunked_prefill() -> None:
    engine, notes = run("--no-enable-chunked-prefill --max-model-len 20000")
    assert engine["max_num_batched_tokens"] == 20000
    assert any(n.subject == "--enable-chunked-prefill" for n in notes)


def test_budget_is_at_most_what_all_sequences_can_hold() -> None:
    engine, _ = run("--max-num-seqs 4 --max-model-len 1024")
    assert engine["max_num_batched_tokens"] == 4096
    assert "max_num_seqs x max_model_len" in engine.values["max_num_batched_tokens"].rule


def test_sequences_are_at_most_the_budget() -> None:
    engine, _ = run("--max-num-batched-tokens 512")
    assert engine["max_num_seqs"] == 512
    assert engine.values["max_num_seqs"].origin is Origin.DEFAULT


def test_human_readable_numbers() -> None:
    engine, _ = run("--max-num-batched-tokens 4K --max-model-len 25.6k --kv-cache-memory-bytes 10G")
    assert engine["max_num_batched_tokens"] == 4096
    assert engine["max_model_len"] == 25600
    assert engine["kv_cache_memory_bytes"] == 10 * GIB


@settings(max_examples=60, deadline=None)
@given(
    seqs=st.one_of(st.none(), st.integers(1, 4096)),
    tokens=st.one_of(st.none(), st.integers(1, 65536)),
    length=st.integers(16, 131072),
    card=st.sampled_from(["H100", "B200", "RTX 5090", "cpu"]),
)
def test_what_resolves_the_engine_would_start(
    seqs: int | None, tokens: int | None, length: int, card: str
) -> None:
    flags = f"--max-model-len {length}"
    flags += f" --max-num-seqs {seqs}" if seqs else ""
    flags += f" --max-num-batched-tokens {tokens}" if tokens else ""
    if seqs and tokens and tokens < seqs:
        with pytest.raises(BadInput, match="--max-num-batched-tokens"):
            run(flags, card)
        return
    if seqs and not tokens and seqs > batch_defaults(gpu(card), "0.28.0", 1).max_num_batched_tokens:
        with pytest.raises(BadInput, match="--max-num-batched-tokens"):
            run(flags, card)
        return
    engine, _ = run(flags, card)
    assert engine["max_num_batched_tokens"] >= engine["max_num_seqs"]
    assert all(size <= engine["max_num_batched_tokens"] for size in engine["cudagraph_capture_sizes"])
    assert seqs in (None, engine["max_num_seqs"])
    assert tokens in (None, engine["max_num_batched_tokens"])


# -- CUDA graphs --------------------------------------------------------------------------------------


def test_graph_sizes_of_the_h100_server_default() -> None:
    engine, _ = run("")
    sizes = engine["cudagraph_capture_sizes"]
    assert len(sizes) == 51
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-2:] == (496, 512)


def test_graph_sizes_reach_1024_on_data_centre_blackwell() -> None:
    assert run("", "B200")[0]["cudagraph_capture_sizes"][-1] == 1024
    assert run("", "RTX 5090")[0]["cudagraph_capture_sizes"][-1] == 512


def test_graph_sizes_follow_the_number_of_sequences() -> None:
    assert run("--max-num-seqs 20")[0]["cudagraph_capture_sizes"] == (1, 2, 4, 8, 16, 24, 32, 40)


def test_budget_itself_is_captured_where_it_fits() -> None:
    assert default_sizes(100, 100) == (1, 2, 4, *range(8, 97, 8), 100)
    assert default_sizes(12, 4096, interactivity=True) == tuple(range(1, 13))


@pytest.mark.parametrize(
    ("flags", "mode", "largest"),
    [
        ("--enforce-eager", "NONE", None),
        ("-O0", "NONE", None),
        ("-O1", "PIECEWISE", 512),
        ("-O3", "FULL_AND_PIECEWISE", 512),
        ("-cc.cudagraph_mode FULL_DECODE_ONLY", "FULL_DECODE_ONLY", 512),
        ("--max-cudagraph-capture-size 64", "FULL_AND_PIECEWISE", 64),
        ("--cudagraph-capture-sizes 8 4 4 100000", "FULL_AND_PIECEWISE", 8),
        ("-cc.cudagraph_capture_sizes [1,2,300]", "FULL_AND_PIECEWISE", 300),
    ],
)
def test_graph_settings(flags: str, mode: str, largest: int | None) -> None:
    engine, _ = run(flags)
    assert engine["cudagraph_mode"] == mode
    assert (engine["cudagraph_capture_sizes"] or (None,))[-1] == largest


def test_other_dotted_settings_are_named() -> None:
    _, notes = run("-cc.pass_config.enable_sp true --speculative-config.method ngram")
    named = [n.subject for n in notes if n.kind == "not-modelled"]
    assert named == ["--compilation-config.pass_config.enable_sp", "--speculative-config.method"]


# -- the other flags ----------------------------------------------------------------------------------


def test_plain_defaults() -> None:
    engine, notes = run("")
    assert engine["gpu_memory_utilization"] == 0.92
    assert engine["block_size"] == 16
    assert engine["enable_prefix_caching"] is True
    assert engine["async_scheduling"] is True
    assert engine["scheduling_policy"] == "fcfs"
    assert engine["scheduler_reserve_full_isl"] is True
    assert engine["watermark"] == 0.0
    assert engine["long_prefill_token_threshold"] == 0
    assert engine["max_model_len"] == 131072
    assert engine["dtype"] == "bf16"
    assert notes == ()


@pytest.mark.parametrize(
    ("version", "fraction", "is_async", "reserves", "tokens"),
    [
        ("0.10.0", 0.9, False, False, 8192),
        ("0.14.0", 0.9, True, False, 8192),
        ("0.19.1", 0.9, True, True, 8192),
        ("0.23.0", 0.92, True, True, 8192),
    ],
)
def test_older_defaults(version: str, fraction: float, is_async: bool, reserves: bool, tokens: int) -> None:
    engine, notes = run("", "B200", version=version)
    assert engine["scheduler_reserve_full_isl"] is reserves
    assert engine["max_num_batched_tokens"] == tokens
    assert engine["gpu_memory_utilization"] == fraction
    assert engine["async_scheduling"] is is_async
    assert (engine.version, engine.asked_version) == ("0.28.0", version)
    assert any(n.subject == "--engine-version" and "0.28.0" in n.text for n in notes)


@pytest.mark.parametrize(
    ("asked", "rules"),
    [
        ("0.28.1", "0.28.0"),
        ("0.29", "0.28.0"),
        ("0.30.2", "0.28.0"),
        ("0.31.0", "0.33.0"),
        ("v0.40", "0.33.0"),
    ],
)
def test_nearest_rules(asked: str, rules: str) -> None:
    assert nearest_version(asked, RULE_VERSIONS) == rules


def test_version_of_the_image_counts_unless_one_is_named() -> None:
    command = parse_serve_command("docker run vllm/vllm-openai:v0.33.0 --model test/8B")
    assert resolve(command, MODEL, gpu())[0].version == "0.33.0"
    assert resolve(command, MODEL, gpu(), None, "0.28.0")[0].version == "0.28.0"


def test_flags_of_0_33() -> None:
    engine, _ = run("--max-num-active-seqs 10 --long-prefill-token-threshold-adaptive", version="0.33.0")
    assert engine["max_num_active_seqs"] == 10
    assert engine["long_prefill_token_threshold_adaptive"] is True
    with pytest.raises(BadInput, match=r"came after 0\.28"):
        run("--max-num-active-seqs 10")
    _, notes = run("--swa-bounded-replay", version="0.31.0")
    assert any("not known" in n.text for n in notes)


def test_0_33_captures_the_number_of_sequences() -> None:
    assert 100 in run("--max-num-seqs 100", version="0.33.0")[0]["cudagraph_capture_sizes"]
    assert 100 not in run("--max-num-seqs 100", version="0.28.0")[0]["cudagraph_capture_sizes"]


def test_removed_flags_say_so() -> None:
    with pytest.raises(BadInput, match=r"--max-num-partial-prefills.*gone by 0\.27"):
        run("--max-num-partial-prefills 2")
    with pytest.raises(BadInput, match=r"^--swap-space.*\(so are --num-scheduler-steps\)"):
        run("--swap-space 4 --num-scheduler-steps 8")
    _, notes = run("--max-num-partial-prefills 2", version="0.20.0")
    assert any(n.kind == "not-modelled" and n.subject == "--max-num-partial-prefills" for n in notes)


def test_not_modelled_flags_are_listed_with_their_effect() -> None:
    _, notes = run("-dp 2 --enable-expert-parallel --kv-offloading-size 10 --enable-lora --port 9000")
    listed = {n.subject: n.text for n in notes if n.kind == "not-modelled"}
    assert set(listed) == {
        "--data-parallel-size",
        "--enable-expert-parallel",
        "--kv-offloading-size",
        "--enable-lora",
    }
    assert all(len(text) > 20 for text in listed.values())


def test_environment_variables_without_a_model_are_listed() -> None:
    _, notes = run(
        "", env="VLLM_ATTENTION_BACKEND=FLASHINFER VLLM_LOGGING_LEVEL=INFO VLLM_USE_V2_MODEL_RUNNER=0"
    )
    assert [(n.kind, n.subject) for n in notes] == [("not-modelled", "VLLM_ATTENTION_BACKEND")]


def test_mla_block_sizes() -> None:
    mla = replace(MODEL, mla=MlaConfig(512, 1536, 128, 64, 128))
    assert run("", "B200", model=mla)[0]["block_size"] == 32
    assert run("", "H200", model=mla)[0]["block_size"] == 16
    assert run("--kv-cache-dtype fp8", "H200", model=mla)[0]["block_size"] == 64
    assert run("", "B200")[0]["block_size"] == 16


def test_cards_without_bfloat16() -> None:
    engine, notes = run("", "T4")
    assert engine["dtype"] == "fp16"
    assert any(n.subject == "--dtype" for n in notes)
    with pytest.raises(BadInput, match="--dtype half"):
        run("--dtype bfloat16", "T4")


def test_auto_length_is_said_to_be_assumed() -> None:
    engine, notes = run("--max-model-len auto")
    assert engine["max_model_len"] == 131072
    assert any(n.subject == "--max-model-len" for n in notes)


def test_long_lengths_need_permission() -> None:
    with pytest.raises(BadInput, match="131072"):
        run("--max-model-len 200000")
    assert run("--max-model-len 200000", env="VLLM_ALLOW_LONG_MAX_MODEL_LEN=1")[0]["max_model_len"] == 200000


def test_quantised_checkpoints() -> None:
    awq = replace(MODEL, quant=QuantConfig("awq", 4.25, "bf16", ("embed", "lm_head")))
    assert run("", model=awq)[0]["quantization"] == "awq"
    assert run("--quantization awq_marlin", model=awq)[0]["quantization"] == "awq_marlin"
    with pytest.raises(BadInput, match="uses awq"):
        run("--quantization fp8", model=awq)


def test_a_gpu_without_the_kernels_of_a_quantisation_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--quantization: 'fp8': .*7\.5, V100\S* has 7\.0"):
        run("--quantization fp8", card="V100")
    for method, activation in (("fp8", "fp8"), ("compressed-tensors", "fp8"), ("awq", "bf16")):
        model = replace(MODEL, quant=QuantConfig(method, 8.0, activation, ()))
        with pytest.raises(BadInput, match=rf"--quantization: '{method}': needs .* V100"):
            run("", card="V100", model=model)
        assert run("", card="T4", model=model)[0]["quantization"] == method
        assert run("", card="MI300X", model=model)[0]["quantization"] == method
    ints = replace(MODEL, quant=QuantConfig("compressed-tensors", 4.0, "bf16", ()))
    assert run("", card="V100", model=ints)[0]["quantization"] == "compressed-tensors"
    assert run("--quantization fp8", card="A100")[0]["quantization"] == "fp8"


@pytest.mark.parametrize(
    ("flags", "field", "word"),
    [
        (
            "--max-num-batched-tokens 100 --max-num-seqs 200",
            "--max-num-batched-tokens",
            "--max-num-seqs (200)",
        ),
        (
            "--no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len 4096",
            "--max-num-batched-tokens",
            "chunked",
        ),
        ("--max-num-seqs 0", "--max-num-seqs", "at least 1"),
        ("--max-num-seqs -1", "--max-num-seqs", "at least 1"),
        ("--max-model-len 0", "--max-model-len", "at least 1"),
        ("--max-model-len -2", "--max-model-len", "at least"),
        ("--block-size 0", "--block-size", "at least 1"),
        ("--gpu-memory-utilization 0", "--gpu-memory-utilization", "greater than 0"),
        ("--gpu-memory-utilization 1.2", "--gpu-memory-utilization", "at most 1"),
        ("--gpu-memory-utilization inf", "--gpu-memory-utilization", "finite"),
        ("--watermark -0.1", "--watermark", "at least 0"),
        ("-tp 0", "--tensor-parallel-size", "at least 1"),
        ("-tp 3", "--tensor-parallel-size", "32 attention heads"),
        ("-pp 64", "--pipeline-parallel-size", "32 layers"),
        ("--long-prefill-token-threshold 200000", "--long-prefill-token-threshold", "--max-model-len"),
        ("--dtype int8", "--dtype", "bfloat16"),
        ("-O7", "--optimization-level", "0, 1, 2 or 3"),
        ("-cc.cudagraph_mode SOMETIMES", "--compilation-config.cudagraph_mode", "PIECEWISE"),
        ("-cc.cudagraph_capture_sizes 8", "--compilation-config.cudagraph_capture_sizes", "list"),
        ("--cudagraph-capture-sizes 1 0", "--cudagraph-capture-sizes", "at least 1"),
        (
            "--cudagraph-capture-sizes 1 8 --max-cudagraph-capture-size 4",
            "--max-cudagraph-capture-size",
            "largest",
        ),
        ("--num-gpu-blocks-override 0", "--num-gpu-blocks-override", "at least 1"),
    ],
)
def test_what_the_engine_refuses(flags: str, field: str, word: str) -> None:
    with pytest.raises(BadInput) as caught:
        run(flags)
    assert caught.value.field == field
    assert word in str(caught.value)


def test_kv_heads_are_copied_or_split_but_never_cut() -> None:
    assert run("-tp 16")[0]["tensor_parallel_size"] == 16
    six = replace(MODEL, num_attention_heads=24, num_key_value_heads=6)
    with pytest.raises(BadInput, match="6 KV heads"):
        run("-tp 4", model=six)


def test_gpu_count_must_cover_the_parallel_sizes() -> None:
    command = parse_serve_command("vllm serve test/8B -tp 4 -dp 2")
    with pytest.raises(BadInput, match="needs 8 GPUs"):
        resolve(command, MODEL, gpu(), 4, "0.28.0")
    assert resolve(command, MODEL, gpu(), 8, "0.28.0")[0]["data_parallel_size"] == 2


def test_turboquant_says_what_is_not_counted():
    notes = run("--kv-cache-dtype turboquant_4bit_nc", "H100")[1]
    assert [note.kind for note in notes if note.subject == "--kv-cache-dtype"] == ["not-modelled"]
