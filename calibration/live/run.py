"""`./dev validate`: a real vLLM on this machine's CPU, calibrated for minutes, then held to its predictions.

    python -m calibration.live --program "…/bin/vllm" --model DIR --out DIR [--quick] [--repeats N]

Everything goes through the bench, as a user's own calibration would.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.launch import LaunchOptions, split_program
from bench.live_table import LiveTable
from bench.run import BenchOptions, run_engine
from bench.serial import subjects_of
from bench.session import Subject
from bench.sweep import Point
from calibration.candidates import capacity
from calibration.design import Plan, PlannedRun, design
from calibration.live.cores import leave_workers_alone, own_cores_back
from calibration.live.plan import (
    CALIBRATION_SECONDS,
    MIXED,
    Load,
    Setting,
    first_pass_seconds,
    in_turn,
    loads,
    next_prior,
    serve_command,
    settings,
)
from calibration.live.report import Outcome, SettingOutcome, judge_setting, report_json, report_text
from calibration.parameters import Prior, default_prior
from calibration.result import FitResult
from calibration.session import Calibration, Director, calibrate, gathered, steps_file, steps_within
from sim.build import ScenarioSource, read_source
from sim.errors import ServecastError
from sim.interrupts import as_keyboard_interrupt
from sim.results import BenchResult
from sim.results_io.atomic import write_text
from sim.results_io.writing import plain
from sim.scenario import Scenario
from sim.simulate import roofline, simulate
from sim.workload.spec import WorkloadSpec

ENGINE_VERSION = "0.28.0"
# The engine alone on the host's cores: no download, no telemetry, no compiler in the first request.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class Validation:
    """How to validate.

    Attributes:
        program: words that start vLLM.
        model: the model's folder, without weights.
        out: where results go.
        repeats: of every load.
        only: names of settings; none: all.
        resume: keep what an earlier run has finished.
    """

    program: tuple[str, ...]
    model: Path
    out: Path
    repeats: int = 3
    only: tuple[str, ...] = ()
    quick: bool = False
    resume: bool = False


class SettingRun:
    """One setting: calibrates while the engine is up, then sends what is to be predicted.

    A shared host's speed changes within seconds. So what the calibration measured is measured again between
    the loads, and the fit sees the host that they see.
    """

    def __init__(
        self, setting: Setting, subject: Subject, plan: Plan, prior: Prior, how: Validation, seconds: float
    ) -> None:
        """`plan` is for the first pass of a calibration that may take `seconds` in all."""
        self.setting = setting
        self.subject = subject
        self.loads: list[Load] = []
        self.sent: list[str] = []
        self.cores: set[int] = set()
        self._prior = prior
        self._how = how
        self._seconds = seconds
        self.director = Director(subject.scenario, plan, prior, steps_file(subject, self.options()))
        self._waiting: list[Load | PlannedRun] | None = None

    def options(self) -> BenchOptions:
        """How the bench runs this setting: vLLM as a process, with the step probe."""
        launch = LaunchOptions(kind="process", program=self._how.program, env=ENVIRONMENT, probe=True)
        return BenchOptions(launch, self._how.out / self.setting.name, resume=self._how.resume)

    def more(self, results: Mapping[str, BenchResult]) -> list[Point]:
        """The calibration's runs, one by one; a fit; then loads and calibration in turn."""
        if not self.cores:  # the engine is up from the second call on
            self.cores = leave_workers_alone()
        points = self._next(results)
        self.sent += [point.label for point in points]
        return points

    def _next(self, results: Mapping[str, BenchResult]) -> list[Point]:
        if self._waiting is None:
            if points := self.director.more(results):
                return points
            self._waiting = self._fit_and_plan(results)
        if not self._waiting:
            return []
        run = self._waiting.pop(0)
        if isinstance(run, Load):
            self.loads.append(run)
            return [Point(run.name, run.spec)]
        self.director.sent.append(run)
        return [Point(run.label, run.spec)]

    def _fit_and_plan(self, results: Mapping[str, BenchResult]) -> list[Load | PlannedRun]:
        calibration = self._calibrated(results)
        scenario, fitted = calibration.measured.scenario, calibration.fit
        found = loads(
            self.setting,
            _capacity(scenario, fitted),
            _capacity(replace(scenario, workload=replace(scenario.workload, dataset=MIXED)), fitted),
            self._how.repeats,
            quick=self._how.quick,
        )
        done = [
            replace(r, seconds=results[r.label].duration) for r in self.director.sent if r.label in results
        ]
        model = replace(roofline(scenario), efficiencies=fitted.efficiencies)

        def price(spec: WorkloadSpec) -> float:
            cold = replace(scenario, workload=replace(spec, num_warmups=0), seed=spec.seed)
            return simulate(cold, step_time=model).result.duration

        return in_turn(done, found, self._seconds - sum(run.seconds for run in done), price)

    def _calibrated(self, results: Mapping[str, BenchResult]) -> Calibration:
        in_order = [results[run.label] for run in self.director.sent if run.label in results]
        return calibrate(gathered(self.subject, self.director, in_order, self.options()), self._prior)

    def outcome(self, results: Mapping[str, BenchResult]) -> tuple[SettingOutcome, FitResult]:
        """What was predicted, beside what was measured, and the fit that predicted it.

        Raises:
            ServecastError: not all was measured, or a run was INVALID.
        """
        name = self.setting.name
        if self._waiting is None:
            raise ServecastError(f"{name}: the calibration did not come to its end")
        lost = [load.name for load in self.loads if load.name not in results]
        if self._waiting or lost:
            raise ServecastError(f"{name}: the engine ended before all loads were sent; --resume goes on")
        invalid = [load.name for load in self.loads if results[load.name].verdict.status == "INVALID"]
        if invalid:
            raise ServecastError(f"{name}: {invalid[0]} is INVALID: nothing can be said of it")
        calibration = self._calibrated(results)
        measured = calibration.measured
        pairs = []
        spans = []
        for load in self.loads:
            result = results[load.name]
            pairs.append((load, predicted(measured.scenario, load, calibration.fit), result))
            begun = result.extra.get("probe", {}).get("begun_s")
            if begun is not None:
                spans.append((float(begun), float(begun) + result.duration))
        steps = None
        if measured.steps is not None and spans:
            steps = steps_within(measured.steps, measured.scenario, spans)
        judged = judge_setting(self.setting.name, calibration, pairs, steps, spans)
        return judged, calibration.fit


def predicted(scenario: Scenario, load: Load, fitted: FitResult) -> BenchResult:
    """The prediction of a load by a fit."""
    # The bench warms up with prompts of its own, which leave nothing in the prefix cache to be found.
    under = replace(scenario, workload=replace(load.spec, num_warmups=0), seed=load.spec.seed)
    return simulate(under, step_time=replace(roofline(under), efficiencies=fitted.efficiencies)).result


def _capacity(scenario: Scenario, fitted: FitResult) -> float:
    rate = capacity(scenario, replace(roofline(scenario), efficiencies=fitted.efficiencies))
    if rate is None:
        raise ServecastError("the capacity cannot be told from a simulation")
    return rate


def source_of(setting: Setting, model: Path) -> ScenarioSource:
    """The scenario of a setting."""
    dataset = setting.dataset
    bench = (
        f"vllm bench serve --dataset-name random --random-input-len {dataset.input_len} "
        f"--random-output-len {dataset.output_len} --random-range-ratio {dataset.range_ratio} "
        f"--random-prefix-len {dataset.prefix_len} --request-rate 1 --num-prompts 100 --ignore-eos"
    )
    source = read_source(
        serve=serve_command(str(model), setting), bench=bench, gpu="cpu", engine_version=ENGINE_VERSION
    )
    return replace(source, name=setting.name)


def validate(how: Validation) -> Outcome:
    """Run all settings, one engine after the other.

    Raises:
        ServecastError: an engine did not start, or a run was INVALID.
    """
    outcomes = []
    before: FitResult | None = None
    for setting in settings(how.quick):
        if how.only and setting.name not in how.only:
            continue
        source = source_of(setting, how.model)
        (subject,) = subjects_of([source])
        prior = default_prior(subject.scenario.gpu) if before is None else next_prior(before)
        seconds = setting.share * CALIBRATION_SECONDS
        plan = design(subject.scenario, budget=first_pass_seconds(seconds), prior=prior)
        run = SettingRun(setting, subject, plan, prior, how, seconds)
        with own_cores_back(), LiveTable() as reporter:
            found = run_engine(subject, (), run.options(), None, reporter, more=run.more)
        judged, before = run.outcome(dict(zip(run.sent, found, strict=False)))
        outcomes.append(judged)
        print(report_text(Outcome((judged,))), flush=True)
    return Outcome(tuple(outcomes))


def main(words: Sequence[str] | None = None) -> int:
    """Validate, print the table, write `validation.json`; status 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m calibration.live", description=__doc__)
    parser.add_argument("--program", required=True, help="words that start vLLM")
    parser.add_argument("--model", required=True, type=Path, help="folder of a model without weights")
    parser.add_argument("--out", type=Path, default=Path("out/validation-cpu"), help="where results go")
    parser.add_argument("--repeats", type=int, default=3, help="of every load")
    names = [setting.name for setting in settings()]
    parser.add_argument("--only", action="append", default=[], choices=names, help="one setting; repeatable")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter loads")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run has finished")
    given = parser.parse_args(words)
    if given.repeats < 1:
        parser.error(f"--repeats: {given.repeats}: must be at least 1")
    how = Validation(
        split_program(given.program),
        given.model,
        given.out,
        given.repeats,
        tuple(given.only),
        given.quick,
        given.resume,
    )
    try:
        with as_keyboard_interrupt():
            outcome = validate(how)
    except ServecastError as error:
        print(f"servecast: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"interrupted; --resume goes on from what is in {given.out}", file=sys.stderr)
        return 130
    print(report_text(outcome))
    text = json.dumps(plain(report_json(outcome)), indent=1, allow_nan=False) + "\n"
    write_text(given.out / "validation.json", text, "--out")
    return 0 if outcome.passed else 1
