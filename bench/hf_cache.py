"""Whether a model is complete on this host's disk, before a container or an offline engine looks for it.

A model is a folder, or a repository in a Hugging Face cache: refs/REVISION names a snapshot, the snapshot
holds links to the files, and the index lists the shards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sim.jsontext import load_json

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies, and what is missing.

    `folder` is None if nothing of it is here. `missing` names files; alternatives stand with "|".
    `unreadable` is what this user may not look at, with the reason: then nothing is known.
    """

    folder: Path | None
    missing: tuple[str, ...]
    unreadable: str | None = None

    @property
    def complete(self) -> bool:
        """Whether an engine without network can start from it."""
        return self.folder is not None and not self.missing


def cache_root(env: Mapping[str, str] | None = None) -> Path:
    """The hub cache's folder by the environment (HF_HUB_CACHE, HF_HOME, else ~/.cache/huggingface)."""
    values = os.environ if env is None else env
    if "HF_HUB_CACHE" in values:
        return Path(values["HF_HUB_CACHE"]).expanduser()
    home = values.get("HF_HOME") or str(Path(values.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(home).expanduser() / "hub"


def find_model(
    model: str, *, cache: Path | None = None, revision: str = "main", weights: bool = True
) -> ModelFiles:
    """Look for a model by folder or repository id.

    Args:
        cache: hub cache to look in; None is this user's.
        weights: whether weights are needed (`--load-format dummy` needs none).
    """
    try:
        return _look(model, cache, revision, weights)
    except OSError as error:
        return ModelFiles(None, (), f"{error.filename or model}: {error.strerror or error}")


def _look(model: str, cache: Path | None, revision: str, weights: bool) -> ModelFiles:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return ModelFiles(folder, _missing(folder, weights))
    root = (cache_root() if cache is None else cache) / ("models--" + model.replace("/", "--"))
    if not root.is_dir():
        return ModelFiles(None, (f"models--{model.replace('/', '--')}",))
    reference = root / "refs" / revision
    commit = revision
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
    snapshot = root / "snapshots" / commit
    if not snapshot.is_dir():
        what = f"snapshots/{commit}" if reference.is_file() else f"refs/{revision}"
        return ModelFiles(None, (what,))
    return ModelFiles(snapshot, _missing(snapshot, weights))


def _missing(folder: Path, weights: bool) -> tuple[str, ...]:
    missing: list[str] = []
    if not (folder / "config.json").exists():  # a link into a blob that is gone does not exist
        missing.append("config.json")
    if weights:
        missing += _missing_weights(folder)
    if not any((folder / name).exists() for name in TOKENIZERS):
        missing.append("tokenizer.json|tokenizer.model")
    return tuple(missing)


def _missing_weights(folder: Path) -> list[str]:
    for name in _INDEXES:
        index = folder / name
        if index.exists():
            shards = _shards(index)
            if not shards:
                return [name]
            return sorted(shard for shard in shards if not (folder / shard).exists())
    if not any(path.exists() for pattern in _WEIGHTS for path in folder.glob(pattern)):
        return ["*.safetensors"]
    return []


def _shards(index: Path) -> set[str]:
    """The files that an index names; none where it is damaged."""
    try:
        named = load_json(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()
    shards = [name for name in named if isinstance(name, str)]
    return set(shards) if len(shards) == len(named) else set()


def inner_cache(mounts: tuple[tuple[Path, str], ...], env: Mapping[str, str], cache: Path) -> str | None:
    """Say what is wrong if a container would not find the host's hub cache; None if it will.

    Args:
        mounts: (host folder, path in the container).
        env: the container's environment.
        cache: the host's hub cache (`.../hub`).
    """
    inner = env.get("HF_HUB_CACHE") or f"{env.get('HF_HOME', '/root/.cache/huggingface').rstrip('/')}/hub"
    for source, target in mounts:
        for depth, parent in enumerate((cache, cache.parent)):
            if source == parent:
                seen = target.rstrip("/") + (f"/{cache.name}" if depth else "")
                if seen == inner:
                    return None
                return f"the cache is mounted so that it is at {seen}, but the engine looks in {inner}"
    return f"the hub cache {cache} is not mounted; the engine looks in {inner}"
