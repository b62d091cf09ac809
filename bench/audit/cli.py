"""`servecast audit`: may these reports be compared, and believed?"""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from bench.audit.facts import Run
from sim.errors import BadInput, ServecastError


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--kv-cache-tokens", metavar="N", help="KV cache size that the engine logged [tokens].")
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
    from bench.audit.finding import exit_status, verdict
    from bench.audit.reading import read_material
    from bench.audit.text import document, render

    pool = _whole("--kv-cache-tokens", kv_cache_tokens)
    if serve is not None and gpu is None:
        raise BadInput("--gpu", None, "name the GPU, so that the runs can be simulated")
    for path in files:
        if files.count(path) > 1:
            raise BadInput("FILE", path, "is given twice; give each report once")
    runs = combine([read_material(path) for path in files])
    if pool is not None:
        runs = tuple(run.with_(kv_given=pool) for run in runs)
    if serve is not None:
        runs = tuple(_simulated(run, serve, gpu, engine_version) for run in runs)
    findings = find(runs)
    name = verdict(findings)
    status = exit_status(name, strict=strict)
    if as_json:
        click.echo(json.dumps(document(runs, findings, name, status), indent=2))
    else:
        click.echo(render(runs, findings, name))
    if status:
        raise click.exceptions.Exit(status)


def _simulated(run: Run, serve: str, gpu: str | None, version: str | None) -> Run:
    """The run beside its simulation, where the report tells the load."""
    from sim.build import read_source
    from sim.cli.options import read_text
    from sim.explain.outcome import evaluate

    length, out, sent = run.mean_tokens("input"), run.mean_tokens("output"), run.num_prompts
    if length is None or out is None or sent is None:
        return run
    words = ["vllm bench serve --dataset-name random", f"--random-input-len {round(length)}"]
    words += [f"--random-output-len {round(out)}", f"--num-prompts {sent}"]
    if run.concurrency is not None:
        words.append(f"--max-concurrency {run.concurrency}")
    if run.rate is not None:
        words.append(f"--request-rate {run.rate}")
    try:
        source = read_source(
            serve=read_text(serve, "--serve"),
            bench=" ".join(words),
            gpu=gpu,
            engine_version=version,
            kv_cache_tokens=run.kv_tokens,
        )
        return run.with_(simulated=evaluate(source.build()))
    except BadInput:
        raise
    except ServecastError:
        return run


def _whole(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.replace(",", "").replace("_", "")
    if not digits.isdigit() or int(digits) < 1:
        raise BadInput(flag, text, "must be a whole number of at least 1")
    return int(digits)


__all__: Sequence[str] = ("audit",)
