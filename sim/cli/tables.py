"""`servecast models` and `servecast gpus`: the shipped tables."""

from __future__ import annotations

import json

import click

from sim.hardware.gpus import gpu_rows
from sim.models.table import load_model, model_names
from sim.models.weights import (
    active_parameters,
    count_parameters,
    kv_bytes_per_token,
    weight_bytes,
    with_quantization,
)

GIB = 2**30


@click.command()
@click.argument("pattern", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def models(pattern: str | None, as_json: bool) -> None:
    """List the models whose configuration is shipped; PATTERN picks names that contain it.

    Any other model: pass `--model` (or the serve command) a folder or file with its config.json, or install
    the extra `hf` to fetch it by name.
    """
    wanted = (pattern or "").lower()
    rows = []
    for name in model_names():
        if wanted not in name.lower():
            continue
        model = load_model(name)
        rows.append(
            {
                "name": name,
                "parameters": count_parameters(model).total,
                "active_parameters": active_parameters(model),
                "weight_bytes": weight_bytes(model),
                "quantization": model.quant.method if model.quant else None,
                "kv_bytes_per_token": kv_bytes_per_token(with_quantization(model, None)),
                "max_position_embeddings": model.max_position_embeddings,
                "source": model.source,
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo(f"{'model':<54}{'params':>9}{'active':>9}{'weights':>12}{'KV/token':>11}{'length':>11}  quant")
    for row in rows:
        click.echo(
            f"{row['name']:<54}{_billions(row['parameters']):>9}{_billions(row['active_parameters']):>9}"
            f"{float(str(row['weight_bytes'])) / GIB:>8.1f} GiB{row['kv_bytes_per_token']:>9} B"
            f"{row['max_position_embeddings']:>11}  {row['quantization'] or ''}"
        )
    if not rows:
        click.echo(f"no shipped model has {pattern!r} in its name", err=True)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def gpus(as_json: bool) -> None:
    """List the GPUs and their figures, with sources.

    A GPU that is not listed: pass `--gpu FILE`, a YAML file with memory_gib, bandwidth (GB/s) and tflops by
    dtype (dense), and optionally compute_capability, link (GB/s, one direction), device_name and source.
    """
    rows = gpu_rows()
    if as_json:
        click.echo(
            json.dumps(
                [
                    {
                        "name": gpu.name,
                        "memory_bytes": gpu.memory_bytes,
                        "memory_bandwidth": gpu.memory_bandwidth,
                        "dense_flops": dict(gpu.dense_flops),
                        "compute_capability": gpu.compute_capability,
                        "link_bandwidth": gpu.link_bandwidth,
                        "source": gpu.source,
                        "assumed": dict(gpu.assumed),
                    }
                    for gpu in rows
                ],
                indent=2,
            )
        )
        return
    click.echo(f"{'GPU':<22}{'GiB':>8}{'GB/s':>7}{'16-bit':>8}{'fp8':>8}{'fp4':>8}{'link':>6}  source")
    for gpu in rows:
        sixteen = gpu.dense_flops.get("bf16", gpu.dense_flops.get("fp16"))
        cells = "".join(
            f"{_tera(value):>8}"
            for value in (sixteen, gpu.dense_flops.get("fp8"), gpu.dense_flops.get("fp4"))
        )
        assumed = f"; assumed: {', '.join(gpu.assumed)}" if gpu.assumed else ""
        click.echo(
            f"{gpu.name:<22}{gpu.memory_bytes / GIB:>8.2f}{gpu.memory_bandwidth / 1e9:>7.0f}{cells}"
            f"{gpu.link_bandwidth / 1e9:>6.0f}  {gpu.source}{assumed}"
        )
    click.echo("memory as CUDA reports it; TFLOP/s dense; link: one direction, GB/s", err=True)


def _billions(count: object) -> str:
    return f"{int(str(count)) / 1e9:.2f} B"


def _tera(flops: float | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:g}"
