"""The lists of flags and metrics against the installed engine's own."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sim.commands import serve as serve_commands
from sim.errors import BadInput
from sim.explain.lookup import find

pytestmark = pytest.mark.real

# Run by the engine's own interpreter: every option of the serving parser.
FLAGS = """
import json
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
options = [option for action in actions for option in action.option_strings]
print(json.dumps([option for option in options if option.startswith("--")]))
"""


@pytest.fixture(scope="module")
def vllm_package(vllm_venv: Path) -> Path:
    return next((vllm_venv / "lib").glob("python3.*/site-packages/vllm"))


def strings(files: Iterator[Path], prefix: str) -> set[str]:
    """Every string constant that begins with `prefix`, read from source: nothing is imported."""
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.startswith(prefix)
            ):
                found.add(node.value.split(" ")[0].split("{")[0])
    return found


def unknown(names: set[str]) -> list[str]:
    missing = []
    for name in sorted(names):
        try:
            find(name)
        except BadInput:
            missing.append(name)
    return missing


def test_every_metric_of_the_installed_vllm_is_known(vllm_package: Path) -> None:
    names = strings((vllm_package / "v1" / "metrics").glob("*.py"), "vllm:")
    names |= strings((vllm_package / "v1" / "spec_decode").glob("metrics.py"), "vllm:")
    names -= {"vllm:", "vllm:spec_decode", "vllm:diffusion"}  # beginnings of names
    assert len(names) > 40
    assert unknown(names) == []


def test_every_flag_of_the_installed_vllm_is_known(vllm_venv: Path) -> None:
    done = subprocess.run(
        [str(vllm_venv / "bin" / "python"), "-c", FLAGS],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    options = set(json.loads(done.stdout.strip().splitlines()[-1])) - {"--help"}
    table = serve_commands.table("vllm")
    assert len(options) > 200
    assert [option for option in sorted(options) if option.replace("_", "-") not in table.spellings] == []
    since_later = {flag.name for flag in table.flags if flag.since}
    modelled = {flag.name for flag in table.flags if flag.role == "modelled"} - since_later
    assert sorted(modelled - options) == []


def test_every_metric_of_an_installed_sglang_is_known() -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs an environment with SGLang")
    collectors = Path(spec.submodule_search_locations[0]) / "srt" / "observability"
    names = strings(collectors.glob("metrics_collector.py"), "sglang:")
    assert len(names) > 80
    assert unknown(names) == []
