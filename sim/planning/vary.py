"""Which scenarios a what-if looks at: one setting at a time, or the full grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from sim.build import ScenarioSource
from sim.carry import carried
from sim.commands import serve as serve_commands
from sim.errors import BadInput
from sim.scenario import Observed, Scenario
from sim.workload.spec import RandomDataset
from sim.workload.sweep_prompts import prompts_of

FIELD = "--vary"
SOURCE_KEYS = ("gpu", "gpu-count", "model", "engine-version", "kv-cache-tokens")
PARALLEL = (
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
    *("--tp-size", "--pp-size", "--dp-size"),
)
CONCURRENCY, PROMPTS = "max-concurrency", "num-prompts"


@dataclass(frozen=True, slots=True)
class Dimension:
    """One setting and the values it takes, in the order given."""

    key: str
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """The setting without the side it belongs to: `max-num-seqs` for `serve.max_num_seqs`."""
        return plain(self.key)


@dataclass(frozen=True, slots=True)
class Variant:
    """A scenario with some settings on top.

    Attributes:
        settings: (key, value) as varied; empty for the scenario as it stands.
        derived: (key, value, why) set along with them.
        load_only: nothing but the client's load differs from the scenario as it stands.
    """

    settings: tuple[tuple[str, str], ...]
    source: ScenarioSource = field(repr=False)
    derived: tuple[tuple[str, str, str], ...] = ()
    load_only: bool = False

    @property
    def label(self) -> str:
        """`max-concurrency=64`, or "as given"."""
        return ", ".join(f"{plain(key)}={value}" for key, value in self.settings) or "as given"


def plain(key: str) -> str:
    """A setting's key without its side, in the flags' spelling."""
    side, dot, rest = key.partition(".")
    name = rest if dot and side in {"serve", "engine", "bench"} else key
    return name.strip().lstrip("-").replace("_", "-")


def parse_vary(texts: Sequence[str]) -> tuple[Dimension, ...]:
    """Read `KEY=V1,V2,…` settings.

    Raises:
        BadInput: no value, the same value or key twice, or nothing to vary at all.
    """
    if not texts:
        raise BadInput(FIELD, None, "nothing to vary; give e.g. --vary max-num-seqs=32,64,128")
    dimensions: list[Dimension] = []
    for text in texts:
        key, equals, listed = text.partition("=")
        if not equals or not key.strip():
            raise BadInput(FIELD, text, "must be KEY=VALUE,VALUE,…, e.g. max-num-seqs=32,64,128")
        values = tuple(value.strip() for value in listed.split(","))
        if not all(values):
            raise BadInput(FIELD, text, "has an empty value")
        if len(set(map(_read, values))) < len(values):
            raise BadInput(FIELD, text, "names the same value twice")
        if plain(key) in {d.name for d in dimensions}:
            raise BadInput(FIELD, text, f"{plain(key)} is varied twice; put all its values into one --vary")
        dimensions.append(Dimension(key.strip(), values))
    return tuple(dimensions)


def _read(value: str) -> str | float:
    """A value as it will be read: 5 and 5.0 are one."""
    try:
        return float(value)
    except ValueError:
        return value.lower()


def one_at_a_time(
    source: ScenarioSource, dimensions: Sequence[Dimension], *, scale_prompts: bool = True
) -> list[list[Variant]]:
    """For each dimension its variants, all other settings as they stand."""
    varied = {d.name for d in dimensions}
    scale = scale_prompts and PROMPTS not in varied
    return [[variant(source, ((d.key, value),), scale) for value in d.values] for d in dimensions]


def full_grid(
    source: ScenarioSource, dimensions: Sequence[Dimension], *, scale_prompts: bool = True
) -> list[Variant]:
    """Every combination, the last dimension fastest."""
    scale = scale_prompts and PROMPTS not in {d.name for d in dimensions}
    return [
        variant(source, tuple(zip((d.key for d in dimensions), values, strict=True)), scale)
        for values in product(*(d.values for d in dimensions))
    ]


def variant(
    source: ScenarioSource,
    settings: tuple[tuple[str, str], ...],
    scale_prompts: bool = True,
    field: str = FIELD,
) -> Variant:
    """The scenario with `settings` on top.

    A client's concurrency changes how many prompts reach a steady state, so prompts go with it (see
    `sim.workload.sweep_prompts`) unless `scale_prompts` is off.

    Raises:
        BadInput: a setting that neither engine nor client has; names `field`.
    """
    changed = source
    derived: list[tuple[str, str, str]] = []
    for key, value in settings:
        changed = _with(changed, key, value, field)
        spec, level = changed.bench.spec, changed.bench.spec.max_concurrency
        if plain(key) == CONCURRENCY and scale_prompts and level is not None:
            prompts = prompts_of(spec, level)
            if prompts != spec.num_prompts or isinstance(spec.dataset, RandomDataset):
                changed = changed.with_settings([f"bench.{PROMPTS}={prompts}"])
                derived.append((PROMPTS, str(prompts), f"goes with {CONCURRENCY}={value}"))
    if any(_splits(source, key) for key, _ in settings) and "gpu-count" not in map(plain, dict(settings)):
        if source.gpu_count is not None:
            derived.append(("gpu-count", "as many as it takes", "a replica's parallel sizes say"))
        changed = replace(changed, gpu_count=None)
    same_server = changed.serve == source.serve and all(plain(key) not in SOURCE_KEYS for key, _ in settings)
    return Variant(settings, changed, tuple(derived), same_server)


def _splits(source: ScenarioSource, key: str) -> bool:
    """Whether a setting says how many GPUs a replica has."""
    flag = serve_commands.table(source.serve.engine).find(f"--{plain(key)}")
    return flag is not None and flag.name in PARALLEL


def _with(source: ScenarioSource, key: str, value: str, field: str) -> ScenarioSource:
    name = plain(key)
    if name == "gpu":
        return replace(source, gpu=value)  # what was observed of another card, `build` leaves out
    if name == "model":
        return replace(source, model=value)
    if name == "seed":
        raise BadInput(field, name, "every point meets the same seeds; --seed and --seeds say which")
    if name == "engine-version":
        return replace(source, engine_version=value)
    if name in ("gpu-count", "kv-cache-tokens"):
        try:
            number = int(value)
        except ValueError:
            raise BadInput(f"{field} {name}", value, "must be a whole number") from None
        if number < 1:
            raise BadInput(f"{field} {name}", number, "must be at least 1")
        if name == "gpu-count":
            return replace(source, gpu_count=number)
        return replace(source, observed=Observed(kv_cache_tokens=number))
    flag = serve_commands.table(source.serve.engine).find(f"--{name}")
    if flag is not None and flag.secret:
        raise BadInput(field, name, "is a secret, and changes nothing that is predicted")
    try:
        return source.with_settings([f"{key}={value}"])
    except BadInput as error:
        where = field if error.field == "--set" else f"{field} {key}"
        raise BadInput(where, error.value, error.hint) from None


def build(variant: Variant, base: Scenario, seed: int) -> tuple[Scenario, str | None]:
    """The variant's scenario under one seed, and what became of an observed KV pool.

    A pool that was read off a start holds for that start's flags; see `sim.carry.carried`.

    Raises:
        BadInput: the engine or the client would refuse it.
    """
    scenario = replace(variant.source, seed=seed).build()
    observed = scenario.observed
    if observed == Observed() or any(plain(k) == "kv-cache-tokens" for k, _ in variant.settings):
        return scenario, None
    if variant.load_only or not variant.settings:
        return scenario, None
    moved = carried(base, scenario)
    if moved == observed:
        return scenario, None
    if moved == Observed():
        became = "and says nothing of this one; the memory account's estimate is used"
    else:
        became = f"and moves with the memory account, from {_size(observed)} to {_size(moved)}"
    return replace(
        scenario, observed=moved
    ), f"{variant.label}: the KV pool was logged for other flags, {became}"


def _size(observed: Observed) -> str:
    if observed.num_gpu_blocks is not None:
        return f"{observed.num_gpu_blocks:,} blocks"
    return f"{observed.kv_cache_tokens:,} tokens"


def locked(source: ScenarioSource, dimensions: Sequence[Dimension]) -> Mapping[str, str]:
    """What each varied setting is in the scenario as it stands, for saying what the others are kept at."""
    scenario = source.build()
    held: dict[str, str] = {}
    for dimension in dimensions:
        word = dimension.name.replace("-", "_")
        spec = scenario.workload
        if word in scenario.engine.values:
            held[dimension.name] = str(scenario.engine[word])
        elif hasattr(spec, word):
            held[dimension.name] = str(getattr(spec, word))
        elif word == "gpu":
            held[dimension.name] = scenario.gpu.name
        else:
            held[dimension.name] = "as given"
    return held
