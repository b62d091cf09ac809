"""Reading YAML, safely, and ten times faster where PyYAML has its C parser."""

from __future__ import annotations

from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """One YAML document of plain values.

    Raises:
        yaml.YAMLError: it is none.
    """
    loader = yaml.CSafeLoader(text) if yaml.__with_libyaml__ else yaml.SafeLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
