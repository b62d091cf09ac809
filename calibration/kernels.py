"""Measured kernel latencies as a prior: the operator tables of AIConfigurator, at a model's own shapes.

The package `aiconfigurator-core` (Apache-2.0; extra `[kernels]`) brings parquet tables of single operators,
timed on an otherwise idle card. They are read by column name; its Python interface is not used. An engine's
steps are slower than the sum of their kernels (launch gaps, clocks under load), so this is a prior and no
calibration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibration.parameters import Prior, default_prior
from sim.errors import BadInput
from sim.models.model import ModelConfig
from sim.provenance import Origin
from sim.scenario import Scenario
from sim.steptime.cost import model_cost
from sim.steptime.efficiencies import Efficiencies
from sim.steptime.roofline import Peaks
from sim.steptime.scale import clipped

Floats = NDArray[np.float64]
Row = Mapping[str, Any]

PACKAGE = "aiconfigurator_core"
SYSTEMS = {
    "H100-SXM-80GB": "h100_sxm",
    "H100-PCIe-80GB": "h100_pcie",
    "H200-SXM-141GB": "h200_sxm",
    "A100-SXM-80GB": "a100_sxm",
    "A100-PCIe-80GB": "a100_pcie",
    "L40S": "l40s",
    "B200-SXM-180GB": "b200_sxm",
    "RTX-PRO-6000-Server": "rtx_pro_6000_server",
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
TILE = 256  # where the tables time both a multiple and one token more
FIRST_TOKENS, LAST_TOKENS = 8, 4096
LONG = 2048  # tokens from which on attention kernels are past their fixed cost
# A kernel's standalone rate against what an engine gets of it: standard deviations on the fitted scale.
DEVIATIONS = {
    "weight_bandwidth": 0.08,
    "gemm_flops": 0.15,
    "kv_bandwidth": 0.2,
    "attention_flops": 0.25,
    "ridge": 0.1,
    "layer_overhead": 6e-6,
}


def installed() -> bool:
    """Whether the tables and a reader for them are there."""
    return find_spec(PACKAGE) is not None and find_spec("pyarrow") is not None


def kernel_prior(scenario: Scenario, without: Sequence[str] = ()) -> Prior:
    """The shipped prior with what the kernel tables say of this GPU and this model's shapes.

    Raises:
        BadInput: the extra is not installed, has no table for this GPU, engine or dtype, or the model has
            routed experts, whose tables are not read.
    """
    if not installed():
        hint = "are not installed; in servecast's folder: pip install '.[kernels]'"
        raise BadInput("kernel tables", None, hint)
    model, ranks = scenario.model, int(scenario.engine["tensor_parallel_size"])
    system = SYSTEMS.get(scenario.gpu.name)
    dtype = DTYPES.get(model.dtype)
    if system is None or model.moe is not None or model.quant is not None or dtype is None:
        raise BadInput("kernel tables", scenario.gpu.name, f"cover no {model.name} here")
    spec = find_spec(PACKAGE)
    folder = Path(str(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""))
    place = folder / "systems" / "data" / system
    engine = scenario.engine.name
    found = _gemms(_read(place / "gemm" / engine, "gemm_perf", "gemm_dtype", dtype), scenario, ranks)
    found |= _attention(place / "attention" / engine, model, ranks, dtype, scenario)
    prior = default_prior(scenario.gpu, without)
    values = {name: clipped(name, value) for name, value in found.items()}
    source = f"AIConfigurator operator tables ({system}, {engine}) at the shapes of {model.name}"
    return Prior(
        replace(prior.efficiencies, tile=float(TILE), **values),
        {**prior.deviations, **{name: DEVIATIONS[name] for name in values}},
        {**prior.sources, **dict.fromkeys(values, source)},
    )


def best_prior(scenario: Scenario) -> Prior:
    """The shipped prior; what it only assumes is taken from the kernel tables where those know it."""
    shipped = default_prior(scenario.gpu)
    if not installed():
        return shipped
    try:
        tables = kernel_prior(scenario)
    except BadInput:  # no table for this card, engine, dtype or kind of model
        return shipped
    taken = [
        name
        for name in DEVIATIONS
        if shipped.sources[name].startswith(Origin.ASSUMED) and tables.sources[name] != shipped.sources[name]
    ]
    values = {name: getattr(tables.efficiencies, name) for name in taken}
    if "gemm_flops" in taken:
        values["tile"] = tables.efficiencies.tile
    return Prior(
        replace(shipped.efficiencies, **values),
        {**shipped.deviations, **{name: tables.deviations[name] for name in taken}},
        {**shipped.sources, **{name: tables.sources[name] for name in taken}},
    )


def _read(folder: Path, stem: str, dtype_column: str, dtype: str) -> list[dict[str, Any]]:
    """The rows of the newest version's table for one dtype."""
    versions = sorted((path for path in folder.glob(f"*/{stem}.parquet")), key=_version)
    if not versions:
        raise BadInput("kernel tables", str(folder.name), f"have no {stem} here")
    table = import_module("pyarrow.parquet").read_table(versions[-1])
    rows: list[dict[str, Any]] = [row for row in table.to_pylist() if row.get(dtype_column) == dtype]
    if not rows:
        raise BadInput("kernel tables", dtype, f"are not in {stem}")
    return rows


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.parent.name.split(".") if part.isdigit())


def gemm_shapes(model: ModelConfig, ranks: int) -> list[tuple[float, float]]:
    """(n, k) of the GEMMs of one layer on one rank."""
    heads = model.num_attention_heads // ranks
    kv_heads = max(1, model.num_key_value_heads // ranks)
    width = (heads + 2 * kv_heads) * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size / ranks
    return [(width, hidden), (hidden, heads * model.head_dim), (2 * inner, hidden), (hidden, inner)]


def _gemms(rows: Sequence[Row], scenario: Scenario, ranks: int) -> dict[str, float]:
    """Rates and ridge under which the roofline's GEMM term meets the tables."""
    cost = model_cost(scenario.model, ranks, scenario.engine["kv_cache_dtype"])
    peaks = Peaks.of(scenario.gpu, cost)
    table: dict[tuple[int, int], dict[int, float]] = {}
    for row in rows:
        table.setdefault((int(row["n"]), int(row["k"])), {})[int(row["m"])] = float(row["latency"]) / 1e3
    sizes = {m for by_m in table.values() for m in by_m if FIRST_TOKENS <= m <= LAST_TOKENS}
    # Whole tiles only: the height of the steps between them is the engine's affair, and is left to a fit.
    tokens = sorted(m for m in sizes if m <= TILE or m % TILE == 0)
    layers = scenario.model.num_layers
    shapes = gemm_shapes(scenario.model, ranks)
    measured = np.array([layers * sum(_latency(table, n, k, m) for n, k in shapes) for m in tokens])
    padded = np.array(tokens, dtype=np.float64)

    def misses(x: Floats) -> Floats:
        weights = cost.dense_bytes / (peaks.bandwidth * np.exp(x[0]))
        compute = padded * cost.dense_flops_per_token / (peaks.gemm_flops * np.exp(x[1]))
        power = 1.0 / max(x[2], 1e-3)
        both = np.maximum(weights, compute)
        total = both * (1.0 + (np.minimum(weights, compute) / both) ** power) ** (1.0 / power)
        known = ~np.isnan(measured)
        found: Floats = np.log(total[known] / measured[known])
        return found

    bounds = ([np.log(0.2), np.log(0.1), 0.02, 0.0], [0.0, 0.0, 1.0, 1.0])
    x = least_squares(
        misses, [np.log(0.8), np.log(0.7), 0.4, 0.7], bounds=bounds, loss="soft_l1", f_scale=0.05
    ).x
    return {
        "weight_bandwidth": float(np.exp(x[0])),
        "gemm_flops": float(np.exp(x[1])),
        "ridge": float(1.0 / x[2]),
    }


def _latency(table: Mapping[tuple[int, int], Mapping[int, float]], n: float, k: float, m: int) -> float:
    """Latency between the tabled sizes, linear in n and k [s]; NaN where the table has no such m."""
    widths, depths = sorted({key[0] for key in table}), sorted({key[1] for key in table})
    (n0, n1, fn), (k0, k1, fk) = _between(widths, n), _between(depths, k)

    def at(a: int, b: int) -> float:
        return table.get((a, b), {}).get(m, float("nan"))

    low = at(n0, k0) + (at(n1, k0) - at(n0, k0)) * fn if fn else at(n0, k0)
    high = at(n0, k1) + (at(n1, k1) - at(n0, k1)) * fn if fn else at(n0, k1)
    return low + (high - low) * fk if fk else low


def _between(sizes: Sequence[int], value: float) -> tuple[int, int, float]:
    at = min(max(bisect_left(sizes, value), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    if value in (low, high):
        return int(value), int(value), 0.0
    return low, high, (value - low) / (high - low)


def _attention(
    folder: Path, model: ModelConfig, ranks: int, dtype: str, scenario: Scenario
) -> dict[str, float]:
    """Decode and prefill attention: bytes and FLOP per second past the fixed cost, and that cost."""
    heads = model.num_attention_heads // ranks
    kv_heads = max(1, model.num_key_value_heads // ranks)
    per_token = kv_heads * (model.head_dim + model.v_head_dim) * 2.0

    def fits(row: Row) -> bool:
        shape = (row["num_key_value_heads"], row["head_dim"], row["window_size"])
        return shape == (kv_heads, model.head_dim, 0) and row["kv_cache_dtype"] == dtype

    decode = _nearest(_read(folder, "generation_attention_perf", "attn_dtype", dtype), heads, fits)
    seconds = np.array([row["latency"] / 1e3 for row in decode])
    read = np.array([row["batch_size"] * (row["isl"] + row["step"]) * per_token for row in decode])
    floor = float(seconds.min())
    large = (read > 50 * per_token * LONG) & (seconds > 3 * floor)
    found = {"layer_overhead": floor}
    if large.any():
        rate = float(np.median(read[large] / (seconds[large] - floor)))
        found["kv_bandwidth"] = rate / scenario.gpu.memory_bandwidth
    prefill = _nearest(_read(folder, "context_attention_perf", "attn_dtype", dtype), heads, fits)
    rates = [
        row["batch_size"] * 2.0 * heads * (model.head_dim + model.v_head_dim) * pairs / (row["latency"] / 1e3)
        for row in prefill
        if row["step"] == 0 and LONG / 2 <= row["isl"] <= 4 * LONG
        for pairs in [row["isl"] * (row["isl"] + 1) / 2.0 * row["num_heads"] / heads]
    ]
    if rates:
        found["attention_flops"] = float(np.median(rates)) / scenario.gpu.dense_flops[model.dtype]
    return found


def _nearest(rows: Sequence[dict[str, Any]], heads: int, fits: Callable[[Row], bool]) -> list[dict[str, Any]]:
    """The fitting rows whose number of heads is nearest."""
    matching = [row for row in rows if fits(row)]
    if not matching:
        raise BadInput("kernel tables", None, "have no attention of this shape")
    best = min({row["num_heads"] for row in matching}, key=lambda count: abs(count - heads))
    return [row for row in matching if row["num_heads"] == best]


def describe(efficiencies: Efficiencies) -> str:
    """The coefficients that the tables give, in one line."""
    return ", ".join(f"{name} {getattr(efficiencies, name):.3g}" for name in DEVIATIONS)
