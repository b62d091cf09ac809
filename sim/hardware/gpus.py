"""GPUs by name: the shipped table, or a file of the user's own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sim.data import shipped
from sim.errors import BadInput
from sim.hardware.spec import GpuSpec
from sim.jsontext import load_json
from sim.paths import file_text, is_file
from sim.provenance import Note
from sim.yamltext import entries, load_yaml

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU in the units of data sheets: GiB, GB/s (10^9, one direction) and dense TFLOP/s."""

    memory_gib: float
    bandwidth: float
    tflops: Mapping[str, float]
    compute_capability: tuple[int, int] | None = None
    link: float = 32.0
    source: str = "user file"
    device_name: str = ""
    aliases: Sequence[str] = ()
    assumed: Mapping[str, str | float] = field(default_factory=dict)
    memory_gib_wsl: float | None = None

    def spec(self, name: str) -> GpuSpec:
        """The row in bytes and per-second units."""
        capability = self.compute_capability
        return GpuSpec(
            name=name,
            memory_bytes=round(self.memory_gib * GIB),
            memory_bandwidth=self.bandwidth * 1e9,
            dense_flops={dtype: tera * 1e12 for dtype, tera in self.tflops.items()},
            compute_capability=None if capability is None else (capability[0], capability[1]),
            link_bandwidth=self.link * 1e9,
            source=self.source,
            assumed={field: str(reason) for field, reason in self.assumed.items()},
            device_name=self.device_name,
        )


def find_gpu(name: str) -> tuple[GpuSpec, tuple[Note, ...]]:
    """A GPU by name, with notes on how the name was read.

    Letter case, spaces and punctuation do not matter; vendor words may be there or not. A short name means
    the commonest part (`H100` is the SXM 80 GB), and a note says so. A path to a YAML or JSON file: one GPU's
    fields as in `GpuRow`, or a mapping of names to such; `FILE:NAME` picks one.

    Raises:
        BadInput: unknown (with the nearest names), or a file that is not of that form.
    """
    asked = name.strip()
    file, _, part = asked.rpartition(":")
    if file and is_file(file):
        return _from_file(Path(file), part, asked)
    if is_file(asked):
        return _from_file(Path(asked), None, asked)
    if asked.endswith((".yaml", ".yml", ".json")):
        raise BadInput("--gpu", asked, "no such file")
    wanted = _plain(asked)
    rows = _rows(wanted)
    for full, row in rows.items():
        if wanted in {_plain(full), _plain(row.device_name)} and wanted:
            return row.spec(full), _assumed_notes(full, row)
    for full, row in rows.items():
        if wanted in {_plain(alias) for alias in row.aliases}:
            note = Note("info", "--gpu", f"{asked} is taken as {full} ({row.device_name})")
            return row.spec(full), (note, *_assumed_notes(full, row))
    raise BadInput("--gpu", asked, _unknown_hint(asked))


def gpu_rows() -> tuple[GpuSpec, ...]:
    """Every GPU of the shipped table, in the table's order."""
    return tuple(row.spec(name) for name, row in _rows().items())


def memory_bytes_under_wsl(gpu: GpuSpec) -> int | None:
    """Total memory that the Windows driver reports for this part; None if not known to differ."""
    row = _rows(_plain(gpu.name)).get(gpu.name)
    if row is None or row.memory_gib_wsl is None:
        return None
    return round(row.memory_gib_wsl * GIB)


@cache
def _rows(word: str = "") -> Mapping[str, GpuRow]:
    """The shipped table, or no more of it than the rows in whose text a plain name occurs."""
    text = "".join(row for row in entries(shipped("gpus.yaml")) if word in _plain(row))
    return {str(name): GpuRow(**row) for name, row in (load_yaml(text) or {}).items()}


def _plain(name: str) -> str:
    text = name.lower()
    for word in ("nvidia", "geforce", "amd", "instinct", "tesla"):
        text = text.replace(word, "")
    return _PUNCTUATION.sub("", text)


def _assumed_notes(name: str, row: GpuRow) -> tuple[Note, ...]:
    return tuple(
        Note("assumed", f"{name} {field}", f"assumed: {reason}") for field, reason in row.assumed.items()
    )


_PUNCTUATION = re.compile(r"[\W_]+")
_COUNTED = re.compile(r"(?:(\d{1,2})\s*[x×*]\s*(.+)|(.*\d.*?)\s*[x×*]\s*(\d{1,2}))", re.IGNORECASE)


def _unknown_hint(asked: str) -> str:
    if match := _COUNTED.fullmatch(asked):
        count, name = (match[1], match[2]) if match[1] else (match[4], match[3])
        return (
            f"names one kind of GPU; how many follows from the command (-tp {count}, --pp, --dp), or "
            f"say --gpu {name} --gpu-count {count} for more than it takes"
        )
    import difflib

    spellings: dict[str, str] = {}
    for full, row in _rows().items():
        for spelling in (full, row.device_name, *row.aliases):
            spellings.setdefault(_plain(spelling), full)
    close = difflib.get_close_matches(_plain(asked), [key for key in spellings if key], n=4, cutoff=0.4)
    nearest = list(dict.fromkeys(spellings[key] for key in close))[:3]
    return (
        f"not in the table{'; nearest: ' + ', '.join(nearest) if nearest else ''}; "
        "or pass a YAML file with memory_gib, bandwidth (GB/s) and tflops (`servecast gpus` lists)"
    )


def _from_file(path: Path, part: str | None, asked: str) -> tuple[GpuSpec, tuple[Note, ...]]:
    try:
        text = file_text(path)
        content: Any = load_json(text) if path.suffix == ".json" else load_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("--gpu", str(path), f"cannot be read: {error}") from None
    except (ValueError, yaml.YAMLError):
        raise BadInput("--gpu", str(path), "is not valid YAML or JSON") from None
    if not isinstance(content, Mapping) or not content:
        raise BadInput("--gpu", str(path), "must hold memory_gib, bandwidth and tflops of a GPU")
    if "memory_gib" in content or "bandwidth" in content:
        fields = dict(content)
        name = str(fields.pop("name", path.stem))
    else:
        content = {str(key): value for key, value in content.items()}  # YAML reads `5090:` as a number
        name = part or (next(iter(content)) if len(content) == 1 else "")
        if name not in content:
            raise BadInput("--gpu", str(path), f"pick one: {path}:NAME with NAME of {', '.join(content)}")
        fields = content[name]
    from sim.hardware.gpu_file import checked_fields  # takes longer to load than the shipped table to read

    row = GpuRow(**checked_fields(fields, path))
    note = Note("info", "--gpu", f"{name} is read from {path}")
    return replace(row.spec(name), file=asked), (note, *_assumed_notes(name, row))
