from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sim.cli.options import ScenarioOptions, scenario_options
from sim.errors import BadInput

SERVE = "vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 8"
SGLANG = "sglang serve Qwen/Qwen2.5-7B-Instruct"
BENCH = "vllm bench serve --num-prompts 3"


@click.command()
@scenario_options
@click.option("--json", "json_path")
def show(inputs: ScenarioOptions, json_path: str | None) -> None:
    """Print what was built."""
    for scenario in inputs.scenarios():
        click.echo(f"{scenario.engine.name} {scenario.gpu.name} {scenario.workload.num_prompts} {json_path}")


def lines(*arguments: str, text: str | None = None) -> list[str]:
    result = CliRunner().invoke(show, arguments, input=text, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_commands_as_options() -> None:
    assert lines("--serve", SERVE, "--bench", BENCH, "--gpu", "L4", "--json", "x") == ["vllm L4 3 x"]


def test_one_scenario_per_serve_command() -> None:
    assert lines("--serve", SERVE, "--serve", SGLANG, "--bench", BENCH, "--gpu", "L4") == [
        "vllm L4 3 None",
        "sglang L4 3 None",
    ]


def test_files_with_options_on_top(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f"serve: {SERVE}\nbench: {BENCH}\ngpu: L4\n")
    files = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    assert lines(*files, "--set", "num-prompts=5", "--gpu", "H200") == ["vllm H200-SXM-141GB 5 None"] * 2


def test_commands_from_a_file_and_from_standard_input(tmp_path: Path) -> None:
    serve = tmp_path / "serve.sh"
    serve.write_text("# my server\nvllm serve Qwen/Qwen2.5-7B-Instruct \\\n  --max-num-seqs 8\n")
    assert lines("--serve", f"@{serve}", "--bench", "-", "--gpu", "L4", text=BENCH) == ["vllm L4 3 None"]


def test_thousands_separators_as_engines_log_them() -> None:
    assert lines("--serve", SERVE, "--bench", BENCH, "--gpu", "L4", "--kv-cache-tokens", "194,896")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "SCENARIO"),
        (["--serve", "@/nowhere", "--gpu", "L4"], "/nowhere"),
        (["--serve", "-", "--gpu", "L4"], "empty"),
        (["--serve", SERVE, "--gpu", "L4", "--gpu-count", "two"], "--gpu-count"),
        (["--serve", SERVE, "--gpu", "L4", "--seed", "nan"], "--seed"),
        (["x.yaml", "--serve", SERVE, "--serve", SGLANG], "--serve"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_options(arguments: list[str], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        CliRunner().invoke(show, arguments, catch_exceptions=False)


def test_a_command_for_one_scenario() -> None:
    two = ScenarioOptions(serve=(SERVE, SGLANG), gpu="L4")
    with pytest.raises(BadInput, match="2 were given"):
        two.scenario()
    assert ScenarioOptions(serve=(SERVE,), gpu="L4").scenario().engine["max_num_seqs"] == 8


@pytest.mark.parametrize(
    ("devices", "told"), [("0", True), ("0,1", False), ("", True), ("0,-1", True), ("GPU-a1, GPU-b2", False)]
)
def test_fewer_visible_gpus_than_the_engine_takes(devices: str, told: bool) -> None:
    serve = f"CUDA_VISIBLE_DEVICES='{devices}' vllm serve Qwen/Qwen2.5-7B-Instruct -tp 2"
    notes = ScenarioOptions(serve=(serve,), bench=BENCH, gpu="L4").scenario().notes
    assert any(n.subject == "CUDA_VISIBLE_DEVICES" and n.kind == "warning" for n in notes) is told
