"""Models by name: the shipped table, a local config.json, or the hub when it can be reached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from sim.data import FOLDER
from sim.errors import BadInput
from sim.jsontext import load_json
from sim.models.config import parse_config
from sim.models.model import ModelConfig
from sim.paths import exists, file_text
from sim.yamltext import entries, load_yaml

# Keys of a row that are ours; every other key is a field of the model's config.json.
_OWN_KEYS = {"like", "also", "quantised", "source", "extra_parameters", "quantization_config"}
SCHEMES = "_schemes.yaml"
_LIKE = re.compile(r"^  like: (.+)$", re.MULTILINE)


def load_model(name_or_path: str) -> ModelConfig:
    """A model by HF repository id, by short name, or from a folder or file with its config.json.

    Order: an existing path; the shipped table (letter case ignored; a short name such as `Qwen2.5-7B`
    if all it can mean have one shape); the hub through `huggingface_hub`, where that is installed and
    answers.

    Raises:
        BadInput: unknown (the nearest names and the way to pass a file are in the message), ambiguous, or
            a file that is no usable config.json.
    """
    name = name_or_path.strip()
    if not name:
        raise BadInput("--model", name_or_path, "name a model or a folder with its config.json")
    if not name.isprintable():  # it goes into reports, where a terminal would obey it
        raise BadInput("--model", name, "has control characters in its name; rename the folder")
    path = Path(name).expanduser()
    if exists(path):
        return _from_path(path)
    if name.startswith(("/", "./", "../", "~")) or name.endswith((".json", ".yaml", ".yml")):
        raise BadInput("--model", name, "no such file or folder")
    known = _find(name)
    if known is not None:
        return _shipped(known)
    fetched = _from_hub(name) if "/" in name else None
    if fetched is not None:
        return parse_config(fetched, name)
    nearest = _nearest(name)
    hint = f"not in the table{'; nearest: ' + ', '.join(nearest) if nearest else ''}; "
    raise BadInput(
        "--model",
        name,
        hint + "or pass a folder or file with the model's config.json (`servecast models` lists)",
    )


def model_names() -> tuple[str, ...]:
    """Every name in the shipped table, sorted."""
    return tuple(sorted(_table(), key=str.lower))


@cache
def _files() -> Mapping[str, str]:
    """Text of every shipped file, by its name, in order."""
    files = sorted((FOLDER / "models").glob("*.yaml"))
    return {file.name: file.read_text(encoding="utf-8") for file in files}


@cache
def _table(word: str = "") -> Mapping[str, Mapping[str, Any]]:
    """Full name -> config.json fields, `like`, `also` and `quantised` resolved.

    With a word, no more of it than the rows in which that occurs, and what they are like.
    """
    rows: dict[str, dict[str, Any]] = {}
    for file, text in _files().items():
        if file != SCHEMES and word in text:
            read = load_yaml(_excerpt(text, word)) or {}
            rows.update({key: row for key, row in read.items() if not key.startswith("_")})
    table: dict[str, Mapping[str, Any]] = {}
    for name, row in rows.items():
        config = _resolve(rows, row)
        table[name] = config
        for twin in row.get("also", ()):
            table[twin] = config
        for quantised, scheme in row.get("quantised", {}).items():
            if word in quantised:
                table[quantised] = {**config, "quantization_config": _schemes()[scheme]}
    return table


def _excerpt(text: str, word: str) -> str:
    """The rows of a file that hold the word, those that these are like, and what several rows share."""
    rows = {row.partition(":")[0]: row for row in entries(text)}
    waiting = [name for name, row in rows.items() if name.startswith("_") or word in row]
    kept: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept.add(name)
            waiting += _LIKE.findall(rows[name])
    return "".join(row for name, row in rows.items() if name in kept)


@cache
def _schemes() -> Mapping[str, Any]:
    schemes: dict[str, Any] = load_yaml(_files()[SCHEMES])
    return schemes


def _resolve(rows: Mapping[str, Mapping[str, Any]], row: Mapping[str, Any]) -> dict[str, Any]:
    base = _resolve(rows, rows[row["like"]]) if "like" in row else {}
    fields = {key: value for key, value in row.items() if key not in _OWN_KEYS}
    own = {f"_{key}": row[key] for key in ("source", "extra_parameters") if key in row}
    if "quantization_config" in row:
        fields["quantization_config"] = row["quantization_config"]
    return {**base, **fields, **own}


@cache
def _shipped(name: str) -> ModelConfig:
    return parse_config(_table(name)[name], name)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _find(name: str) -> str | None:
    if name in _table(name):
        return name
    table = _table()
    exact = [full for full in table if full.lower() == name.lower()]
    if exact:
        return exact[0]
    if "/" in name:
        return None
    wanted = _plain(name)
    tails = {full: _plain(full.rsplit("/", 1)[1]) for full in table}
    same = [full for full, tail in tails.items() if tail == wanted]
    if not same:
        # The base name of a family member that ships only as instruct or chat model.
        same = [
            full
            for full, tail in tails.items()
            if tail in {f"{wanted}instruct", f"{wanted}it", f"{wanted}chat", f"{wanted}hf"}
        ]
    if not same:
        return None
    if any(table[full] != table[same[0]] for full in same[1:]):
        raise BadInput("--model", name, f"ambiguous; write one of {', '.join(sorted(same))}")
    return same[0]


def _nearest(name: str) -> list[str]:
    import difflib

    table = {full.lower(): full for full in _table()}
    tails = {full.rsplit("/", 1)[1].lower(): full for full in _table()}
    found = difflib.get_close_matches(name.lower(), list(table), n=3, cutoff=0.5)
    near = difflib.get_close_matches(name.lower().rsplit("/", 1)[-1], list(tails), n=3, cutoff=0.5)
    return list(dict.fromkeys([*(table[key] for key in found), *(tails[key] for key in near)]))[:3]


def _from_path(path: Path) -> ModelConfig:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput("--model", str(path), "the folder holds no config.json")
    try:
        text = file_text(file)
        config = load_yaml(text) if file.suffix in {".yaml", ".yml"} else load_json(text)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("--model", str(file), f"cannot be read: {error}") from None
    except (ValueError, yaml.YAMLError):
        raise BadInput("--model", str(file), "is not valid JSON or YAML") from None
    quantization = file.parent / "hf_quant_config.json"
    if isinstance(config, dict) and "quantization_config" not in config and quantization.is_file():
        # ModelOpt checkpoints keep their scheme in a file of its own.
        config = {**config, "quantization_config": _modelopt_scheme(quantization)}
    # A folder and the config.json in it are one model, so they have one name.
    return parse_config(config, str(file.parent if file.name == "config.json" else path))


def _modelopt_scheme(file: Path) -> Mapping[str, Any]:
    """The section `quantization` of a ModelOpt checkpoint's own file."""
    try:
        section = load_json(file_text(file))["quantization"]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("--model", str(file), f"cannot be read: {error}") from None
    except ValueError:
        raise BadInput("--model", str(file), "is not valid JSON; download it again") from None
    except (KeyError, TypeError):
        section = None
    if not isinstance(section, Mapping):
        raise BadInput("--model", str(file), 'must hold an object "quantization"; download it again')
    return section


def _from_hub(name: str) -> Mapping[str, Any] | None:
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        return None
    try:
        path = Path(hub.hf_hub_download(name, "config.json", etag_timeout=5))
        config: dict[str, Any] = load_json(path.read_text(encoding="utf-8"))
    except Exception:
        # Offline, gated or absent: in each case the caller says how to pass a file instead.
        return None
    return config
