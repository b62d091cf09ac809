"""Places that cannot be written are refused before anything is simulated."""

import pytest
from click.testing import CliRunner

import cli
from sim.cli.outputs import check_outputs
from sim.errors import BadInput

# No simulation of this load ends within a test.
ENDLESS = [
    "--gpu",
    "L4",
    "--serve",
    "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 1024",
    "--bench",
    "vllm bench serve --dataset-name random --random-input-len 64 --random-output-len 8 "
    "--num-prompts 2000000000 --request-rate 1",
]
SLO = ["--slo", "p99 ttft <= 1s"]
COMMANDS = {
    "predict": ("predict", [], ["--json", "--plot", "--steps"]),
    "sweep": ("predict", ["--concurrency", "1,2"], ["--json", "--plot"]),
    "whatif": ("whatif", ["--vary", "max-num-seqs=1,2"], ["--json", "--plot", "--html", "--out"]),
    "plan": ("plan", SLO, ["--json", "--plot", "--html"]),
    "search": ("search", [*SLO, "--over", "max-num-seqs=1,2"], ["--json", "--save"]),
    "cluster": ("cluster", [], ["--json"]),
    "memory": ("memory", [], ["--json"]),
}


def refused(name, *more):
    command, given, _ = COMMANDS[name]
    result = CliRunner().invoke(cli.servecast, [command, *ENDLESS, *given, *more])
    assert isinstance(result.exception, BadInput), result.output
    return result.exception


@pytest.mark.parametrize(("name", "option"), [(n, o) for n, c in COMMANDS.items() for o in c[2]])
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path, name, option):
    error = refused(name, option, str(tmp_path / "none" / "file.png"))
    assert error.field == option
    assert "its folder does not exist" in error.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [n for n, c in COMMANDS.items() if len(c[2]) > 1])
def test_two_results_do_not_go_to_one_file(tmp_path, name):
    one, *_, other = COMMANDS[name][2]
    path = tmp_path / "same.png"
    error = refused(name, one, str(path), other, f"{tmp_path}/./same.png")
    assert f"is the file of {one} already" in error.hint
    assert not path.exists()


def test_folders_links_and_devices(tmp_path):
    with pytest.raises(BadInput, match=r"--json: .*is a folder"):
        check_outputs({"--json": tmp_path})
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("")
    link.symlink_to(real)
    with pytest.raises(BadInput, match=r"--html: .*is the file of --json already"):
        check_outputs({"--json": real, "--html": link})
    check_outputs({"--json": "/dev/null", "--steps": "/dev/null"})
    check_outputs({"--json": "-", "--html": None, "--out": tmp_path / "new"})
    with pytest.raises(BadInput, match=r"--plot: .*suffixes"):
        check_outputs({"--plot": tmp_path / "picture.doc"})
