"""The command line itself: one clear line for what cannot be used, and the right exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli import COMMANDS, main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compare", "nosuch.json", "nosuch.json"], "nosuch.json"),
        (["predict", "--no-such-flag"], "--no-such-flag"),
        (["predict", "--draws", "many"], "many"),
        (["predict", "--draws", "4"], "belongs to --profile"),
        (["nosuch"], "nosuch"),
        (["predict", "--max-num-seq", "64"], "--max-num-seqs belongs inside --serve '…'"),
        (["plan", "--mem-fraction-static", "0.8"], "belongs inside --serve '…', or on top as --set mem-"),
        (["predict", "--num-prompts", "64"], "--num-prompts belongs inside --bench '…'"),
        (["models", "--max-num-seqs", "64"], "No such option"),
        (["predict", "--model", "a\x1b[31mb", "--serve", "vllm serve", "--gpu", "L4"], r"\x1b"),
    ],
)
def test_bad_options_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("servecast: ")
    assert says in error
    assert error.count("\n") == 1
    assert "\x1b" not in error


LOAD = ["--bench", "vllm bench serve", "--gpu", "H100", "--serve", "vllm serve Qwen/Qwen3-14B"]


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "/dev/zero"],
        ["compare", "/dev/zero", "/dev/zero"],
        ["calibrate", "--from", "/dev/zero", "--out", "p.json"],
        ["predict", "/dev/zero"],
        ["predict", "--serve", "@/dev/zero", "--bench", "vllm bench serve", "--gpu", "H100"],
        ["cluster", *LOAD, "--traffic", "/dev/zero"],
    ],
)
def test_a_file_without_an_end_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "is a device, not a file" in capsys.readouterr().err


NEST = "[" * 100_000


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "{}"],
        ["compare", "{}", "{}"],
        ["calibrate", "--from", "{}", "--out", "p.json"],
        ["predict", *LOAD, "--profile", "{}"],
        ["predict", "--bench", "vllm bench serve", "--gpu", "{}", "--serve", "vllm serve Qwen/Qwen3-14B"],
        ["predict", "--bench", "vllm bench serve", "--gpu", "H100", "--serve", "vllm serve {}"],
        ["predict", "{}"],
    ],
)
@pytest.mark.parametrize("text", ['{"a":' + NEST, '{"a": ' + "1" * 6000 + "}"], ids=["deep", "long"])
def test_files_beyond_the_parser_are_one_line(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([word.replace("{}", str(file)) for word in words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("servecast: ")
    assert "odd.json" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "--slo", "p99 ttft <= 1s", "--peak-factor", "2"], "--peak-factor: '2': belongs to --rate"),
        (["plan", "--slo", "p99 ttft <= 1s", "--seeds", "99999999"], "--seeds: 99999999: must be at most"),
        (["whatif", "--vary", "max-num-seqs=4,8", "--address", "h:1"], "--address: 'h:1': belongs to"),
        (["whatif", "--vary", "max-num-seqs=4,8", "--seeds", "9999"], "makes 19,998 runs; confirm"),
    ],
)
def test_options_that_do_nothing_or_never_end_are_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, *LOAD])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["models"], ["predict", "--help"]])
def test_asking_is_no_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out


def test_help_imports_no_command() -> None:
    code = (
        "import sys\nfrom cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('numpy', 'scipy', 'pydantic', 'sim.simulate') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.rstrip().endswith("[]")
    assert all(name in shown for name in COMMANDS)
