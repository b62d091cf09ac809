"""Reading YAML, safely, and ten times faster where PyYAML has its C parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

TWICE = "is there twice"
_ENTRY = re.compile(r"^(?=[^\s#])", re.MULTILINE)


def load_yaml(text: str) -> Any:
    """One YAML document of plain values.

    Raises:
        yaml.YAMLError: it is none, has a value that no Python value can hold or is nested too deeply, or a
            mapping has one key twice (YAML 1.2, 3.2.1.3; PyYAML would keep the later one and say nothing).
    """
    loader = yaml.CSafeLoader(text) if yaml.__with_libyaml__ else yaml.SafeLoader(text)
    try:
        document = loader.get_single_node()
        if document is None:
            return None
        for key in _repeated_keys(document):
            raise yaml.MarkedYAMLError(problem=f"{key.value} {TWICE}", problem_mark=key.start_mark)
        return loader.construct_document(document)
    except ValueError as error:  # a date or a number out of range
        raise yaml.MarkedYAMLError(problem=str(error).partition(";")[0]) from None
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="nested too deeply") from None
    finally:
        loader.dispose()


def entries(text: str) -> list[str]:
    """The text of each entry of a document that is one mapping in block style, in order.

    Shipped tables are read by entry: to parse one takes longer than to simulate.
    """
    return _ENTRY.split(text)[1:]


def yaml_fault(error: yaml.YAMLError) -> str:
    """What is wrong with a text that `load_yaml` refused, and in which line, where that is known."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or ""
    what = problem if problem.endswith(TWICE) else "is not YAML"
    return f"{what} (line {mark.line + 1})" if mark else what


def _repeated_keys(document: yaml.Node) -> Iterator[yaml.ScalarNode]:
    waiting, seen_nodes = [document], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen_nodes:  # an alias may lead back
            continue
        seen_nodes.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            keys = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in keys:
                        yield key
                    keys.add((key.tag, key.value))
                waiting.append(value)
