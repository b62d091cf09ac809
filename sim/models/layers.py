"""What each layer of a model is: full or sliding attention, linear attention or Mamba, experts or dense."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import BadInput
from sim.models.config_reader import ConfigReader
from sim.models.model import MoeConfig, StateConfig

_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "hybrid": "full+state",  # attention and Mamba in one layer (Falcon-H1, Zamba2)
    "sliding_attention": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "state",
    "moe": "none",
    "mlp": "none",
}

# Nemotron-H writes one letter per layer.
_LETTERS = {"M": "state", "*": "full", "-": "none", "E": "none"}

# Families whose layers are all sliding wherever `sliding_window` is set.
_ALL_SLIDING = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral"}


@dataclass(frozen=True, slots=True)
class Layers:
    """Kind of every layer, in order: "full", "sliding", "state", "full+state" or "none"."""

    kinds: tuple[str, ...]
    window: int | None

    def count(self, kind: str) -> int:
        """Layers that have a part of this kind."""
        return sum(kind in entry.split("+") for entry in self.kinds)


def parse_layers(reader: ConfigReader, num_layers: int) -> Layers:
    """Kinds of layer from the config's pattern fields, else from the family's rule.

    Rules of the HF configuration classes (transformers 5.24): Gemma 2 alternates, Gemma 3 and 4 have five
    sliding layers to one full, Cohere 2 three to one, Llama 4 three chunked to one, gpt-oss alternates,
    Qwen3-Next and Qwen3.5 three linear to one full.

    Raises:
        BadInput: a layer type that is not known, or a pattern of the wrong length.
    """
    kinds = _explicit(reader, num_layers) or _by_family(reader, num_layers)
    window = _window(reader)
    if window is None or _window_disabled(reader):
        kinds = ["full" if kind == "sliding" else kind for kind in kinds]
        window = None
    return Layers(tuple(kinds), window if "sliding" in kinds else None)


def _explicit(reader: ConfigReader, num_layers: int) -> list[str] | None:
    letters = reader.raw("hybrid_override_pattern")
    if isinstance(letters, str) and letters:
        unknown = set(letters) - set(_LETTERS)
        if unknown:
            raise BadInput(
                f"{reader.name}: hybrid_override_pattern",
                letters,
                f"unknown layer {sorted(unknown)[0]!r}; known: {' '.join(_LETTERS)}",
            )
        return _checked(reader, [_LETTERS[letter] for letter in letters], num_layers)
    flags = reader.raw("hybrid_layer_pattern")  # MiMo-V2: 1 is sliding
    if isinstance(flags, list):
        return _checked(reader, ["sliding" if flag else "full" for flag in flags], num_layers)
    kinds = reader.raw("layer_types") or reader.raw("layers_block_type")
    if not isinstance(kinds, list):
        return None
    for kind in kinds:
        if kind not in _KINDS:
            raise BadInput(
                f"{reader.name}: layer_types", str(kind), f"unknown layer type; known: {', '.join(_KINDS)}"
            )
    return _checked(reader, [_KINDS[kind] for kind in kinds], num_layers)


def _checked(reader: ConfigReader, kinds: list[str], num_layers: int) -> list[str]:
    # Some checkpoints list the layers of their multi-token-prediction head too.
    if len(kinds) < num_layers:
        raise BadInput(
            reader.name, None, f"pattern names {len(kinds)} layers, num_hidden_layers {num_layers}"
        )
    return kinds[:num_layers]


def _by_family(reader: ConfigReader, num_layers: int) -> list[str]:
    family = reader.family
    every = range(num_layers)
    interval = reader.raw("full_attention_interval")
    if interval or family.startswith(("qwen3_next", "qwen3_5")):
        step = int(interval or reader.assume("full_attention_interval", 4, f"family default of {family}"))
        return ["full" if (i + 1) % step == 0 else "state" for i in every]
    if family == "llama4_text":
        rope = reader.raw("no_rope_layers")
        if isinstance(rope, list) and len(rope) == num_layers:
            return ["sliding" if flag else "full" for flag in rope]
        return ["full" if (i + 1) % 4 == 0 else "sliding" for i in every]
    if family in {"gemma2", "gpt_oss"}:
        return ["sliding" if i % 2 == 0 else "full" for i in every]
    if family == "jamba":
        period = int(reader.raw("attn_layer_period") or 8)
        offset = int(reader.raw("attn_layer_offset") or 4)
        return ["full" if i % period == offset else "state" for i in every]
    if family == "falcon_h1":
        return ["full+state"] * num_layers
    pattern = reader.raw("sliding_window_pattern") or reader.raw("_sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        kinds = ["full" if pattern[i % len(pattern)] == "G" else "sliding" for i in every]
        return [*kinds[:-1], "full"]
    steps = {"gemma3_text": 6, "gemma4_text": 6, "gemma4_unified_text": 6, "cohere2": 4, "olmo3": 4}
    if pattern or family in steps:
        step = int(pattern or reader.assume("layer_types", steps[family], f"family default of {family}"))
        return ["full" if (i + 1) % step == 0 else "sliding" for i in every]
    if family in _ALL_SLIDING:
        return ["sliding"] * num_layers
    if family.startswith(("qwen2", "qwen3")) and reader.raw("use_sliding_window"):
        first = int(reader.raw("max_window_layers") or 28)
        return ["sliding" if i >= first else "full" for i in every]
    return ["full"] * num_layers


def _window(reader: ConfigReader) -> int | None:
    for field in ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size"):
        if field in reader.text and reader.text[field] is None:
            return None
        value = reader.raw(field)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    for field in ("sliding_window", "attention_chunk_size"):
        value = reader.defaults.get(field)
        if isinstance(value, int):
            return value
    return None


def _window_disabled(reader: ConfigReader) -> bool:
    return reader.family.startswith(("qwen2", "qwen3")) and not (
        reader.raw("use_sliding_window") or isinstance(reader.raw("layer_types"), list)
    )


def parse_moe(reader: ConfigReader, num_layers: int, intermediate_size: int) -> MoeConfig | None:
    """Experts, or None for a dense model. Which layers have them: the family's own field."""
    experts = reader.integer("num_experts", least=0)
    if not experts or reader.raw("enable_moe_block") is False:
        return None
    layers = _moe_layers(reader, num_layers)
    if layers == 0:
        return None
    per_token = reader.integer("num_experts_per_tok")
    if per_token is not None and per_token > experts:
        hint = f"must not exceed num_experts ({experts})"
        raise BadInput(f"{reader.name}: num_experts_per_tok", per_token, hint)
    width = reader.integer("moe_intermediate_size") or intermediate_size
    if per_token is None:
        reader.missing.append("num_experts_per_tok")
    if not width:
        reader.missing.append("moe_intermediate_size")
    shared, shared_width = _shared_experts(reader, width)
    return MoeConfig(
        num_experts=experts,
        num_experts_per_tok=per_token or 1,
        moe_intermediate_size=width,
        num_shared_experts=shared,
        shared_expert_intermediate_size=shared_width,
        moe_layers=layers,
        bias=reader.family == "gpt_oss",
    )


def _shared_experts(reader: ConfigReader, width: int) -> tuple[int, int]:
    if reader.family == "llama4_text":
        return 1, width
    if reader.family == "nemotron_h":
        count = reader.stated("n_shared_experts") or 0
        return count, reader.stated("shared_expert_intermediate_size") or width
    total = reader.raw("shared_expert_intermediate_size")
    if total is None and reader.family.startswith(("qwen2_moe", "qwen3_next", "qwen3_5_moe")):
        total = reader.default("shared_expert_intermediate_size")
    if total:
        return 1, int(total)
    count = reader.raw("n_shared_experts")
    if count is None:
        count = reader.default("n_shared_experts")
    if isinstance(count, list):
        count = count[0]
    return int(count or 0), width


def _moe_layers(reader: ConfigReader, num_layers: int) -> int:
    every = range(num_layers)
    letters = reader.raw("hybrid_override_pattern")
    if isinstance(letters, str):
        return letters.count("E")
    if reader.raw("layers_block_type") and "moe" in reader.raw("layers_block_type"):
        return int(list(reader.raw("layers_block_type")).count("moe"))
    listed = reader.raw("moe_layers")
    if isinstance(listed, list):
        return len(listed)
    flags = reader.raw("moe_layer_freq")
    if isinstance(flags, list):
        return sum(bool(flag) for flag in flags[:num_layers])
    if reader.family == "llama4_text":
        step = reader.integer("interleave_moe_layer_step") or 1
        return sum((i + 1) % step == 0 for i in every)
    if reader.family == "jamba":
        period = int(reader.raw("expert_layer_period") or 2)
        offset = int(reader.raw("expert_layer_offset") or 1)
        return sum(i % period == offset for i in every)
    dense_first = reader.integer("first_k_dense_replace", least=0) or 0
    frequency = flags if isinstance(flags, int) and flags > 0 else 1
    sparse_step = int(reader.raw("decoder_sparse_step") or 1)
    dense_only = set(reader.raw("mlp_only_layers") or ())
    return sum(
        i >= dense_first and i % frequency == 0 and (i + 1) % sparse_step == 0 and i not in dense_only
        for i in every
    )


def parse_state(reader: ConfigReader, layers: Layers, hidden_size: int, dtype: str) -> StateConfig | None:
    """Per-sequence state of Mamba, gated delta net, KDA or short-convolution layers.

    Shapes: `vllm/model_executor/layers/mamba/mamba_utils.py MambaStateShapeCalculator` (vLLM 0.28). The
    convolution state is in the model dtype, the recurrent one in `mamba_ssm_cache_dtype` or
    `mamba_ssm_dtype`, else in the model dtype.

    Raises:
        BadInput: state layers whose sizes the config does not give.
    """
    count = layers.count("state")
    if count == 0:
        return None
    width = 4 if dtype == "fp32" else 2
    asked = reader.raw("mamba_ssm_cache_dtype") or reader.raw("mamba_ssm_dtype")
    recurrent_width = width if asked is None else 4 if "32" in str(asked) else 2
    if reader.raw("linear_num_value_heads") or reader.defaults.get("linear_num_value_heads"):
        conv, recurrent, parameters = _gated_delta_net(reader, hidden_size)
    elif reader.raw("linear_attn_config"):
        conv, recurrent, parameters = _kimi_delta(reader, hidden_size)
        recurrent_width = 4
    elif reader.raw("conv_L_cache") or reader.family.startswith("lfm2"):
        kernel = int(reader.raw("conv_L_cache") or 3)
        conv, recurrent = hidden_size * (kernel - 1), 0
        parameters = 4 * hidden_size * hidden_size + hidden_size * kernel
    elif reader.raw("mamba_dt_rank") or reader.family == "jamba":
        conv, recurrent, parameters = _mamba1(reader, hidden_size)
    else:
        conv, recurrent, parameters = _mamba2(reader, hidden_size)
    conv_bytes, recurrent_bytes = conv * width, recurrent * recurrent_width
    return StateConfig(
        num_layers=count,
        bytes_per_sequence=count * (conv_bytes + recurrent_bytes),
        conv_bytes_per_layer=conv_bytes,
        recurrent_bytes_per_layer=recurrent_bytes,
        parameters_per_layer=parameters,
    )


def _gated_delta_net(reader: ConfigReader, hidden: int) -> tuple[int, int, int]:
    key_heads, value_heads = (
        reader.required("linear_num_key_heads"),
        reader.required("linear_num_value_heads"),
    )
    key_dim, value_dim = reader.required("linear_key_head_dim"), reader.required("linear_value_head_dim")
    kernel = reader.required("linear_conv_kernel_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    projections = hidden * (channels + value_heads * value_dim + 2 * value_heads)
    output = value_heads * value_dim * hidden
    parameters = projections + output + channels * kernel + 2 * value_heads + value_dim
    return channels * (kernel - 1), value_heads * key_dim * value_dim, parameters


def _kimi_delta(reader: ConfigReader, hidden: int) -> tuple[int, int, int]:
    section = reader.raw("linear_attn_config")
    heads, dim = int(section["num_heads"]), int(section["head_dim"])
    kernel = int(section.get("short_conv_kernel_size") or 4)
    width = heads * dim
    # q, k, v, o; two low-rank gates of rank `dim`; one beta per head; three convolutions.
    parameters = 4 * hidden * width + 2 * dim * (hidden + width) + hidden * heads + 3 * width * kernel
    return 3 * width * (kernel - 1), heads * dim * dim, parameters


def _mamba2(reader: ConfigReader, hidden: int) -> tuple[int, int, int]:
    def first(*fields: str) -> int | None:
        for field in fields:
            value = reader.raw(field)
            if value is None:
                value = reader.default(field)
            if isinstance(value, int):
                return value
        return None

    heads = first("mamba_num_heads", "mamba_n_heads")
    dim = first("mamba_head_dim", "mamba_d_head")
    if heads is not None and dim is None and (expand := first("mamba_expand", "expand")):
        dim = expand * hidden // heads
    groups = first("n_groups", "mamba_n_groups", "mamba_ngroups")
    state = first("ssm_state_size", "mamba_d_state")
    kernel = first("conv_kernel", "mamba_d_conv")
    sizes = {
        "mamba_num_heads": heads,
        "mamba_head_dim": dim,
        "n_groups": groups,
        "ssm_state_size": state,
        "conv_kernel": kernel,
    }
    for field, value in sizes.items():
        if value is None:
            raise BadInput(
                reader.name, None, f"insufficient config: {field} is missing, and the model has Mamba layers"
            )
    if heads is None or dim is None or groups is None or state is None or kernel is None:
        raise AssertionError("checked above")
    inner = heads * dim
    channels = inner + 2 * groups * state
    projection = hidden * (inner + channels + heads)
    parameters = projection + inner * hidden + channels * (kernel + 1) + 3 * heads + inner
    return channels * (kernel - 1), heads * dim * state, parameters


def _mamba1(reader: ConfigReader, hidden: int) -> tuple[int, int, int]:
    inner = hidden * int(reader.raw("mamba_expand") or 2)
    state = int(reader.raw("mamba_d_state") or 16)
    kernel = int(reader.raw("mamba_d_conv") or 4)
    rank = int(reader.raw("mamba_dt_rank") or -(-hidden // 16))
    parameters = hidden * 2 * inner + inner * (kernel + 1) + inner * (rank + 2 * state)
    parameters += rank * inner + inner + inner * state + inner + inner * hidden
    return inner * (kernel - 1), inner * state, parameters
