"""`servecast audit`: may these reports be compared, and believed?"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import click

from bench.audit.finding import Finding, exit_status, in_order, verdict
from sim.errors import BadInput


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--kv-cache-tokens", metavar="N", help="KV cache that the engine logged, of all replicas.")
@click.option("--serve", metavar="COMMAND", help="Launch command; with --gpu the runs are simulated too.")
@click.option("--gpu", metavar="NAME|FILE", help="GPU (see `servecast gpus`).")
@click.option("--engine-version", metavar="VERSION", help="Version whose rules apply.")
@click.option("--strict", is_flag=True, help="Exit status 1 where the verdict is `comparable with care`.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def audit(
    files: tuple[str, ...],
    kv_cache_tokens: str | None,
    serve: str | None,
    gpu: str | None,
    engine_version: str | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Audit FILES: result JSON, pasted reports, start-up logs, /metrics dumps (in pairs: before, after).

    \b
    servecast audit c1.txt c128.txt --kv-cache-tokens 194896
    servecast audit result.json startup.log metrics_before.txt metrics_after.txt

    Every finding comes with its evidence, the size of its effect, and what to run instead. Exit status 3: not
    comparable; 1, with --strict: comparable with care.
    """
    from bench.audit.audit import audit as find
    from bench.audit.combine import combine
    from bench.audit.reading import read_material
    from bench.audit.text import document, render

    pool = _whole("--kv-cache-tokens", kv_cache_tokens)
    _check_launch(serve, gpu, engine_version)
    _check_once(files)
    runs = combine([read_material(path) for path in files])
    if pool is not None:
        runs = tuple(run.with_(kv_given=pool) for run in runs)
    unsimulated: list[Finding] = []
    if serve is not None and gpu is not None:
        from bench.audit.simulation import Launch, simulate_all
        from sim.cli.options import read_text

        launch = Launch(read_text(serve, "--serve"), gpu, engine_version)
        runs, unsimulated = simulate_all(runs, launch)
    findings = in_order([*find(runs), *unsimulated])
    name = verdict(findings)
    status = exit_status(name, strict=strict)
    if as_json:
        click.echo(json.dumps(document(runs, findings, name, status), indent=2))
    else:
        click.echo(render(runs, findings, name))
    if status:
        raise click.exceptions.Exit(status)


def _check_launch(serve: str | None, gpu: str | None, version: str | None) -> None:
    """Refuse half of what a simulation needs.

    Raises:
        BadInput: --serve without --gpu, or one of the others without --serve.
    """
    if serve is not None and gpu is None:
        raise BadInput("--gpu", None, "name the GPU, so that the runs can be simulated")
    for flag, value in (("--gpu", gpu), ("--engine-version", version)):
        if serve is None and value is not None:
            raise BadInput(flag, value, "is for simulating the runs: add --serve, or leave it out")


def _check_once(files: Sequence[str]) -> None:
    """Refuse a report that would be compared with itself.

    Raises:
        BadInput: a file is given twice, under whatever path.
    """
    real = [os.path.realpath(path) for path in files]
    for path, place in zip(files, real, strict=True):
        if real.count(place) > 1:
            raise BadInput("FILE", path, "is given twice; give each report once")


def _whole(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.replace(",", "").replace("_", "")
    if not digits.isdecimal() or int(digits) < 1:
        raise BadInput(flag, text, "must be a whole number of at least 1")
    return int(digits)


__all__: Sequence[str] = ("audit",)
