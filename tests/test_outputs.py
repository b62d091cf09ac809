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


def test_no_result_goes_into_what_the_command_reads(tmp_path):
    scenario, link, prices = tmp_path / "s.yaml", tmp_path / "link.png", tmp_path / "prices.yaml"
    serve, load, options = ENDLESS[3], ENDLESS[5], ENDLESS[:2]
    scenario.write_text(f"gpu: {options[1]}\nserve: {serve}\nbench: {load}\n")
    link.symlink_to(scenario)
    prices.write_text("L4: 1\n")
    command_file = tmp_path / "serve.txt"
    command_file.write_text(serve)
    before = scenario.read_text()
    for command, given, places in COMMANDS.values():
        for option in places:
            words = [command, str(scenario), *given, option, str(link)]
            error = CliRunner().invoke(cli.servecast, words).exception
            assert isinstance(error, BadInput), words
            assert error.field == option
            assert "its own input" in error.hint
    for words in (
        ["plan", str(scenario), *SLO, "--price", str(prices), "--json", str(prices)],
        ["plan", str(scenario), *SLO, "--profile", str(prices), "--html", str(prices)],
        ["predict", *options, "--serve", f"@{command_file}", "--bench", load, "--json", str(command_file)],
    ):
        error = CliRunner().invoke(cli.servecast, words).exception
        assert isinstance(error, BadInput), words
        assert "its own input" in error.hint
    assert (scenario.read_text(), prices.read_text(), command_file.read_text()) == (before, "L4: 1\n", serve)


def test_results_and_data_sets_are_inputs_too(tmp_path):
    one, data, picture = tmp_path / "one.json", tmp_path / "data.jsonl", tmp_path / "picture.png"
    for path in (one, data, picture):
        path.write_text("{}")
    load = f"vllm bench serve --dataset-name sharegpt --dataset-path {data} --num-prompts 4"
    for words in (
        ["compare", str(one), str(data), "--json", str(data)],
        ["predict", *ENDLESS[:4], "--bench", load, "--json", str(data)],
        ["calibrate", "--from", str(one), "--out", str(one)],
        ["calibrate", "--from", str(one), "--profile", str(data), "--out", str(data)],
    ):
        error = CliRunner().invoke(cli.servecast, words).exception
        assert isinstance(error, BadInput), words
        assert "its own input" in error.hint
        assert {one.read_text(), data.read_text()} == {"{}"}
