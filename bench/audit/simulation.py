"""Runs of an audit simulated beside their reports, where those tell the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.audit.facts import Run
from bench.audit.finding import Finding
from sim.build import ScenarioSource, read_source
from sim.errors import BadInput, EngineStuck, ServecastError
from sim.explain.outcome import evaluate

# A load that every engine takes: with it only the launch itself can be at fault.
_LEAST = "vllm bench serve --dataset-name random --random-input-len 1 --random-output-len 1 --num-prompts 1"
_LENGTHS = ("--random-input-len", "--random-output-len")
_KEEP = "keep the whole report or the JSON"
_CHECK = "check that --serve is the command that the run was started with"


@dataclass(frozen=True, slots=True)
class Launch:
    """How the runs' server was started: the command's text, the GPU, the version whose rules apply."""

    serve: str
    gpu: str
    version: str | None = None

    def source(self, bench: str, pool: int | None = None) -> ScenarioSource:
        """The scenario of a load on this server, whose logged KV pool is `pool` [tokens].

        Raises:
            BadInput: the command, the GPU or the version cannot be used.
        """
        return read_source(
            serve=self.serve, bench=bench, gpu=self.gpu, engine_version=self.version, kv_cache_tokens=pool
        )


def simulate_all(runs: Sequence[Run], launch: Launch) -> tuple[tuple[Run, ...], list[Finding]]:
    """The runs, simulated as far as their reports allow, and a finding for each that was not.

    Raises:
        BadInput: the launch cannot be used, whatever the load.
    """
    launch.source(_LEAST).build()
    told = []
    findings = []
    for run in runs:
        unknown = _unknown(run)
        try:
            if unknown:
                findings.append(_not_simulated(run, f"the report does not tell {', '.join(unknown)}", _KEEP))
            else:
                # A simulated engine is one replica, with a pool of its own.
                source = launch.source(_bench(run), min(run.kv_pools, default=None))
                run = run.with_(simulated=evaluate(source.build()))
        except EngineStuck as error:
            findings.append(_stuck(run, str(error)))
        except BadInput as error:
            if error.field not in _LENGTHS:
                raise
            findings.append(_not_simulated(run, f"this launch refuses its requests: {error}", _CHECK))
        except ServecastError as error:
            findings.append(_not_simulated(run, str(error), _CHECK))
        told.append(run)
    return tuple(told), findings


def _unknown(run: Run) -> list[str]:
    """What must be known of a load for its simulation, and is not."""
    needed = {
        "prompt length": run.mean_tokens("input"),
        "output length": run.mean_tokens("output"),
        "number of requests": run.num_prompts,
        # A client that names neither may have sent all at once, or not.
        "rate or concurrency": run.concurrency or run.settings.get("request_rate"),
    }
    return [name for name, value in needed.items() if value is None]


def _bench(run: Run) -> str:
    """The load as a command of the client, its lengths as their means."""
    length, out = run.mean_tokens("input") or 0.0, run.mean_tokens("output") or 0.0
    words = ["vllm bench serve --dataset-name random", f"--random-input-len {max(1, round(length))}"]
    words += [f"--random-output-len {max(1, round(out))}", f"--num-prompts {run.num_prompts}"]
    if run.concurrency is not None:
        words.append(f"--max-concurrency {run.concurrency}")
    if run.rate is not None:
        words.append(f"--request-rate {run.rate}")
    return " ".join(words)


def _not_simulated(run: Run, why: str, instead: str) -> Finding:
    return Finding("capacity", "unknown", "not simulated", f"{run.label}: {why}", "", instead, (run.name,))


def _stuck(run: Run, why: str) -> Finding:
    return Finding(
        "capacity",
        "care",
        "the simulated engine gets stuck under this load",
        f"{run.label}: {why}",
        "a run that ended was of another launch than --serve, or not all of it was answered",
        _CHECK,
        (run.name,),
    )
