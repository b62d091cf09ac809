"""SGLang's own rules for absent flags, and its own refusals (sglang/srt/arg_groups/, 0.5.21).

`resolve` yields these keys: device, dtype, quantization, kv_cache_dtype, tensor_parallel_size,
pipeline_parallel_size, data_parallel_size, enable_dp_attention, ep_size, context_length, page_size,
chunked_prefill_size, max_prefill_tokens, prefill_max_requests, max_running_requests, max_total_tokens,
mem_fraction_static, schedule_policy, schedule_conservativeness, init_new_token_ratio, min_new_token_ratio,
new_token_ratio_decay, disable_radix_cache, radix_eviction_policy, enable_mixed_chunk,
disable_overlap_schedule, prefill_decode_interval, num_continuous_decode_steps, enable_priority_scheduling,
schedule_low_priority_values_first, priority_scheduling_preemption_threshold, retraction_policy,
stream_interval, swa_full_tokens_ratio, disable_hybrid_swa_memory, cuda_graph_backend_decode,
cuda_graph_backend_prefill, cuda_graph_max_bs_decode, cuda_graph_bs_decode, cuda_graph_bs_prefill.
max_running_requests is None where it follows from the KV pool: see `default_max_running_requests`.
"""

from __future__ import annotations

from sim.commands.given import Given
from sim.commands.numbers import real, whole
from sim.commands.serve import ServeCommand
from sim.engines.quantised import check_capability
from sim.engines.sglang.graphs import resolve_graphs
from sim.engines.sglang.memory_defaults import (
    default_chunked_prefill_size,
    default_mem_fraction,
    device_memory_mib,
)
from sim.engines.values import Values, env_notes, flag_notes, nearest_version, version_key
from sim.errors import BadInput
from sim.hardware.spec import GpuSpec
from sim.models.model import ModelConfig
from sim.models.weights import check_tensor_parallel
from sim.provenance import Note
from sim.scenario import EngineConfig

RULE_VERSIONS = ("0.5.21",)
DEFAULT_VERSION = "0.5.21"
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")
_CACHE_AWARE = {"lpm", "dfs-weight"}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
# `get_min_capability` in layers/quantization/, 0.5.21.
_CAPABILITIES = {
    "fp8": (8, 0),
    "w8a8_fp8": (8, 9),
    "w8a8_int8": (7, 5),
    "awq": (7, 5),
    "awq_marlin": (8, 0),
    "gptq_marlin": (8, 0),
    "nvfp4": (8, 0),
    "modelopt_fp4": (8, 0),
    "modelopt_fp8": (8, 9),
    "mxfp4": (8, 0),
}
_DSA_ARCHITECTURES = {"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}


def resolve(
    command: ServeCommand,
    model: ModelConfig,
    gpu: GpuSpec,
    gpu_count: int | None = None,
    version: str | None = None,
) -> tuple[EngineConfig, tuple[Note, ...]]:
    """Apply SGLang's rules to a command.

    `gpu_count` None means as many as the parallel sizes need; `version` None means the image tag's, else
    0.5.21.

    Raises:
        BadInput: what the engine itself would refuse at start-up, or a value that is no such number.
    """
    asked = version or command.version or DEFAULT_VERSION
    rules = nearest_version(asked, RULE_VERSIONS)
    given, values = Given(command.given), Values()
    if version_key(asked) != version_key(rules):
        values.warn(
            "--engine-version", f"no rules of SGLang {asked} are known; the rules of {rules} are used"
        )
    elif not version and not command.version:
        values.inform("--engine-version", f"not named; the rules of SGLang {rules} are used")
    values.derive("device", _device(gpu), f"of {gpu.name}")
    _resolve_types(given, values, model, gpu)
    _resolve_parallel(given, values, model, gpu_count)
    _resolve_length(given, values, model, command)
    _resolve_page_size(given, values, model, gpu)
    _resolve_prefill(given, values, gpu)
    _resolve_pool(given, values)
    resolve_graphs(given, values, model, gpu)
    fraction, rule = default_mem_fraction(values, model, gpu)
    asked_fraction = given.number("--mem-fraction-static", above=0.0, maximum=1.0)
    values.choose("mem_fraction_static", asked_fraction, fraction, rule)
    _resolve_policy(given, values)
    _resolve_rest(given, values, command)
    notes = (*command.notes, *values.notes, *flag_notes(command, asked, "SGLang"), *env_notes(command))
    engine = EngineConfig(
        name="sglang",
        version=rules,
        asked_version=asked,
        values=values.items,
        given=command.flags,
        env=dict(command.env),
    )
    return engine, notes


def default_max_running_requests(pool_tokens: int, context_length: int) -> int:
    """Request slots where the flag is absent (mem_cache/kv_cache_configurator.py `resolve_max_num_reqs`)."""
    estimate = max(min(int(pool_tokens / context_length * 512), 4096), 2048)
    return min(estimate, pool_tokens // 2)


def _device(gpu: GpuSpec) -> str:
    if gpu.name.lower().startswith("cpu"):
        return "cpu"
    return "rocm" if gpu.compute_capability is None else "cuda"


def _resolve_types(given: Given, values: Values, model: ModelConfig, gpu: GpuSpec) -> None:
    asked = given.word("--dtype")
    has_bf16 = gpu.compute_capability is None or gpu.compute_capability >= (8, 0)
    if asked in (None, "auto"):
        own = "bf16" if model.dtype == "fp32" else model.dtype
        if own == "bf16" and not has_bf16:
            values.derive("dtype", "fp16", f"{gpu.name} has no bfloat16")
            values.warn("--dtype", f"{gpu.name} has no bfloat16: float16 is used")
        else:
            values.choose("dtype", None, own, "auto: the model's own")
    else:
        values.choose("dtype", _DTYPES[asked], None, "")
        if values["dtype"] == "bf16" and not has_bf16:
            raise BadInput("--dtype", asked, f"{gpu.name} has no bfloat16; use --dtype half")
    own_method = model.quant.method if model.quant else None
    rule = "as the checkpoint is" if own_method else "the checkpoint is not quantised"
    method = values.choose("quantization", given.word("--quantization"), own_method, rule)
    check_capability(method, model, gpu, _CAPABILITIES)
    values.choose("kv_cache_dtype", given.word("--kv-cache-dtype"), "auto", "auto: the model's dtype")


def _resolve_parallel(given: Given, values: Values, model: ModelConfig, gpu_count: int | None) -> None:
    tp = values.choose("tensor_parallel_size", given.integer("--tp-size"), 1, "1 by default")
    pp = values.choose("pipeline_parallel_size", given.integer("--pp-size"), 1, "1 by default")
    dp = values.choose("data_parallel_size", given.integer("--dp-size"), 1, "1 by default")
    values.choose("ep_size", given.integer("--ep-size"), 1, "1 by default")
    asked = given.truth("--enable-dp-attention")
    if asked and dp == 1:
        values.derive("enable_dp_attention", False, "--dp-size is 1")
    else:
        values.choose("enable_dp_attention", asked, False, "off by default")
    shared = values["enable_dp_attention"]
    if shared and tp % dp:
        raise BadInput("--dp-size", dp, f"must divide --tp-size ({tp}) with --enable-dp-attention")
    check_tensor_parallel(model, tp // dp if shared else tp)
    if pp > model.num_layers:
        raise BadInput("--pp-size", pp, f"{model.name} has only {model.num_layers} layers")
    needed = tp * pp * (1 if shared else dp)
    if gpu_count is not None and gpu_count < needed:
        raise BadInput("--gpu-count", gpu_count, f"TP {tp} x PP {pp} x DP {dp} needs {needed} GPUs")


def _resolve_length(given: Given, values: Values, model: ModelConfig, command: ServeCommand) -> None:
    longest = model.max_position_embeddings
    asked = given.integer("--context-length")
    if asked is not None and asked > longest:
        allowed = command.env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "0").lower()
        if allowed in {"", "0", "false"} and not given.has("--json-model-override-args"):
            raise BadInput(
                "--context-length",
                asked,
                f"{model.name} ends at {longest} tokens and the engine refuses to start; lower it",
            )
        values.warn("--context-length", f"{asked} exceeds the {longest} of the model's configuration")
    values.choose("context_length", asked, longest, "the model's own length")


def attention_backend(given: Given, model: ModelConfig, gpu: GpuSpec) -> str:
    """The backend that is chosen without a flag (arg_groups/model_override_base.py), or the given one."""
    asked = given.word("--attention-backend")
    if asked is not None:
        return asked
    major = gpu.compute_capability[0] if gpu.compute_capability else 0
    if model.architecture in _DSA_ARCHITECTURES:
        return "dsa"
    if model.mla is not None:
        deepseek = model.architecture == "DeepseekV3ForCausalLM"
        return {9: "fa3", 10: "trtllm_mla" if deepseek else "flashinfer"}.get(major, "triton")
    if major == 10:
        return "fa4" if model.v_head_dim != model.head_dim else "trtllm_mha"
    if gpu.compute_capability is None:
        return "aiter"
    return "fa3" if major == 9 else "flashinfer"


def _resolve_page_size(given: Given, values: Values, model: ModelConfig, gpu: GpuSpec) -> None:
    asked = given.integer("--page-size")
    backends = {attention_backend(given, model, gpu), given.word("--decode-attention-backend")}
    backends.add(given.word("--prefill-attention-backend"))
    forced: tuple[int, ...] = ()
    why = ""
    for backend, sizes in _PAGE_SIZES.items():
        if backend in backends and not (backend == "fa4" and not _fa4_forces(model, gpu)):
            forced, why = sizes, backend
    if forced and asked not in forced:
        preferred = 64 if 64 in forced else forced[0]
        values.derive("page_size", preferred, f"the attention backend {why} needs it")
        if asked is not None:
            values.warn("--page-size", f"{asked} is changed to {preferred} by the attention backend {why}")
    else:
        values.choose("page_size", asked, 1, "1 by default")


# What a backend accepts; with 64 among it, any other value becomes 64 (overrides.py, 0.5.21).
_PAGE_SIZES: dict[str, tuple[int, ...]] = {
    "flashmla": (64,),
    "trtllm_mla": (32, 64),
    "tokenspeed_mla": (32, 64),
    "cutedsl_mla": (32, 64),
    "trtllm_mha": (16, 32, 64, 128),
    "hpc_ops": (64,),
    "dsa": (64,),
    "fa4": (128,),
}


def _fa4_forces(model: ModelConfig, gpu: GpuSpec) -> bool:
    return model.mla is None and gpu.compute_capability is not None and gpu.compute_capability[0] == 10


def _resolve_prefill(given: Given, values: Values, gpu: GpuSpec) -> None:
    default, rule = default_chunked_prefill_size(device_memory_mib(gpu))
    text = given.word("--chunked-prefill-size")
    asked = None if text is None else whole("--chunked-prefill-size", text, minimum=-1)
    if asked == 0:
        raise BadInput("--chunked-prefill-size", 0, "must be at least 1, or -1 to turn chunking off")
    chunk = values.choose("chunked_prefill_size", asked, default, rule)
    if values["enable_dp_attention"] and chunk > 0:
        dp = values["data_parallel_size"]
        chunk = values.derive("chunked_prefill_size", chunk // dp, "divided by DP with DP attention")
    if chunk > 0 and chunk % values["page_size"]:
        raise BadInput(
            "--page-size",
            values["page_size"],
            f"must divide --chunked-prefill-size ({chunk}); the engine refuses to start",
        )
    limit = values.choose("max_prefill_tokens", given.integer("--max-prefill-tokens"), 16384, "by default")
    if chunk < 0:
        values.inform(
            "--chunked-prefill-size", f"chunking is off: one prompt may exceed --max-prefill-tokens ({limit})"
        )
    values.choose("prefill_max_requests", given.integer("--prefill-max-requests"), None, "no limit")
    mixed = values.choose("enable_mixed_chunk", given.truth("--enable-mixed-chunk"), False, "off by default")
    if mixed and chunk < 0:
        values.derive("enable_mixed_chunk", False, "chunking is off")
        values.warn(
            "--enable-mixed-chunk", "has no effect: chunked prefill is off, so decodes never join prefills"
        )
    interval = given.integer("--prefill-decode-interval", minimum=0)
    values.choose("prefill_decode_interval", interval, 0, "0: off")


def _resolve_pool(given: Given, values: Values) -> None:
    values.choose(
        "max_running_requests", given.integer("--max-running-requests"), None, "from the pool's size"
    )
    values.choose("max_total_tokens", given.integer("--max-total-tokens"), None, "not set: profiled")
    values.choose(
        "disable_radix_cache", given.truth("--disable-radix-cache"), False, "the radix cache is on by default"
    )
    eviction = values.choose(
        "radix_eviction_policy", given.word("--radix-eviction-policy"), "lru", "by default"
    )
    if eviction != "lru":
        values.not_modelled("--radix-eviction-policy", "another eviction order: other hit rate; LRU is used")
    values.choose(
        "swa_full_tokens_ratio",
        given.number("--swa-full-tokens-ratio", above=0.0, maximum=1.0),
        0.8,
        "by default",
    )
    values.choose(
        "disable_hybrid_swa_memory", given.truth("--disable-hybrid-swa-memory"), False, "off by default"
    )


def _resolve_policy(given: Given, values: Values) -> None:
    """schedule_policy.py `_validate_and_adjust_policy`, validation_hook.py `check_server_args`."""
    asked = given.word("--schedule-policy")
    policy = values.choose("schedule_policy", asked, "fcfs", "by default")
    no_cache = values["disable_radix_cache"]
    if policy == "shortest-prefill-first" and no_cache:
        raise BadInput("--schedule-policy", policy, "needs the radix cache; the engine refuses to start")
    if policy in _CACHE_AWARE and no_cache:
        values.derive("schedule_policy", "fcfs", f"{policy} without the radix cache")
        values.warn(
            "--schedule-policy", f"{policy} needs the radix cache, which is off: the engine uses fcfs"
        )
    elif policy not in POLICIES:
        raise BadInput(
            "--schedule-policy", policy, f"known to SGLang, but not modelled; choose of {', '.join(POLICIES)}"
        )
    priority = values.choose(
        "enable_priority_scheduling", given.truth("--enable-priority-scheduling"), False, "off by default"
    )
    if priority and policy not in {"fcfs", "lof"}:
        raise BadInput(
            "--enable-priority-scheduling",
            None,
            f"works with --schedule-policy fcfs or lof, not {policy}; the engine refuses to start",
        )
    values.choose(
        "schedule_low_priority_values_first",
        given.truth("--schedule-low-priority-values-first"),
        False,
        "higher values first by default",
    )
    values.choose(
        "priority_scheduling_preemption_threshold",
        given.integer("--priority-scheduling-preemption-threshold", minimum=0),
        10,
        "by default",
    )
    if given.has("--disable-priority-preemption") and not priority:
        values.warn("--disable-priority-preemption", "has no effect without --enable-priority-scheduling")
    elif given.has("--disable-priority-preemption"):
        values.not_modelled("--disable-priority-preemption", "running requests stay; preemption is simulated")
    retraction = values.choose("retraction_policy", given.word("--retraction-policy"), "length", "by default")
    if retraction == "priority":
        if not priority:
            raise BadInput("--retraction-policy", retraction, "needs --enable-priority-scheduling")
        values.not_modelled("--retraction-policy", "other victims of retraction; the length order is used")


def _resolve_rest(given: Given, values: Values, command: ServeCommand) -> None:
    conservativeness = values.choose(
        "schedule_conservativeness",
        given.number("--schedule-conservativeness", minimum=0.0),
        1.0,
        "by default",
    )
    if values["enable_dp_attention"]:
        conservativeness = values.derive(
            "schedule_conservativeness", conservativeness * 0.3, "times 0.3 with DP attention"
        )
    init_base = _env_number(command, "SGLANG_INIT_NEW_TOKEN_RATIO", 0.7)
    factor = _env_number(command, "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR", 0.14)
    steps = _env_number(command, "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS", 600)
    init = values.derive(
        "init_new_token_ratio", min(init_base * conservativeness, 1.0), f"{init_base} x conservativeness"
    )
    low = values.derive("min_new_token_ratio", min(init * factor, 1.0), f"{factor} x the initial ratio")
    values.derive("new_token_ratio_decay", (init - low) / steps, f"over {steps:g} decode steps")
    pipeline = values["pipeline_parallel_size"] > 1
    overlap_off = values.choose(
        "disable_overlap_schedule",
        given.truth("--disable-overlap-schedule"),
        False,
        "overlap is on by default",
    )
    if pipeline and not overlap_off:
        values.derive("disable_overlap_schedule", True, "off under pipeline parallelism")
    steps_given = given.integer("--num-continuous-decode-steps")
    values.choose("num_continuous_decode_steps", steps_given, 1, "by default")
    if steps_given not in (None, 1):
        values.warn("--num-continuous-decode-steps", "accepted, but nothing reads it in 0.5.21")
    values.choose("stream_interval", given.integer("--stream-interval"), 1, "every token")


def _env_number(command: ServeCommand, name: str, default: float) -> float:
    """A number from the environment; SGLang reads these from there only.

    Raises:
        BadInput: no positive number.
    """
    text = command.env.get(name)
    return default if text is None else real(name, text, above=0.0)
