"""Which vLLM flag corresponds to which SGLang flag, where a value carries over as it is.

vLLM 0.28, SGLang 0.5.21. Flags that need arithmetic or come in pairs are in `sim.translation.translate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["equal", "near", "none"]


@dataclass(frozen=True, slots=True)
class FlagPair:
    """Two flags with the same value.

    `inverted`: vLLM's `--no-` form corresponds to SGLang's switch, and vLLM's positive form is SGLang's
    default. `text` says what differs, for verdict "near".
    """

    vllm: str
    sglang: str
    verdict: Verdict = "equal"
    text: str = ""
    inverted: bool = False


PAIRS: tuple[FlagPair, ...] = (
    FlagPair(
        "--max-num-seqs",
        "--max-running-requests",
        "near",
        "SGLang also lowers it to half the pool's tokens; vLLM needs it within --max-num-batched-tokens",
    ),
    FlagPair(
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        "near",
        "vLLM's fraction includes activations and graphs, SGLang's only weights and KV: one figure gives "
        "SGLang the larger pool and less headroom (above its own default it may run out of memory)",
    ),
    FlagPair(
        "--enable-prefix-caching",
        "--disable-radix-cache",
        "near",
        "whole blocks of one request's prompt (vLLM) against a tree of pages (SGLang)",
        inverted=True,
    ),
    FlagPair(
        "--async-scheduling",
        "--disable-overlap-schedule",
        "near",
        "both overlap CPU and GPU; SGLang runs finished requests for one step more",
        inverted=True,
    ),
    FlagPair(
        "--stream-interval",
        "--stream-interval",
        "near",
        "vLLM always sends the first token at once; SGLang counts from it",
    ),
    FlagPair(
        "--cudagraph-capture-sizes",
        "--cuda-graph-bs-decode",
        "near",
        "vLLM's sizes are tokens of any batch, SGLang's are decodes; prefills have their own list",
    ),
    FlagPair(
        "--max-cudagraph-capture-size",
        "--cuda-graph-max-bs-decode",
        "near",
        "vLLM's size is tokens of any batch, SGLang's is decodes",
    ),
    FlagPair(
        "--enforce-eager",
        "--disable-cuda-graph",
        "near",
        "vLLM also stops compiling; SGLang does not compile by default",
    ),
    FlagPair("--max-model-len", "--context-length"),
    FlagPair("--tensor-parallel-size", "--tp-size"),
    FlagPair("--pipeline-parallel-size", "--pp-size"),
    FlagPair(
        "--data-parallel-size",
        "--dp-size",
        "near",
        "vLLM's MoE replicas share their experts; SGLang's do so with --enable-dp-attention only",
    ),
    FlagPair("--decode-context-parallel-size", "--dcp-size"),
    FlagPair("--nnodes", "--nnodes"),
    FlagPair("--node-rank", "--node-rank"),
    FlagPair("--dtype", "--dtype"),
    FlagPair(
        "--quantization",
        "--quantization",
        "near",
        "the common methods have the same names; kernels and which layers stay unquantised differ",
    ),
    FlagPair("--load-format", "--load-format", "near", "the common formats have the same names"),
    FlagPair("--download-dir", "--download-dir"),
    FlagPair("--revision", "--revision"),
    FlagPair("--tokenizer", "--tokenizer-path"),
    FlagPair("--trust-remote-code", "--trust-remote-code"),
    FlagPair("--served-model-name", "--served-model-name", "near", "SGLang takes one name, vLLM several"),
    FlagPair("--seed", "--random-seed"),
    FlagPair("--host", "--host"),
    FlagPair("--port", "--port"),
    FlagPair("--root-path", "--fastapi-root-path"),
    FlagPair("--ssl-keyfile", "--ssl-keyfile"),
    FlagPair("--ssl-certfile", "--ssl-certfile"),
    FlagPair("--ssl-ca-certs", "--ssl-ca-certs"),
    FlagPair("--chat-template", "--chat-template"),
    FlagPair("--reasoning-parser", "--reasoning-parser", "near", "parser names differ for some models"),
    FlagPair("--tool-call-parser", "--tool-call-parser", "near", "parser names differ for some models"),
    FlagPair("--enable-mfu-metrics", "--enable-mfu-metrics"),
    FlagPair("--enable-lora", "--enable-lora"),
    FlagPair("--max-lora-rank", "--max-lora-rank"),
    FlagPair("--max-loras", "--max-loras-per-batch", "near", "SGLang counts the base model as one"),
    FlagPair("--disable-custom-all-reduce", "--disable-custom-all-reduce"),
    FlagPair("--cpu-offload-gb", "--cpu-offload-gb", "near", "which weights move is decided differently"),
    FlagPair("--limit-mm-per-prompt", "--limit-mm-data-per-request", "near", "the keys have the same names"),
    FlagPair("--hf-overrides", "--json-model-override-args"),
    FlagPair(
        "--attention-backend",
        "--attention-backend",
        "near",
        "backend names differ; set it by hand if the engine refuses it",
    ),
    FlagPair("--kv-events-config", "--kv-events-config", "near", "publisher settings differ"),
)

BY_VLLM = {pair.vllm: pair for pair in PAIRS}
BY_SGLANG = {pair.sglang: pair for pair in PAIRS}

# Why a flag has no counterpart, where there is more to say than that.
NO_SGLANG: dict[str, str] = {
    "--long-prefill-token-threshold": "SGLang has no cap per request; one long prompt takes the whole chunk",
    "--watermark": "SGLang keeps room through --schedule-conservativeness, which works differently",
    "--scheduler-reserve-full-isl": "SGLang always reserves prompt and expected output on admission",
    "--optimization-level": "SGLang does not compile by default",
    "--compilation-config": "SGLang's graphs are set by --cuda-graph-* flags",
    "--performance-mode": "SGLang has no such presets",
    "--kv-cache-memory-bytes": "SGLang sizes the pool by --mem-fraction-static or --max-total-tokens",
    "--speculative-config": "SGLang spells it out in --speculative-* flags; set those by hand",
    "--max-num-scheduled-tokens": "SGLang has no budget over decodes and prefills together",
}
NO_VLLM: dict[str, str] = {
    "--schedule-conservativeness": "vLLM admits on the prompt alone and preempts when it runs out",
    "--enable-mixed-chunk": "vLLM always mixes decodes and prefills; nothing to set",
    "--max-prefill-tokens": "vLLM's budget is --max-num-batched-tokens alone",
    "--schedule-policy": "vLLM has fcfs and priority only",
    "--enable-metrics": "vLLM's metrics are always on; nothing to set",
    "--swa-full-tokens-ratio": "vLLM shares one pool between full and sliding layers",
    "--prefill-max-requests": "vLLM bounds a step by tokens only",
    "--speculative-algorithm": "vLLM takes one --speculative-config; set it by hand",
    "--disable-priority-preemption": "vLLM never preempts by priority",
}

# Defaults that differ although nobody wrote them: (vLLM's flag, SGLang's flag, what differs).
DEFAULTS: tuple[tuple[str, str, str], ...] = (
    (
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        "vLLM's default is 0.92; SGLang's follows from GPU memory and chunk size (H100: 0.83)",
    ),
    (
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        "vLLM's default goes by GPU (2048, 8192 or 16384, decodes included), SGLang's too (2048 to 16384, "
        "prefill only)",
    ),
    ("--block-size", "--page-size", "vLLM's blocks hold 16 tokens, SGLang's pages 1: other prefix hits"),
    ("--max-num-seqs", "--max-running-requests", "vLLM's default is 256 or 1024, SGLang's at least 2048"),
    ("--port", "--port", "vLLM's default is 8000, SGLang's 30000"),
)
