"""`servecast calibrate` as a user runs it: plan, measure, fit files; a program answers as an engine does."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from calibration.again import MEANS, again_text, all_again, predicted_again
from calibration.cli import calibrate
from calibration.evidence import ClientRun
from calibration.from_files import evidence_files
from calibration.plan_run import lacking, prior_of
from sim.build import build_scenario
from sim.errors import BadInput, ServecastError
from sim.profile import load_profile
from sim.results_io.files import write_result
from sim.scenario import Observed
from sim.simulate import roofline, simulate
from tests.real.dummy_model import write

BENCH = "vllm bench serve --random-input-len 64 --random-output-len 8"
FAKE = Path(__file__).parent / "fakes" / "fake_engine.py"

pytestmark = pytest.mark.usefixtures("any_machine")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    model = write(tmp_path / "tiny")
    path = tmp_path / "s.yaml"
    path.write_text(
        f"serve: vllm serve {model} --served-model-name m --load-format dummy --max-model-len 1024 "
        "--max-num-seqs 4 --num-gpu-blocks-override 100 --block-size 16\n"
        "bench: vllm bench serve --random-input-len 64 --random-output-len 8 --request-rate 5 "
        "--num-prompts 60\n"
        "gpu: cpu\n"
    )
    return path


def run(*words: str) -> Result:
    done = CliRunner().invoke(calibrate, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit | ServecastError):
        raise done.exception
    return done


def refusal(*words: str) -> str:
    done = run(*words)
    assert isinstance(done.exception, BadInput)
    return str(done.exception)


def test_the_plan_is_printed_and_nothing_is_started(scenario: Path, tmp_path: Path) -> None:
    done = run(str(scenario), "--plan", "--budget", "60")
    assert done.exit_code == 0
    assert "GPU minutes" in done.output
    assert f"servecast bench {scenario} --result-dir calibration-" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"s.yaml", "tiny"}


def test_the_plans_commands_keep_what_was_given_but_for_the_load(scenario: Path) -> None:
    own = scenario.with_name("a b.yaml")
    scenario.rename(own)
    given = ["--gpu", "L4", "--set", "max-num-seqs=2", "--set", "request-rate=9", "--probe", "--force"]
    given += ["--env", "HF_TOKEN=hf_0123456789", "--env", "A=1 2", "--bench", BENCH]
    given += ["--seed", "7", "--set", "api-key=sekret", "--result-dir", "my runs"]
    done = run(str(own), "--plan", "--budget", "60", *given)
    assert done.exit_code == 0, done.exception
    lines = [line for line in done.output.splitlines() if line.startswith("servecast bench")]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert str(own) in words
        assert words[words.index("--gpu") + 1] == "L4"
        sets = [words[i + 1] for i, w in enumerate(words) if w == "--set"]
        assert sets == ["max-num-seqs=2", "api-key=***"]
        assert "--seed" not in words  # each run has its own
        assert words[words.index("--result-dir") + 1].startswith("my runs/calibration-")
        assert [words[i + 1] for i, w in enumerate(words) if w == "--env"] == ["HF_TOKEN=***", "A=1 2"]
        assert {"--probe", "--force"} < set(words)
        assert words.count("--bench") == 1
        assert "request-rate 9" not in words[words.index("--bench") + 1]
    assert "hf_0" not in done.output
    assert "sekret" not in done.output
    assert len({line.partition("--seed ")[2] for line in lines}) == len(lines)


def test_a_plan_names_what_it_has_no_use_for(scenario: Path) -> None:
    done = run(str(scenario), "--plan", "--budget", "60", "--out", "p.json", "--resume")
    assert done.exit_code == 0
    assert "--out and --resume: for the calibration itself" in done.stderr
    assert "--base-url" in refusal(str(scenario), "--plan", "--launch", "url")


def test_a_command_from_standard_input_is_printed_out(scenario: Path) -> None:
    serve = scenario.read_text().splitlines()[0].removeprefix("serve: ")
    words = ["--serve", "-", "--bench", BENCH, "--gpu", "L4", "--plan", "--budget", "60"]
    done = CliRunner().invoke(calibrate, words, input=serve)
    (line, *_) = [line for line in done.output.splitlines() if line.startswith("servecast bench")]
    given = shlex.split(line)
    assert given[given.index("--serve") + 1].startswith("vllm serve ")


def test_launch_measure_fit_check_write(scenario: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "p.json", tmp_path / "runs"
    words = [str(scenario), "--out", str(out), "--result-dir", str(folder), "--budget", "4"]
    words += [
        "--launch",
        "process",
        "--program",
        f"{sys.executable} -S {FAKE}",
        "--env",
        "FAKE_TOKEN_S=0.002",
    ]
    done = run(*words)
    assert done.exit_code == 0, done.output
    profile = load_profile(out)
    assert profile.content.subject.gpu == "cpu"
    assert profile.content.subject.model.endswith("tiny")
    assert all(len(item.sha256 or "") == 64 for item in profile.content.evidence)
    assert profile.content.covariance.names
    assert any(c.status == "fitted" for c in profile.content.coefficients.values())
    assert "90 % interval" in done.output
    assert "of peak" in done.output
    # It predicts, and what is measured twice is protected.
    assert profile.step_time(build_scenario(file=scenario))[0].efficiencies == profile.efficiencies
    assert "--resume keeps finished runs" in refusal(*words)
    again = run(*words, "--resume")
    assert again.exit_code == 0
    assert load_profile(out).efficiencies == profile.efficiencies


def write_measured(scenario: Path, path: Path, seed: int | None = None) -> Path:
    made = simulate(build_scenario(file=scenario, seed=seed)).result
    write_result(replace(made, origin="measured", tool="a test", extra={}), path)
    return path


@pytest.fixture
def measured(scenario: Path, tmp_path: Path) -> Path:
    return write_measured(scenario, tmp_path / "m.json")


def test_what_is_measured_already_is_fitted(scenario: Path, measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    done = run(str(scenario), "--from", str(measured), "--out", str(out))
    assert done.exit_code == 0
    profile = load_profile(out)
    (item,) = profile.content.evidence
    assert (item.name, item.points) == ("m.json", 120)
    told = json.loads(out.read_text())
    assert set(told["coefficients"]) >= {"weight_bandwidth", "front_request"}


def test_what_results_say_of_their_runs_is_kept_where_they_agree(scenario: Path, tmp_path: Path) -> None:
    files = [write_measured(scenario, tmp_path / f"{seed}.json", seed) for seed in (1, 2)]
    for i, file in enumerate(files):
        told = json.loads(file.read_text())
        told["servecast"]["identity"] |= {"image_digest": "sha256:a", "engine_version": "0.28.0+cpu"}
        told["servecast"]["extra"]["date"] = f"2026-12-0{i + 1}T00:00:00+00:00"
        file.write_text(json.dumps(told))
    out = tmp_path / "p.json"
    run(str(scenario), "--from", *map(str, files), "--out", str(out))
    content = load_profile(out).content
    assert [item.date[:10] for item in content.evidence] == ["2026-12-01", "2026-12-02"]
    assert (content.subject.image_digest, content.subject.engine_version) == ("sha256:a", "0.28.0+cpu")
    file.write_text(file.read_text().replace("sha256:a", "sha256:b"))
    run(str(scenario), "--from", *map(str, files), "--out", str(out))
    assert load_profile(out).content.subject.image_digest is None


@pytest.mark.parametrize("words", [["--budget", "60"], ["--force"], ["--program", "vllm"], ["--resume"]])
def test_options_of_a_launch_are_of_no_use_to_a_fit(
    scenario: Path, measured: Path, tmp_path: Path, words: list[str]
) -> None:
    out = tmp_path / "p.json"
    said = refusal(str(scenario), "--from", str(measured), "--out", str(out), *words)
    assert said.startswith(words[0])
    assert not out.exists()


@pytest.mark.parametrize(
    "words", [["--gpu", "H200"], ["--set", "max-num-seqs=2"], ["--kv-cache-tokens", "9"]]
)
def test_options_of_a_scenario_need_one(measured: Path, tmp_path: Path, words: list[str]) -> None:
    said = refusal("--from", str(measured), "--out", str(tmp_path / "p.json"), *words)
    assert said.startswith(words[0])
    assert "give a scenario file" in said


def test_the_pool_that_the_engine_told_is_its_own(scenario: Path, measured: Path, tmp_path: Path) -> None:
    told = json.loads(measured.read_text())
    told["servecast"]["server"] |= {"kv_cache_tokens": 777 * 16, "num_gpu_blocks": 777}
    measured.write_text(json.dumps(told))
    (run_,) = evidence_files([measured], build_scenario(file=scenario))
    assert run_.scenario.observed == Observed(777 * 16, 777)
    named = build_scenario(file=scenario, num_gpu_blocks=50)
    (run_,) = evidence_files([measured], named)
    assert run_.scenario.observed == Observed(None, 50)


def test_a_profile_that_is_completed_keeps_what_it_rests_on(
    scenario: Path, measured: Path, tmp_path: Path
) -> None:
    first, out = tmp_path / "first.json", tmp_path / "p.json"
    run(str(scenario), "--from", str(measured), "--out", str(first))
    words = ["--profile", str(first), "--out", str(out)]
    assert "already (as m.json)" in refusal(str(scenario), "--from", str(measured), *words)
    held = json.loads(first.read_text())
    held["coefficients"]["weight_bandwidth"] |= {"status": "fitted", "source": "an earlier calibration"}
    # As good as known, so that the next run says nothing new of it.
    names = held["covariance"]["names"]
    for name in names:
        at = names.index(name)
        held["covariance"]["matrix"][at] = [0.0] * len(names)
        for row in held["covariance"]["matrix"]:
            row[at] = 0.0
        held["covariance"]["matrix"][at][at] = 1e-10
    held["validity"]["decodes_per_step"] = 999
    first.write_text(json.dumps(held))
    second = write_measured(scenario, tmp_path / "again.json", seed=7)
    run(str(scenario), "--from", str(second), *words)
    content = load_profile(out).content
    assert [item.name for item in content.evidence] == ["m.json", "again.json"]
    assert content.validity.decodes_per_step == 999
    known = content.coefficients["weight_bandwidth"]
    assert (known.status, known.source) == ("fitted", "an earlier calibration")


def test_a_run_that_goes_on_counts_nothing_twice(scenario: Path, tmp_path: Path) -> None:
    folder, first = tmp_path / "runs", tmp_path / "first.json"
    folder.mkdir()
    kept = write_measured(scenario, folder / "s-pilot.json")
    run(str(scenario), "--from", str(kept), "--out", str(first))
    words = [str(scenario), "--profile", str(first), "--out", str(tmp_path / "p.json"), "--resume"]
    words += ["--result-dir", str(folder), "--program", f"{sys.executable} -S {FAKE}", "--launch", "process"]
    assert "is in first.json already (as s-pilot.json): it would count twice" in refusal(*words)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([["--max-num-seqs", "8"]], "max_num_seqs: '8': the scenario has 4"),
        ([["--quantization", "fp8"]], "quantization: 'fp8"),
    ],
)
def test_runs_of_an_engine_with_other_flags_are_refused(
    scenario: Path, measured: Path, tmp_path: Path, flags: list[list[str]], told: str
) -> None:
    content = json.loads(measured.read_text())
    own = [list(flag) for flag in build_scenario(file=scenario).engine.given]
    identity = content["servecast"]["identity"]
    identity["flags"] = [flag for flag in own if flag[0] not in {name for name, _ in flags}] + flags
    measured.write_text(json.dumps(content))
    words = ["--from", str(measured), "--out", str(tmp_path / "p.json")]
    assert told in refusal(str(scenario), *words)
    identity["flags"] = own
    measured.write_text(json.dumps(content))
    assert run(str(scenario), *words).exit_code == 0


def test_what_speaks_against_a_run_is_said(scenario: Path, measured: Path, tmp_path: Path) -> None:
    content = json.loads(measured.read_text())
    reason = {"kind": "warning", "subject": "client_lag", "text": "the client was late"}
    content["servecast"]["verdict"] = {"status": "SUSPECT", "reasons": [reason]}
    measured.write_text(json.dumps(content))
    words = [str(scenario), "--from", str(measured), "--out", str(tmp_path / "p.json")]
    done = run(*words, "--set", 'speculative-config={"method": "ngram", "num_speculative_tokens": 3}')
    assert "warning: m.json: client_lag: SUSPECT: the client was late" in done.output
    assert "not-modelled: --speculative-config" in done.output


def test_several_files_may_follow_one_from(scenario: Path, measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    second = write_measured(scenario, tmp_path / "again.json", seed=7)
    done = run(str(scenario), "--from", str(measured), str(second), "--out", str(out))
    assert done.exit_code == 0
    assert [item.name for item in load_profile(out).content.evidence] == ["m.json", "again.json"]


def test_evidence_given_twice_would_count_twice(scenario: Path, measured: Path, tmp_path: Path) -> None:
    out, copy = tmp_path / "p.json", tmp_path / "copy.json"
    copy.write_text(measured.read_text())
    for again, says in ((measured, "is given twice"), (copy, f"is the same run as {measured}")):
        assert says in refusal(str(scenario), "--from", str(measured), str(again), "--out", str(out))
    assert not out.exists()


def test_a_fit_says_what_its_words_mean_and_that_nothing_was_held_out(
    scenario: Path, measured: Path, tmp_path: Path
) -> None:
    done = run(str(scenario), "--from", str(measured), "--out", str(tmp_path / "p.json"))
    assert "held out: nothing" in done.output
    assert "status: fitted by the runs" in done.output
    # What the fit reproduces at recorded times is one thing, what a prediction of that run says another.
    (line,) = [text for text in done.output.splitlines() if text.startswith("predicted again")]
    errors = [float(word.rstrip("%,")) for word in line.split() if word.rstrip(",").endswith("%")]
    assert len(errors) == 3
    assert all(abs(error) < 3 for error in errors)
    assert "WARNING: a run that was fitted" not in done.output


def test_a_fitted_run_that_is_predicted_badly_is_said_to_be(scenario: Path) -> None:
    subject = build_scenario(file=scenario)
    model = roofline(subject)
    figures = simulate(subject, step_time=model).result.aggregates
    right = ClientRun("r.json", subject, figures)
    assert predicted_again(right, model.efficiencies) == pytest.approx(dict.fromkeys(MEANS, 0.0), abs=0.01)
    slow = replace(right, figures={**figures, "mean_ttft_ms": 2 * float(figures["mean_ttft_ms"] or 0.0)})
    told = again_text(all_again([slow], model.efficiencies))
    assert "predicted again r.json: mean TTFT -50.0%, TPOT" in told
    assert "WARNING: a run that was fitted is 50% off" in told
    assert "WARNING" not in again_text(all_again([right], model.efficiencies))


def test_a_prediction_says_of_its_profile_that_it_predicts_its_own_runs_badly(
    scenario: Path, measured: Path, tmp_path: Path
) -> None:
    out, built = tmp_path / "p.json", build_scenario(file=scenario)
    run(str(scenario), "--from", str(measured), "--out", str(out))
    profile = load_profile(out)
    assert list(profile.content.predicted_again) == [str(measured)]
    assert not [note for note in profile.step_time(built)[1] if note.kind == "warning"]
    off = profile.content.model_copy(update={"predicted_again": {"r.json": {"mean_ttft_ms": -0.3}}})
    (note,) = [n for n in replace(profile, content=off).step_time(built)[1] if n.kind == "warning"]
    assert "30% off when predicted" in note.text


def test_a_profile_says_what_it_lacks_and_starts_the_next_fit(
    scenario: Path, measured: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.json"
    run(str(scenario), "--from", str(measured), "--out", str(out))
    built, profile = build_scenario(file=scenario), load_profile(out)
    open_ones = lacking(profile, built)
    assert open_ones is not None
    settled = {n for n, c in profile.content.coefficients.items() if c.status == "fitted"}
    assert settled
    assert not settled & set(open_ones)
    prior = prior_of(profile, built)
    assert prior.efficiencies == profile.efficiencies
    fresh = prior_of(None, built)
    assert all(prior.deviations[name] < fresh.deviations[name] for name in settled)
    assert lacking(None, built) is None
    # Another model's profile leaves everything to be measured.
    other = build_scenario(file=scenario, sets=["max-num-seqs=8"], engine_version="0.33.0")
    assert lacking(profile, other) is None


def test_step_files_take_the_scenario_of_what_lies_beside_them(
    scenario: Path, measured: Path, tmp_path: Path
) -> None:
    steps = tmp_path / "x.steps.jsonl"
    lines = [{"ev": "add", "t": 0.0, "id": "a", "prompt_len": 10, "max_tokens": 40}]
    for i in range(40):
        count, at = (10, 0) if i == 0 else (1, 9 + i)
        step = {"ev": "step", "step": i, "t": 0.01 * i, "dt_ms": 2.5, "end": 0.01 * i + 0.0025}
        lines.append({**step, "scheduled": {"a": count}, "computed": {"a": at}})
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "give the scenario as well" in refusal("--from", str(steps), "--out", str(tmp_path / "p.json"))
    done = run(str(scenario), "--from", str(steps), "--out", str(tmp_path / "p.json"))
    assert done.exit_code == 0
    # 2.5 ms a step, on a model whose steps were believed to take less.
    assert load_profile(tmp_path / "p.json").efficiencies.step_overhead > 0.0013


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan"], "give a scenario file"),
        (["S", "--plan", "--budget", "soon"], "--budget"),
        (["S", "--plan", "--budget", "-3"], "--budget"),
        (["S"], "--out"),
        (["S", "--out", "/no/such/folder/p.json"], "its folder does not exist"),
        (["S", "--from", "M", "--plan", "--out", "p.json"], "--plan"),
        (["S", "--from", "M"], "--out"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(
    words: list[str], message: str, scenario: Path, measured: Path
) -> None:
    known = {"S": str(scenario), "M": str(measured)}
    assert message in refusal(*[known.get(word, word) for word in words])
