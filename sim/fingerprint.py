"""Short hashes by which two results tell whether they are of the same thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sim.models.model import ModelConfig


def fingerprint(content: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the SHA-256 of some content, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_fingerprint(model: ModelConfig) -> str:
    """Of what a model is: under two names, or read from two paths, it is one model."""
    return fingerprint(
        {key: value for key, value in asdict(model).items() if key not in ("name", "defaulted")}
    )
