"""Profiles: what is read and refused, what carries over, how far a prediction may go beyond."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import cli
from calibration.fit import fit
from calibration.profile_writing import Facts, profile_content
from calibration.validate.truth import STEP_COEFFICIENTS, measured_steps, prior, truth_near
from calibration.validate.truth import scenario as truth_scenario
from sim.build import build_scenario
from sim.errors import BadInput
from sim.forecast import forecast
from sim.profile import Profile, load_profile, write_profile
from sim.results import BenchResult
from sim.results_io.files import read_result
from sim.scenario import Scenario

SERVE = "vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 64 --max-num-batched-tokens 4096"
BENCH = "vllm bench serve --dataset-name random --random-input-len 256 --random-output-len 16 "
BENCH += "--num-prompts 12 --request-rate 2"


def asked(
    serve: str = SERVE, gpu: str = "L40S", version: str = "0.28.0", count: int | None = None
) -> Scenario:
    return build_scenario(
        serve=serve, bench=BENCH, gpu=gpu, gpu_count=count, engine_version=version, kv_cache_tokens=200_000
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    evidence = measured_steps(truth_near(prior(), STEP_COEFFICIENTS, 0), 0)
    found = fit([evidence], prior(), STEP_COEFFICIENTS)
    path = tmp_path_factory.mktemp("profile") / "l40s.json"
    facts = Facts(date="2026-01-01", driver="570.1", image_digest="sha256:aa")
    write_profile(profile_content(found, truth_scenario(), [evidence], facts=facts), path)
    return path


def changed(written: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads(written.read_text())
    change(content)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(content))
    return path


def test_a_profile_survives_its_file(written: Path, tmp_path: Path) -> None:
    profile = load_profile(written)
    again = tmp_path / "again.json"
    write_profile(profile.content, again)
    assert again.read_text() == written.read_text()
    assert profile.content.subject.driver == "570.1"
    assert profile.content.evidence[0].points == 200
    assert profile.content.validity.decodes_per_step == 59
    for name in STEP_COEFFICIENTS:
        coefficient = profile.content.coefficients[name]
        assert coefficient.low is not None
        assert coefficient.high is not None
        assert coefficient.low <= coefficient.value <= coefficient.high


def correlate(matrix: list[list[float]], value: float) -> None:
    """More than the variances of the first two coefficients allow."""
    matrix[0][1] = matrix[1][0] = value


REFUSED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(format=2), "has format 2; this version reads format 1: calibrate again"),
    (lambda c: c.update(format="1"), "has format 1"),
    (lambda c: c.update(kind="something"), "is no calibration profile"),
    (lambda c: c.update(mood="fine"), "mood"),
    (lambda c: c.pop("covariance"), "covariance"),
    (lambda c: c["coefficients"].pop("gemm_flops"), "lack gemm_flops"),
    (lambda c: c["coefficients"].update(luck=c["coefficients"]["tile"]), "hold luck"),
    (lambda c: c["coefficients"]["gemm_flops"].update(value=1.7), "coefficients.gemm_flops.value: 1.7"),
    (lambda c: c["coefficients"]["step_overhead"].update(unit="ms"), "coefficients.step_overhead.unit: 'ms'"),
    (lambda c: c["coefficients"]["gemm_flops"].update(status="guessed"), "status"),
    (lambda c: c["covariance"]["matrix"].pop(), "rows and columns"),
    (lambda c: c["covariance"]["scales"].__setitem__(0, "linear"), "scale"),
    (lambda c: c["covariance"]["matrix"][0].__setitem__(0, float("nan")), "finite"),
    (lambda c: c["coefficients"]["gemm_flops"].update(low=5.0), "coefficients.gemm_flops.low: 5.0"),
    (lambda c: c["coefficients"]["gemm_flops"].update(high=0.01), "coefficients.gemm_flops.high: 0.01"),
    (lambda c: c["covariance"]["matrix"][0].__setitem__(0, -1.0), "matrix[0][0], the variance of"),
    (lambda c: c["covariance"]["matrix"][0].__setitem__(1, 9.0), "symmetric"),
    (lambda c: correlate(c["covariance"]["matrix"], 9.0), "no covariance"),
    (lambda c: c["subject"].update(tensor_parallel_size=0), "tensor_parallel_size"),
    (lambda c: c.update(structure=-1.0), "structure"),
]


@pytest.mark.parametrize(("change", "told"), REFUSED)
def test_what_is_not_whole_is_refused_and_says_where(
    change: Callable[[dict[str, Any]], object], told: str, written: Path, tmp_path: Path
) -> None:
    path = changed(written, tmp_path, change)
    with pytest.raises(BadInput) as found:
        load_profile(path)
    assert str(path) in str(found.value)
    assert told in str(found.value)


def test_files_that_are_no_profile_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(BadInput, match="cannot be read"):
        load_profile(path)
    path.write_text('{"kind": "servecast calib')
    with pytest.raises(BadInput, match="is it whole"):
        load_profile(path)
    path.write_text("[]")
    with pytest.raises(BadInput, match="is no calibration profile"):
        load_profile(path)


def test_what_was_measured_is_predicted_without_a_word_on_mismatch(written: Path) -> None:
    profile = load_profile(written)
    model, notes = profile.step_time(asked())
    assert profile.mismatches(asked()) == []
    assert profile.mismatches(asked(version="0.28")) == []  # as 0.28.0
    assert not [note for note in notes if note.kind == "warning"]
    assert model.efficiencies == profile.efficiencies
    assert model.source == "profile l40s.json"


OTHERS: list[tuple[Scenario, str]] = [
    (
        asked("vllm serve Qwen/Qwen3-8B"),
        "model Qwen/Qwen2.5-7B-Instruct measured, Qwen/Qwen3-8B asked",
    ),
    (asked(SERVE + " -tp 2", count=2), "tensor parallel size 1 measured, 2 asked"),
    (asked(version="0.33.0"), "engine version 0.28.0 measured, 0.33.0 asked"),
    (asked(SERVE + " --kv-cache-dtype fp8"), "KV cache dtype auto measured, fp8 asked"),
    (asked(SERVE + " --quantization fp8"), "quantization None measured, fp8 asked"),
]


@pytest.mark.parametrize(("other", "told"), OTHERS)
def test_another_subject_is_said_and_gets_wider_intervals(other: Scenario, told: str, written: Path) -> None:
    profile = load_profile(written)
    _, notes = profile.step_time(other)
    warnings = [note.text for note in notes if note.kind == "warning"]
    assert warnings == [f"{told}: what carries over is used, with wider intervals"]

    def spread(scenario: Scenario) -> float:
        drawn = profile.draws(scenario, 60, 0)
        return float(np.std([np.log(model.efficiencies.weight_bandwidth) for model in drawn]))

    assert spread(other) > 1.2 * spread(asked())


def predicted(words: list[str], out: Path) -> tuple[BenchResult, str]:
    done = CliRunner().invoke(cli.servecast, ["predict", *words, "--json", str(out)])
    assert done.exit_code == 0, done.output
    return read_result(out), done.output


def width(result: BenchResult, key: str) -> float:
    low, high = result.extra["intervals"]["figures"][key]
    return math.log(high / low)


def words(serve: str, gpu: str = "L40S", version: str = "0.28.0") -> list[str]:
    given = {"--serve": serve, "--bench": BENCH, "--gpu": gpu, "--engine-version": version}
    return [word for pair in given.items() for word in pair] + ["--kv-cache-tokens", "200000"]


def test_a_user_hears_of_the_mismatch_and_sees_wider_intervals(written: Path, tmp_path: Path) -> None:
    profile = ["--profile", str(written)]
    own, text = predicted([*words(SERVE), *profile], tmp_path / "own.json")
    assert "what carries over is used" not in text
    other, text = predicted([*words(SERVE, version="0.33.0"), *profile], tmp_path / "other.json")
    assert "engine version 0.28.0 measured, 0.33.0 asked" in " ".join(text.split())
    assert "what carries over is used, with wider intervals" in " ".join(text.split())
    assert width(other, "mean_tpot_ms") > width(own, "mean_tpot_ms")
    model, text = predicted([*words("vllm serve Qwen/Qwen3-8B"), *profile], tmp_path / "model.json")
    assert "model Qwen/Qwen2.5-7B-Instruct measured, Qwen/Qwen3-8B asked" in " ".join(text.split())
    assert width(model, "mean_tpot_ms") > width(own, "mean_tpot_ms")


def test_another_gpu_is_refused(written: Path) -> None:
    with pytest.raises(BadInput, match=r"was measured on L40S; H100.* needs a calibration of its own"):
        load_profile(written).step_time(asked(gpu="H100"))


def test_the_same_seed_draws_the_same(written: Path) -> None:
    profile = load_profile(written)
    first, again, other = (profile.draws(asked(), 3, seed) for seed in (1, 1, 2))
    assert [m.efficiencies for m in first] == [m.efficiencies for m in again]
    assert [m.efficiencies for m in first] != [m.efficiencies for m in other]


def limited(profile: Profile, **limits: int) -> Profile:
    validity = profile.content.validity.model_copy(update=limits)
    return replace(profile, content=profile.content.model_copy(update={"validity": validity}))


def test_a_prediction_is_in_range_extrapolated_or_refused(written: Path, tmp_path: Path) -> None:
    profile = load_profile(written)
    inside = forecast(asked(), profile, draws=0).result
    assert inside.extra["range"]["status"] == "in range"
    beyond = forecast(asked(), limited(profile, context_per_decode=100), draws=0).result
    assert beyond.extra["range"]["status"] == "extrapolated"
    assert beyond.extra["range"]["how_far"] == [
        "more tokens of context per decode than the calibration's 100 (by up to 4 times)"
    ]
    assert beyond.verdict.status == "SUSPECT"
    with pytest.raises(BadInput, match=r"context per decode than the calibration's 2 .*too far to predict"):
        forecast(asked(), limited(profile, context_per_decode=2), draws=0)
    # What was not measured at all is priced as without a calibration, and said.
    none = changed(written, tmp_path, lambda c: c["validity"].update(prompt_tokens_per_step=0))
    never = forecast(asked(), load_profile(none), draws=0).result
    assert never.extra["range"]["how_far"] == [
        "more prompt tokens per step than the calibration's 0 (none was measured)"
    ]


def test_runs_without_prompts_make_a_profile_too(tmp_path: Path) -> None:
    evidence = measured_steps(truth_near(prior(), STEP_COEFFICIENTS, 0), 0)
    decodes = [i for i, shape in enumerate(evidence.shapes) if not shape.num_prefill_tokens]
    assert 20 < len(decodes) < len(evidence.shapes)
    less = replace(
        evidence,
        shapes=tuple(evidence.shapes[i] for i in decodes),
        seconds=evidence.seconds[decodes],
        start=evidence.start[decodes],
    )
    path = tmp_path / "p.json"
    write_profile(
        profile_content(fit([less], prior(), STEP_COEFFICIENTS), truth_scenario(), [less], before=None), path
    )
    validity = load_profile(path).content.validity
    assert validity.prompt_tokens_per_step == 0


def test_a_completed_profile_keeps_what_speaks_against_the_first(written: Path, tmp_path: Path) -> None:
    def doubt(content: dict[str, Any]) -> None:
        content.update(structure=0.2, first_token=0.3, predicted_again={"old.json": {"mean_ttft_ms": -0.6}})
        content["held_out"] = {"mixed-45": {"mean_tpot_ms": 0.1}}

    before = load_profile(changed(written, tmp_path, doubt))
    evidence = measured_steps(truth_near(prior(), STEP_COEFFICIENTS, 0), 1)
    found = fit([evidence], prior(), STEP_COEFFICIENTS[:-1])
    again = {"new.json": {"mean_ttft_ms": 0.01, "p99_ttft_ms": math.nan}}
    content = profile_content(found, truth_scenario(), [evidence], again=again, before=before)
    assert (content.structure, content.first_token) == (0.2, 0.3)
    assert content.held_out == {"mixed-45": {"mean_tpot_ms": 0.1}}
    assert content.predicted_again == {
        "old.json": {"mean_ttft_ms": -0.6},
        "new.json": {"mean_ttft_ms": 0.01},
    }
    # A coefficient that the new runs cannot show stays as it was, with its uncertainty.
    left = STEP_COEFFICIENTS[-1]
    assert content.coefficients[left] == before.content.coefficients[left]
    names, theirs = content.covariance.names, before.content.covariance
    at, was = names.index(left), theirs.names.index(left)
    assert content.covariance.matrix[at][at] == theirs.matrix[was][was]
    write_profile(content, tmp_path / "again.json")
    assert load_profile(tmp_path / "again.json").content == content


def test_what_two_calibrations_pin_together_is_fitted(written: Path) -> None:
    before = load_profile(written)
    known = [n for n, c in before.content.coefficients.items() if c.status == "fitted"]
    evidence = measured_steps(truth_near(prior(), STEP_COEFFICIENTS, 0), 1)
    found = fit([evidence], prior(), STEP_COEFFICIENTS)
    weak = replace(found, status=dict.fromkeys(found.status, "weak"))
    content = profile_content(weak, truth_scenario(), [evidence], before=before)
    assert known
    assert {content.coefficients[name].status for name in known} == {"fitted"}
    assert content.coefficients[known[0]].source == "this calibration and an earlier one"
