"""vLLM's refusals to start for lack of memory, and what the user should know about the account."""

from __future__ import annotations

from dataclasses import dataclass

from sim.engines.vllm import kv_layout as layouts
from sim.engines.vllm.kv_layout import KvLayout
from sim.engines.vllm.profiling import GIB
from sim.errors import BadInput
from sim.hardware.spec import GpuSpec
from sim.memory import MemoryLine, config_notes
from sim.models.model import ModelConfig
from sim.provenance import Note

# Below this share of difference an estimate is as good as the logs it rests on.
TELLING_DIFFERENCE = 0.10


@dataclass(frozen=True, slots=True)
class MemorySetting:
    """What the account reads from a configuration. `in_flight`: tokens of all concurrent batches."""

    tp: int
    pp: int
    max_model_len: int
    tokens: int
    seqs: int
    in_flight: int
    kv_cache_dtype: str
    fraction: float
    version: tuple[int, int]
    eager: bool
    fit_length: bool

    @property
    def by_concurrency(self) -> bool:
        """Whether this version logs tokens as concurrency times length."""
        return self.version >= (0, 20)


def refuse_if_nothing_left(
    model: ModelConfig,
    gpu: GpuSpec,
    setting: MemorySetting,
    spent: list[MemoryLine],
    budget: int,
    available: int,
) -> None:
    """The engine's check of available memory, told apart by what to change.

    Raises:
        BadInput: nothing is left for KV.
    """
    if available > 0:
        return
    weights = next(line.bytes for line in spent if line.name == "weights")
    needed = sum(line.bytes for line in spent)
    if weights > gpu.memory_bytes:
        raise BadInput(
            "--tensor-parallel-size",
            setting.tp,
            f"the model does not fit: {weights / GIB:.2f} GiB of weights per GPU, {gpu.name} has "
            f"{gpu.memory_bytes / GIB:.2f} GiB; use more GPUs or a quantised checkpoint",
        )
    raise BadInput(
        "--gpu-memory-utilization",
        setting.fraction,
        f"no memory is left for KV ({available / GIB:.2f} GiB): {budget / GIB:.2f} GiB requested on "
        f"{gpu.name}, {weights / GIB:.2f} GiB weights and {(needed - weights) / GIB:.2f} GiB for the rest; "
        + (
            f"raise it above {needed / gpu.memory_bytes:.2f}, "
            if needed < gpu.memory_bytes * 0.97
            else "even 1.0 is too little; "
        )
        + "raise --tensor-parallel-size, lower --max-num-batched-tokens or use a smaller model",
    )


def checked_length(
    layout: KvLayout,
    blocks: int,
    setting: MemorySetting,
    is_given: bool,
    notes: list[Note],
) -> int:
    """The longest request the engine serves: `max_model_len`, or what fits if that is -1 (auto).

    Raises:
        BadInput: one request of `max_model_len` does not fit into the pool.
    """
    length = setting.max_model_len
    if layouts.blocks_per_request(layout, length, setting.in_flight) <= blocks:
        return length
    fitting = layouts.longest_request(layout, blocks, length, setting.in_flight)
    if setting.fit_length and fitting > 0:
        notes.append(
            Note("warning", "--max-model-len", f"-1: the engine shrinks the length to {fitting} tokens")
        )
        return fitting
    needed = layouts.blocks_per_request(layout, length, setting.in_flight) * layout.block_bytes
    source = "the given pool" if is_given else "the estimated pool"
    raise BadInput(
        "--max-model-len",
        length,
        f"one such request needs {needed / GIB:.2f} GiB of KV and {source} has "
        f"{blocks * layout.block_bytes / GIB:.2f} GiB, so the engine refuses to start; "
        + (
            f"lower it to at most {fitting}"
            if fitting > 0
            else "not one token fits: give the pool more memory"
        )
        + ("" if is_given else " or raise --gpu-memory-utilization"),
    )


def account_notes(
    model: ModelConfig,
    gpu: GpuSpec,
    setting: MemorySetting,
    spent: list[MemoryLine],
    low: int,
    available: int,
) -> list[Note]:
    """What was assumed, what is not modelled, and whether the plan is close to not starting."""
    notes = config_notes(model)
    if low <= 0 < available:
        notes.append(
            Note(
                "warning",
                "--gpu-memory-utilization",
                f"close to the edge: {low / GIB:.2f} to {available / GIB:.2f} GiB are left for KV, and below "
                "zero the engine does not start",
            )
        )
    if setting.pp > 1:
        notes.append(
            Note("not-modelled", "--pipeline-parallel-size", "stages are taken as equal shares of the model")
        )
    if model.extra_parameters:
        notes.append(
            Note(
                "not-modelled",
                model.name,
                "the encoder's own activations in the profile run: the pool may be some GiB smaller unless "
                "--limit-mm-per-prompt turns images off",
            )
        )
    if model.state is not None:
        notes.append(
            Note(
                "not-modelled",
                model.name,
                "state-space layers: memory only, their scheduling is not modelled",
            )
        )
    return notes


def comparison(
    flag: str,
    layout: KvLayout,
    blocks: int,
    tokens: int,
    estimated: int,
    setting: MemorySetting,
    spent: list[MemoryLine],
    budget: int,
    gpu: GpuSpec,
) -> list[Note]:
    """Estimate against the given figure, and whether the given pool leaves room for what else must fit.

    A flag that sets the pool may well ask for less than fits; a logged figure that differs is a sign of
    other flags.
    """
    notes: list[Note] = []
    weights = next(line.bytes for line in spent if line.name == "weights")
    others = sum(line.bytes for line in spent) - weights
    least = sum(line.low for line in spent) - weights
    room = budget - weights - blocks * layout.block_bytes
    fraction = (weights + blocks * layout.block_bytes + others) / gpu.memory_bytes
    fitting = f" (about {fraction:.2f} would give this pool)" if fraction < 1 else ""
    difference = (estimated - tokens) / tokens if tokens else 0.0
    text = f"given {tokens:,} tokens, estimated {max(estimated, 0):,} ({difference:+.1%})"
    sets_pool = flag in {"--num-gpu-blocks-override", "--kv-cache-memory-bytes"}
    if sets_pool and difference >= -TELLING_DIFFERENCE:
        notes.append(Note("info", flag, f"sets the pool to {tokens:,} tokens; about {estimated:,} would fit"))
    elif sets_pool:
        notes.append(
            Note("warning", flag, f"{text}: the engine takes it on trust and may run out of memory later")
        )
    elif abs(difference) > TELLING_DIFFERENCE:
        notes.append(
            Note(
                "warning",
                flag,
                f"{text}: the pool decides how many requests run at once, so flags, GPU or version are "
                "probably not those of the log: other processes on the GPU, a different "
                f"--max-num-batched-tokens, or a different --gpu-memory-utilization{fitting}",
            )
        )
    else:
        notes.append(Note("info", flag, text))
    if room < least and not sets_pool:
        notes.append(
            Note(
                "warning",
                "--gpu-memory-utilization",
                f"at {setting.fraction:g} of {gpu.memory_bytes / GIB:.2f} GiB, weights and the given pool "
                f"leave {'nothing' if room <= 0 else f'{room / GIB:.2f} GiB'} for activations and the rest "
                f"({room / GIB:+.2f} GiB, about {others / GIB:.2f} GiB needed): the engine that logged this "
                f"pool ran with about {fraction:.2f}",
            )
        )
    return notes
