"""GPUs by name and by file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.errors import BadInput
from sim.hardware import gpus
from sim.hardware.gpus import find_gpu, gpu_rows, memory_bytes_under_wsl

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("H100", "H100-SXM-80GB"),
        ("h100 80gb", "H100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("H100 PCIe", "H100-PCIe-80GB"),
        ("H100-NVL", "H100-NVL-94GB"),
        ("a100-40gb", "A100-SXM-40GB"),
        ("A100", "A100-SXM-80GB"),
        ("rtx_5090", "RTX-5090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("mi300x", "MI300X"),
        ("DGX Spark", "GB10"),
        ("cpu", "cpu"),
    ],
)
def test_names_as_people_write_them(asked: str, name: str) -> None:
    assert find_gpu(asked)[0].name == name


def test_a_short_name_says_what_it_was_taken_for() -> None:
    notes = find_gpu("H100")[1]
    assert any("H100-SXM-80GB" in note.text for note in notes)
    assert not any(note.kind == "info" for note in find_gpu("H100-SXM-80GB")[1])


def test_rows_read_alone_decide_as_the_whole_table_does(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gpus._rows()
    spellings = [s for name, row in whole.items() for s in (name, row.device_name, *row.aliases) if s]
    alone = [find_gpu(spelling) for spelling in spellings]
    monkeypatch.setattr(gpus, "_rows", lambda word="": whole)
    assert [find_gpu(spelling) for spelling in spellings] == alone


def test_an_unknown_gpu_gets_neighbours() -> None:
    with pytest.raises(BadInput, match="RTX-5090"):
        find_gpu("RTX 5091")
    for nothing in ("", "  ", "!!!"):
        with pytest.raises(BadInput):
            find_gpu(nothing)


# What torch reports on such cards [GiB]; drivers differ by some 0.2.
@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("A100-SXM-80GB", 79.25),
        ("A100-SXM-40GB", 39.4),
        ("H100-SXM-80GB", 79.2),
        ("H200-SXM-141GB", 139.8),
        ("L4", 22.0),
        ("RTX-4090", 23.5),
        ("RTX-5090", 31.4),
        ("V100-SXM2-32GB", 31.7),
    ],
)
def test_memory_is_what_the_driver_leaves(name: str, gib: float) -> None:
    assert find_gpu(name)[0].memory_bytes / GIB == pytest.approx(gib, abs=0.2)


def test_every_row_is_sound() -> None:
    names = [row.name for row in gpu_rows()]
    assert len(names) == len(set(names))
    for gpu in gpu_rows():
        assert gpu.source
        assert gpu.memory_bytes > GIB
        assert "bf16" in gpu.dense_flops or "fp16" in gpu.dense_flops
        half = gpu.dense_flops.get("bf16", gpu.dense_flops.get("fp16", 0.0))
        # Dense. GeForce halves its 16-bit and 8-bit rates when it accumulates in fp32, but not FP4's.
        assert gpu.dense_flops.get("fp8", half) <= 2.1 * half
        assert gpu.dense_flops.get("fp4", half) <= 8.1 * half
        assert find_gpu(gpu.name)[0] == gpu


def test_assumed_figures_are_named() -> None:
    gpu, notes = find_gpu("MI325X")
    assert "memory_gib" in gpu.assumed
    assert any(note.kind == "assumed" for note in notes)


def test_the_windows_driver_reports_more() -> None:
    gpu = find_gpu("RTX 5090")[0]
    wsl = memory_bytes_under_wsl(gpu)
    assert wsl is not None
    assert wsl > gpu.memory_bytes
    assert memory_bytes_under_wsl(find_gpu("H100")[0]) is None


ROW = {"memory_gib": 48.5, "bandwidth": 900, "tflops": {"bf16": 200.0}}


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "card.yaml"
    path.write_text("memory_gib: 48.5\nbandwidth: 900\ntflops: {bf16: 200}\ncompute_capability: [9, 9]\n")
    gpu, notes = find_gpu(str(path))
    assert gpu.name == "card"
    assert gpu.memory_bytes == round(48.5 * GIB)
    assert gpu.memory_bandwidth == 900e9
    assert gpu.dense_flops == {"bf16": 200e12}
    assert gpu.compute_capability == (9, 9)
    assert any(str(path) in note.text for note in notes)


def test_a_file_of_several(tmp_path: Path) -> None:
    path = tmp_path / "cards.json"
    path.write_text(json.dumps({"one": ROW, "two": {**ROW, "memory_gib": 96}}))
    assert find_gpu(f"{path}:two")[0].memory_bytes == 96 * GIB
    with pytest.raises(BadInput, match="one, two"):
        find_gpu(str(path))
    with pytest.raises(BadInput, match="one, two"):
        find_gpu(f"{path}:three")


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("memory_gib: -1\nbandwidth: 1\ntflops: {bf16: 1}", "memory_gib"),
        ("memory_gib: .inf\nbandwidth: 1\ntflops: {bf16: 1}", "memory_gib"),
        ("memory_gib: 1\nbandwidth: 1", "tflops"),
        ("memory_gib: 1\nbandwidth: 1\ntflops: {bf16: 1}\ncolour: red", "colour"),
        ("- 1\n- 2", "must hold"),
        ("a: [", "not valid"),
        ("", "must hold"),
        ("memory_gib: 1\nbandwidth: 1\ntflops: {bf16: fast}", "tflops"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, hint: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(BadInput, match=hint):
        find_gpu(str(path))


def test_a_missing_file() -> None:
    with pytest.raises(BadInput, match="no such file"):
        find_gpu("nowhere.yaml")


@pytest.mark.parametrize("name", ["2xH100", "2 x H100", "H100 x 2"])
def test_a_number_of_gpus_is_said_elsewhere(name: str) -> None:
    with pytest.raises(BadInput, match="--gpu H100 --gpu-count 2") as refused:
        find_gpu(name)
    assert "-tp 2" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tflops": {"bf16": 0}}, "tflops.bf16"),
        ({"bandwidth": True}, "bandwidth"),
        ({"compute_capability": [-1, 0]}, "compute_capability.0"),
        ({"memory_gib": 1e30}, "memory_gib"),
    ],
)
def test_impossible_figures_are_named(tmp_path: Path, change: dict[str, object], field: str) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"memory_gib": 48, "bandwidth": 900, "tflops": {"bf16": 100}, **change}))
    with pytest.raises(BadInput, match=f"gpu.json: {field}: "):
        find_gpu(str(file))


def test_names_that_yaml_reads_as_numbers(tmp_path: Path) -> None:
    row = {"memory_gib": 32, "bandwidth": 1792, "tflops": {"bf16": 209}}
    file = tmp_path / "gpus.yaml"
    file.write_text(f"5090: {json.dumps(row)}\n")
    assert find_gpu(str(file))[0].name == "5090"
    file.write_text(f"5090: {json.dumps(row)}\n4090: {json.dumps(row)}\n")
    assert find_gpu(f"{file}:4090")[0].name == "4090"
    with pytest.raises(BadInput, match="NAME of 5090, 4090"):
        find_gpu(str(file))
