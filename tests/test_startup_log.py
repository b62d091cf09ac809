import pytest

from bench.live_log import read_samples
from bench.startup_log import GIB, fit_bytes_per_request, parse_startup_log, split_arguments

V0 = """\
INFO worker.py:267] model weights take 7.50GiB; PyTorch activation peak memory takes 1.00GiB; \
the rest of the memory reserved for KV Cache is 5.25GiB.
INFO executor_base.py:110] # GPU blocks: 3000, # CPU blocks: 1024
INFO executor_base.py:115] Maximum concurrency for 16000 tokens per request: 3.00x
"""
V1_TWO_LINES = """\
(EngineCore_DP0 pid=86) INFO 01-02 03:04:05 [gpu_worker.py:298] Available KV cache memory: 6.00 GiB
(EngineCore_DP0 pid=86) INFO 01-02 03:04:05 [kv_cache_utils.py:1087] GPU KV cache size: 65,536 tokens
(EngineCore_DP0 pid=86) INFO 01-02 03:04:05 [kv_cache_utils.py:1091] Maximum concurrency for 8,192 tokens \
per request: 8.00x
"""
V1_ONE_LINE = (
    "\x1b[36m(EngineCore pid=9)\x1b[0m INFO [kv_cache_utils.py:1733] GPU KV cache size: 2,480,000 tokens, "
    "Maximum concurrency for 800,000 tokens per request: 3.10x\n"
)
SGLANG = """\
[2026-01-02 03:04:05 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 200000, K size: 3.50 GB, \
V size: 3.50 GB
[2026-01-02 03:04:06 TP0] max_total_num_tokens=200000, chunked_prefill_size=4096, max_prefill_tokens=16384, \
max_running_requests=1024, context_len=32768, available_gpu_mem=4.10 GB
"""
SGLANG_MLA = "[2026-01-02 03:04:05 TP0] KV Cache is allocated. #tokens: 1000000, KV size: 65.92 GB\n"
HYBRID = """\
INFO [kv_cache_utils.py:1319] GPU KV cache size: 100,000 tokens
INFO [kv_cache_utils.py:1324] Maximum concurrency for 16,384 tokens per request: 20.25x
"""


def test_v0_counts_blocks():
    pool = parse_startup_log(V0).kv
    assert (pool.format_id, pool.blocks, pool.tokens) == ("vllm-v0-blocks", 3000, 48000)
    assert pool.kv_bytes == round(5.25 * GIB)
    assert (pool.concurrency, pool.check) == (3.0, "48000/16000=3.00")


def test_v0_takes_the_block_size_of_the_launch():
    assert parse_startup_log(V0, block_size=32).kv.tokens == 96000


def test_v1_on_two_lines_with_prefixes_and_separators():
    log = parse_startup_log(V1_TWO_LINES)
    assert (log.engine, log.kv.format_id, log.kv.tokens) == ("vllm", "vllm-v1-tokens", 65536)
    assert (log.kv.max_len, log.kv.concurrency, log.kv.consistent) == (8192, 8.0, True)
    assert log.kv.bytes_per_token == pytest.approx(6 * GIB / 65536)
    assert all(line in V1_TWO_LINES for line in log.kv.raw)


def test_v1_on_one_line_through_colours():
    pool = parse_startup_log(V1_ONE_LINE).kv
    assert (pool.format_id, pool.tokens, pool.max_len, pool.concurrency) == (
        "vllm-v1-oneline",
        2_480_000,
        800_000,
        3.1,
    )
    assert pool.bytes_per_token is None


def test_sglang_adds_k_and_v_and_means_gib():
    log = parse_startup_log(SGLANG)
    assert (log.engine, log.kv.format_id, log.kv.tokens) == ("sglang", "sglang", 200_000)
    assert log.kv.kv_bytes == round(7.0 * GIB)
    assert log.resolved["max_running_requests"].value == 1024
    assert log.resolved["context_length"].value == 32768


def test_sglang_latent_cache_has_one_size():
    pool = parse_startup_log(SGLANG_MLA).kv
    assert pool.tokens == 1_000_000
    assert pool.bytes_per_token == pytest.approx(65.92 * GIB / 1e6)


def test_sglang_of_old_names_sizes_only():
    text = (
        "[2025-01-02 03:04:05 TP0] KV Cache is allocated. K size: 5.25 GB, V size: 5.25 GB.\n"
        "[2025-01-02 03:04:06 TP0] max_total_num_tokens=400000, max_prefill_tokens=16384, context_len=8192\n"
    )
    pool = parse_startup_log(text).kv
    assert (pool.tokens, pool.kv_bytes) == (400_000, round(10.5 * GIB))


def test_an_upper_bound_is_not_the_pool():
    text = SGLANG.replace("#tokens: 200000", "VA upper bound, #tokens: 900000")
    pool = parse_startup_log(text).kv
    assert (pool.tokens, pool.kv_bytes) == (200_000, None)


@pytest.mark.parametrize("sizes", [(9, 10), (10, 9)])
def test_the_smallest_rank_rules(sizes):
    text = "".join(
        f"INFO [kv_cache_utils.py:1] GPU KV cache size: {size},000 tokens\n"
        f"INFO [kv_cache_utils.py:2] Maximum concurrency for 1,000 tokens per request: {size}.00x\n"
        for size in sizes
    )
    pool = parse_startup_log(text).kv
    assert (pool.tokens, pool.concurrency, pool.consistent) == (9000, 9.0, True)


def test_a_hybrid_layout_is_told_by_its_concurrency():
    pool = parse_startup_log(V1_ONE_LINE.replace("3.10x", "9.99x")).kv
    assert pool.layout == "hybrid"
    pool = parse_startup_log(HYBRID).kv
    assert not pool.consistent
    assert pool.equivalent_tokens == 20.25 * 16384
    assert pool.bytes_per_token is None
    assert "20.25x" in pool.check


def test_rounding_is_no_disagreement():
    text = "GPU KV cache size: 2,000 tokens, Maximum concurrency for 3,000 tokens per request: 0.67x"
    assert parse_startup_log(text).kv.consistent


def test_bytes_per_request_from_two_starts():
    # 1 GiB of fixed state and 8 KiB per token, in a pool of 16 GiB.
    def printed(length):
        return round(16 * GIB / (GIB + 8192 * length) * length)

    runs = [(length, 16 * GIB, printed(length)) for length in (16384, 65536)]
    fixed, per_token = fit_bytes_per_request(runs)
    assert fixed == pytest.approx(GIB, rel=1e-3)
    assert per_token == pytest.approx(8192, rel=1e-3)


def test_one_start_tells_no_cost_per_token():
    with pytest.raises(ValueError, match="two different"):
        fit_bytes_per_request([(4096, GIB, 1000), (4096, GIB, 1000)])


def test_every_data_parallel_engine_has_its_pool():
    second = V1_TWO_LINES.replace("DP0", "DP1").replace("65,536", "65,520")
    log = parse_startup_log(V1_TWO_LINES + second)
    assert [pool.tokens for pool in log.pools] == [65536, 65520]


def test_an_override_is_the_pool_and_memory_says_nothing():
    text = (
        "(EngineCore pid=1) INFO [gpu_worker.py:298] Available KV cache memory: 6.00 GiB\n"
        "(EngineCore pid=1) INFO [x.py:1] Overriding num_gpu_blocks=32768 with num_gpu_blocks_override=64\n"
        "(EngineCore pid=1) INFO [x.py:1] GPU KV cache size: 2,048 tokens, Maximum concurrency "
        "for 1,024 tokens "
        "per request: 2.00x\n"
    )
    pool = parse_startup_log(text).kv
    assert (pool.blocks, pool.tokens, pool.kv_bytes) == (64, 2048, None)


def test_flags_are_given_and_resolved():
    text = (
        "(APIServer pid=7) INFO [api_utils.py:272] non-default args: {'model': 'm', 'max_num_seqs': 16, "
        "'kind': <Kind.A: 1>}\n"
        "(EngineCore pid=9) INFO [core.py:122] Initializing a V1 LLM engine (v0.28.0) with "
        "config: model='m, n', "
        "max_seq_len=1024, enable_prefix_caching=False, structured=Config(backend='auto', x=(1, 2)), seed=0\n"
        "(APIServer pid=7) INFO [scheduler.py:242] Chunked prefill is enabled with "
        "max_num_batched_tokens=512.\n"
    )
    log = parse_startup_log(text)
    assert (log.engine, log.version, log.given["max_num_seqs"]) == ("vllm", "0.28.0", 16)
    resolved = {name: value.value for name, value in log.resolved.items()}
    assert resolved["model"] == "m, n"
    assert resolved["max_model_len"] == 1024
    assert resolved["enable_prefix_caching"] is False
    assert resolved["max_num_batched_tokens"] == 512
    assert resolved["seed"] == 0


def test_sglang_server_args():
    text = (
        "[2026-01-02 03:04:05] server_args=ServerArgs(model_path='m', tp_size=2, dtype='auto', x=['a', 'b'])"
    )
    log = parse_startup_log(text)
    assert log.engine == "sglang"
    assert log.resolved["tp_size"].value == 2


def test_values_with_commas_stay_whole():
    assert split_arguments("a=[1, 2], b={'c': 'd, e'}, f=G(h=1, i=2), j='k\\'l, m'") == {
        "a": [1, 2],
        "b": {"c": "d, e"},
        "f": "G(h=1, i=2)",
        "j": "k'l, m",
    }


@pytest.mark.parametrize("text", ["", "nothing to see\n", "GPU KV cache size: unknown"])
def test_a_log_that_says_nothing_yields_nothing(text):
    log = parse_startup_log(text)
    assert log.kv is None
    assert log.engine is None


def test_wsl2_facts():
    text = "WARNING [interface.py:1] Using 'pin_memory=False' as WSL is detected. This may slow down."
    assert parse_startup_log(text).facts == ("wsl2", "pin_memory=False")


def test_periodic_lines_of_both_engines():
    text = (
        "(APIServer pid=1) INFO 12-01 18:20:10 [loggers.py:271] Engine 000: Avg prompt "
        "throughput: 819.2 tokens/s, "
        "Avg generation throughput: 102.4 tokens/s, Running: 4 reqs, Waiting: 2 reqs, Preemptions: 3, "
        "GPU KV cache usage: 12.5%, Prefix cache hit rate: 3.1%\n"
        "[2026-01-02 03:04:07 TP0] Decode batch, #running-req: 8, #token: 4096, token usage: 0.13, "
        "cuda graph: True, gen throughput (token/s): 512.75, #queue-req: 5\n"
        "[2026-01-02 03:04:08 TP0] Prefill batch, #new-seq: 1, #new-token: 300, #cached-token: 100, "
        "token usage: 0.02, #running-req: 1, #queue-req: 0\n"
    )
    vllm, decode, prefill = read_samples(text)
    assert (vllm.clock, vllm.source, vllm.running, vllm.waiting) == ("12-01 18:20:10", "Engine 000", 4, 2)
    assert (vllm.kv_usage, vllm.hit_rate, vllm.preemptions) == (0.125, pytest.approx(0.031), 3)
    assert (decode.source, decode.running, decode.waiting, decode.kv_usage) == ("TP0", 8, 5, 0.13)
    assert decode.generation_throughput == 512.75
    assert decode.hit_rate is None
    assert prefill.hit_rate == 0.25
