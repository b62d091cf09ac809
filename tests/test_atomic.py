from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from sim.cli.predict import steps_file
from sim.errors import BadInput
from sim.results_io.atomic import whole_file, write_text


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        _stop_half_way(path)
    assert path.read_text() == "old"
    write_text(path, "new", "--json")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def _stop_half_way(path: Path) -> None:
    with whole_file(path, "--json") as file:
        file.write("half")
        raise KeyboardInterrupt


def test_a_link_is_followed(tmp_path: Path) -> None:
    link, target = tmp_path / "latest.json", tmp_path / "run1.json"
    link.symlink_to(target)
    write_text(link, "{}", "--json")
    assert link.is_symlink()
    assert target.read_text() == "{}"


def test_a_path_that_is_no_utf8_survives_in_json(tmp_path: Path) -> None:
    model = os.fsdecode(b"models/bad\xff")
    write_text(tmp_path / "x.json", json.dumps({"model": model}, ensure_ascii=False), "--json")
    assert json.loads((tmp_path / "x.json").read_text()) == {"model": model}


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through", "--json")
    reader.join()
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_steps_go_through_a_pipe_too(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with steps_file(pipe) as write:
        assert write is not None
        write({"step": 0})
    reader.join()
    assert read == ['{"step":0}\n']
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="the system has no /dev/full")
def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    with pytest.raises(BadInput, match="--json: '/dev/full': cannot be written: No space left"):
        write_text("/dev/full", "x" * 100_000, "--json")
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("place", ["", ".", "no/such/folder/x.json"])
def test_a_place_that_is_no_file_is_named(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"--json: .*: cannot be written"):
        write_text(place, "{}", "--json")
    assert list(tmp_path.iterdir()) == []
