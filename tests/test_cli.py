"""The command line itself: one clear line for what cannot be used, and the right exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cli import COMMANDS, main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compare", "nosuch.json", "nosuch.json"], "nosuch.json"),
        (["predict", "--no-such-flag"], "--no-such-flag"),
        (["predict", "--draws", "many"], "many"),
        (["nosuch"], "nosuch"),
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
