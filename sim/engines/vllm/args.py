"""vLLM's own rules for absent flags, and its own refusals (vllm/engine/arg_utils.py, vllm/config/, 0.28).

`resolve` yields these keys: device, dtype, quantization, kv_cache_dtype, tensor_parallel_size,
pipeline_parallel_size, data_parallel_size, enable_expert_parallel, max_model_len, enable_chunked_prefill,
enable_prefix_caching, max_num_batched_tokens, max_num_scheduled_tokens, max_num_seqs, block_size,
async_scheduling, scheduling_policy, long_prefill_token_threshold, scheduler_reserve_full_isl, watermark,
prefill_schedule_interval, stream_interval, gpu_memory_utilization, num_gpu_blocks_override,
kv_cache_memory_bytes, performance_mode, enforce_eager, optimization_level, cudagraph_mode,
cudagraph_capture_sizes; from 0.33 on also max_num_active_seqs and long_prefill_token_threshold_adaptive.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.commands.given import Given
from sim.commands.serve import ServeCommand
from sim.engines.quantised import check_capability
from sim.engines.values import Values, env_notes, flag_notes, nearest_version, version_key
from sim.engines.vllm.graphs import resolve_graphs
from sim.errors import BadInput
from sim.hardware.spec import GpuSpec
from sim.models.model import ModelConfig
from sim.models.weights import check_tensor_parallel
from sim.provenance import Note
from sim.scenario import EngineConfig

RULE_VERSIONS = ("0.28.0", "0.33.0")
DEFAULT_VERSION = "0.28.0"
GIB = 2**30
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}

# `get_min_capability` in model_executor/layers/quantization/, 0.28. Below 8.9 FP8 weights run through Marlin.
_CAPABILITIES = {
    "fp8": (7, 5),
    "fp8_per_tensor": (7, 5),
    "fp8_per_block": (7, 5),
    "fbgemm_fp8": (8, 0),
    "compressed_tensors_fp8": (7, 5),
    "awq": (7, 5),
    "awq_marlin": (7, 5),
    "nvfp4": (7, 5),
    "modelopt_fp4": (7, 5),
    "mxfp4": (8, 0),
}


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """Default budgets of `vllm serve` on one kind of device, and the rule that picked them."""

    max_num_batched_tokens: int
    max_num_seqs: int
    rule: str


def resolve(
    command: ServeCommand,
    model: ModelConfig,
    gpu: GpuSpec,
    gpu_count: int | None = None,
    version: str | None = None,
) -> tuple[EngineConfig, tuple[Note, ...]]:
    """Apply vLLM's rules to a command.

    `gpu_count` None means as many as the parallel sizes need; `version` None means the image tag's, else
    0.28.0.

    Raises:
        BadInput: what the engine itself would refuse at start-up, or a value that is no such number.
    """
    asked = version or command.version or DEFAULT_VERSION
    rules = nearest_version(asked, RULE_VERSIONS)
    given, values = Given(command.given), Values()
    if version_key(asked)[:2] != version_key(rules)[:2]:
        values.warn(
            "--engine-version",
            f"the scheduling rules of vLLM {asked} are not known; those of {rules} are used "
            f"(memory and defaults follow {asked} where it is known to differ)",
        )
    elif not version and not command.version:
        values.inform("--engine-version", f"not named; the rules of vLLM {rules} are used")
    device = values.derive("device", device_of(gpu), f"of {gpu.name}")
    _resolve_types(given, values, model, gpu)
    _resolve_parallel(given, values, model, gpu_count)
    _resolve_length(given, values, model, command)
    _resolve_batch(given, values, gpu, asked if version_key(asked) < (0, 28) else rules)
    _resolve_cache(given, values, model, gpu, asked, command)
    _resolve_scheduler(given, values, device, asked, rules)
    resolve_graphs(given, values, gpu, rules)
    notes = (*command.notes, *values.notes, *flag_notes(command, asked, "vLLM"), *env_notes(command))
    engine = EngineConfig(
        name="vllm",
        version=rules,
        asked_version=asked,
        values=values.items,
        given=command.flags,
        env=dict(command.env),
    )
    return engine, notes


def device_of(gpu: GpuSpec) -> str:
    """ "cuda", "rocm" or "cpu"."""
    if gpu.name.lower().startswith("cpu"):
        return "cpu"
    return "rocm" if gpu.compute_capability is None else "cuda"


def batch_defaults(gpu: GpuSpec, version: str, world_size: int) -> BatchDefaults:
    """Budgets of the API server by device (arg_utils.py `EngineArgs.get_batch_defaults`).

    Read in 0.11 to 0.28 and in 0.33: the tier of 160 GiB came with 0.28, the exception for GB10 after it.
    `world_size` is TP x PP; only the CPU backend scales with it.
    """
    device = device_of(gpu)
    if device == "cpu":
        return BatchDefaults(2048 * world_size, 128 * world_size, "API server on a CPU, times TP x PP")
    name = (gpu.device_name or gpu.name).lower()
    memory = gpu.memory_bytes
    if memory >= 160 * GIB and version_key(version) >= (0, 28):
        return BatchDefaults(16384, 1024, "API server on a GPU with at least 160 GiB")
    gb10 = gpu.compute_capability == (12, 1) and version_key(version) >= (0, 33)
    if memory >= 70 * GIB and "a100" not in name and not gb10:
        return BatchDefaults(8192, 1024, "API server on a GPU with at least 70 GiB that is no A100")
    why = "an A100" if "a100" in name else "a GB10" if gb10 else "a GPU below 70 GiB"
    return BatchDefaults(2048, 256, f"API server on {why}")


def _resolve_types(given: Given, values: Values, model: ModelConfig, gpu: GpuSpec) -> None:
    asked = given.word("--dtype")
    has_bf16 = gpu.compute_capability is None or gpu.compute_capability >= (8, 0)
    if asked in (None, "auto"):
        own = "bf16" if model.dtype == "fp32" else model.dtype
        if own == "bf16" and not has_bf16:
            values.derive("dtype", "fp16", f"{gpu.name} has no bfloat16; the engine falls back")
            values.warn("--dtype", f"{gpu.name} has no bfloat16: the engine falls back to float16")
        else:
            values.choose("dtype", None, own, "auto: the model's own")
    else:
        dtype = _DTYPES.get(asked)
        if dtype is None:
            raise BadInput("--dtype", asked, f"must be auto or one of {', '.join(_DTYPES)}")
        if dtype == "bf16" and not has_bf16:
            raise BadInput("--dtype", asked, f"{gpu.name} has no bfloat16; use --dtype half")
        values.choose("dtype", dtype, None, "")
    own_method = model.quant.method if model.quant else None
    method = given.word("--quantization")
    if method is not None and own_method is not None and not _same_method(method, own_method):
        raise BadInput("--quantization", method, f"the checkpoint uses {own_method}; drop the flag")
    rule = "as the checkpoint is" if own_method else "the checkpoint is not quantised"
    check_capability(values.choose("quantization", method, own_method, rule), model, gpu, _CAPABILITIES)
    values.choose("kv_cache_dtype", given.word("--kv-cache-dtype"), "auto", "auto: the model's dtype")
    if values["kv_cache_dtype"].startswith("turboquant_"):
        values.not_modelled(
            "--kv-cache-dtype",
            "pages of two sizes are padded: the pool is smaller than counted here",
        )


def _same_method(given: str, own: str) -> bool:
    """Whether a flag names the checkpoint's own method (kernel variants such as awq_marlin included)."""
    return given.replace("-", "_").startswith(own.replace("-", "_")) or own.replace("-", "_").startswith(
        given.replace("-", "_")
    )


def _resolve_parallel(given: Given, values: Values, model: ModelConfig, gpu_count: int | None) -> None:
    tp = values.choose("tensor_parallel_size", given.integer("--tensor-parallel-size"), 1, "1 by default")
    pp = values.choose("pipeline_parallel_size", given.integer("--pipeline-parallel-size"), 1, "1 by default")
    dp = values.choose("data_parallel_size", given.integer("--data-parallel-size"), 1, "1 by default")
    values.choose("enable_expert_parallel", given.truth("--enable-expert-parallel"), False, "off by default")
    check_tensor_parallel(model, tp)
    if pp > model.num_layers:
        raise BadInput("--pipeline-parallel-size", pp, f"{model.name} has only {model.num_layers} layers")
    needed = tp * pp * dp
    if gpu_count is not None and gpu_count < needed:
        raise BadInput("--gpu-count", gpu_count, f"TP {tp} x PP {pp} x DP {dp} needs {needed} GPUs")


def _resolve_length(given: Given, values: Values, model: ModelConfig, command: ServeCommand) -> None:
    longest = model.max_position_embeddings
    asked = given.integer("--max-model-len", minimum=-1)
    if asked == 0:
        raise BadInput("--max-model-len", 0, "must be at least 1 (or -1: fit to memory)")
    if asked == -1:
        values.derive("max_model_len", longest, "-1: the model's own length; the engine shrinks it to fit")
        values.warn(
            "--max-model-len",
            f"-1 takes the model's {longest} tokens, or as many as memory allows",
        )
        return
    if asked is not None and asked > longest:
        stretched = any(given.has(f) for f in ("--hf-overrides", "--rope-scaling"))
        allowed = command.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in {"", "0"}
        if not stretched and not allowed:
            raise BadInput(
                "--max-model-len",
                asked,
                f"{model.name} ends at {longest} tokens and the engine refuses to start; lower it",
            )
        values.warn("--max-model-len", f"{asked} exceeds the {longest} of the model's configuration")
    values.choose("max_model_len", asked, longest, "the model's own length")


def _resolve_batch(given: Given, values: Values, gpu: GpuSpec, version: str) -> None:
    """arg_utils.py `_set_default_max_num_seqs_and_batched_tokens_args`, then config/scheduler.py's checks."""
    chunked = values.choose(
        "enable_chunked_prefill", given.truth("--enable-chunked-prefill"), True, "on for text generation"
    )
    if not chunked:
        values.warn("--enable-chunked-prefill", "off: the engine warns that this is not officially supported")
    mode = values.choose("performance_mode", given.word("--performance-mode"), "balanced", "by default")
    defaults = batch_defaults(gpu, version, values["tensor_parallel_size"] * values["pipeline_parallel_size"])
    asked_tokens = given.integer("--max-num-batched-tokens")
    asked_seqs = given.integer("--max-num-seqs")
    length = values["max_model_len"]
    tokens, token_rule = defaults.max_num_batched_tokens, defaults.rule
    seqs, seq_rule = defaults.max_num_seqs, defaults.rule
    if mode == "throughput":
        tokens, seqs = 2 * tokens, 2 * seqs
        token_rule = seq_rule = f"{defaults.rule}, doubled by --performance-mode throughput"
    if not chunked and tokens < length:
        tokens, token_rule = length, "at least max_model_len without chunked prefill"
    bound = (asked_seqs or seqs) * length
    if tokens > bound:
        tokens, token_rule = bound, "at most max_num_seqs x max_model_len"
    tokens = values.choose("max_num_batched_tokens", asked_tokens, tokens, token_rule)
    if seqs > tokens:
        seqs, seq_rule = tokens, "at most max_num_batched_tokens"
    seqs = values.choose("max_num_seqs", asked_seqs, seqs, seq_rule)
    if tokens < seqs:
        raise BadInput(
            "--max-num-batched-tokens",
            tokens,
            f"must be at least --max-num-seqs ({seqs}); the engine refuses to start",
        )
    if not chunked and tokens < length:
        raise BadInput(
            "--max-num-batched-tokens",
            tokens,
            f"must be at least --max-model-len ({length}) without chunked prefill; the engine will not start",
        )
    scheduled = given.integer("--max-num-scheduled-tokens")
    values.choose("max_num_scheduled_tokens", scheduled, tokens, "as max_num_batched_tokens")
    if scheduled is not None and scheduled > tokens:
        values.derive("max_num_scheduled_tokens", tokens, "at most max_num_batched_tokens")
        values.warn("--max-num-scheduled-tokens", f"has no effect above --max-num-batched-tokens ({tokens})")


def _resolve_cache(
    given: Given, values: Values, model: ModelConfig, gpu: GpuSpec, asked: str, command: ServeCommand
) -> None:
    values.choose(
        "enable_prefix_caching", given.truth("--enable-prefix-caching"), True, "on for text generation"
    )
    default_block, rule = _default_block_size(model, gpu, values["kv_cache_dtype"])
    block = values.choose("block_size", given.integer("--block-size"), default_block, rule)
    if block % 16 and values["device"] == "cuda":
        values.warn("--block-size", f"{block} is no multiple of 16, which the fast attention kernels need")
    old_fraction = version_key(asked) < (0, 20)
    values.choose(
        "gpu_memory_utilization",
        given.number("--gpu-memory-utilization", above=0.0, maximum=1.0),
        0.9 if old_fraction else 0.92,
        "0.90 before 0.20" if old_fraction else "0.92 by default",
    )
    values.choose(
        "num_gpu_blocks_override", given.integer("--num-gpu-blocks-override"), None, "not set: profiled"
    )
    space = command.env.get("VLLM_CPU_KVCACHE_SPACE") if values["device"] == "cpu" else None
    asked_bytes = given.integer("--kv-cache-memory-bytes")
    if asked_bytes is None and space is not None:
        if not space.isdigit() or int(space) == 0:
            raise BadInput("VLLM_CPU_KVCACHE_SPACE", space, "must be a whole number of GiB")
        values.derive("kv_cache_memory_bytes", int(space) * GIB, "VLLM_CPU_KVCACHE_SPACE [GiB]")
    else:
        values.choose("kv_cache_memory_bytes", asked_bytes, None, "not set: what utilisation leaves")
    if asked_bytes is not None and given.has("--gpu-memory-utilization"):
        values.warn("--gpu-memory-utilization", "has no effect: --kv-cache-memory-bytes is set")


def _default_block_size(model: ModelConfig, gpu: GpuSpec, kv_cache_dtype: str) -> tuple[int, str]:
    """What the chosen attention backend prefers (platforms/cuda.py, platforms/cpu.py, 0.28)."""
    device = device_of(gpu)
    if device == "cpu":
        return (16, "the CPU's MLA kernel takes 16 only") if model.mla else (128, "CPU backend")
    if device == "cuda" and model.mla is not None and gpu.compute_capability is not None:
        if gpu.compute_capability[0] == 10:
            return 32, "FlashInfer MLA on Blackwell"
        if gpu.compute_capability[0] == 9 and kv_cache_dtype.startswith("fp8"):
            return 64, "FlashMLA, which reads an FP8 latent"
    return 16, "16 by default"


def _resolve_scheduler(given: Given, values: Values, device: str, asked: str, rules: str) -> None:
    if device == "cpu":
        default, rule = False, "off on the CPU backend"
    elif version_key(asked) < (0, 14):
        default, rule = False, "off by default before 0.14"
    else:
        default, rule = True, "on unless something is incompatible"
    if given.has("--speculative-config") or given.has("--spec-method"):
        rule += " (some draft methods turn it off)"
    asked_async = given.truth("--async-scheduling")
    if device == "cpu" and asked_async:
        values.derive("async_scheduling", False, rule)
        values.warn("--async-scheduling", "the CPU backend turns it off")
    else:
        values.choose("async_scheduling", asked_async, default, rule)
    values.choose("scheduling_policy", given.word("--scheduling-policy"), "fcfs", "by default")
    threshold = given.integer("--long-prefill-token-threshold", minimum=0)
    values.choose("long_prefill_token_threshold", threshold, 0, "0: off")
    if threshold is not None and threshold > values["max_model_len"]:
        raise BadInput(
            "--long-prefill-token-threshold",
            threshold,
            f"must be at most --max-model-len ({values['max_model_len']}); the engine refuses to start",
        )
    reserves = version_key(asked) >= (0, 19)
    values.choose(
        "scheduler_reserve_full_isl",
        given.truth("--scheduler-reserve-full-isl"),
        reserves,
        "on by default" if reserves else "no such check before 0.19",
    )
    values.choose("watermark", given.number("--watermark", minimum=0.0, maximum=1.0), 0.0, "0 by default")
    values.choose(
        "prefill_schedule_interval", given.integer("--prefill-schedule-interval"), 1, "1: every step"
    )
    values.choose("stream_interval", given.integer("--stream-interval"), 1, "every token")
    if version_key(rules) < (0, 33):
        return
    active = given.integer("--max-num-active-seqs")
    if active is not None and active > values["max_num_seqs"]:
        raise BadInput(
            "--max-num-active-seqs", active, f"must be at most --max-num-seqs ({values['max_num_seqs']})"
        )
    values.choose("max_num_active_seqs", active, None, "not set: max_num_seqs")
    values.choose(
        "long_prefill_token_threshold_adaptive",
        given.truth("--long-prefill-token-threshold-adaptive"),
        False,
        "off by default",
    )
