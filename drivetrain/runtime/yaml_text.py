"""Reading YAML that somebody else may have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_VALUES = 100_000


def load_yaml(text: str) -> Any:
    """Read a YAML document of plain values, whose anchors may not multiply without end.

    PyYAML shares what an alias repeats. A file of a kilobyte may load quickly and then hang the code that walks through
    its 10^9 values, or through one that holds itself.
    """
    return _read(text, lambda loader, node: loader.construct_document(node))


def check_yaml(text: str) -> None:
    """Raise if a YAML document is one that `load_yaml` refuses for its anchors or its depth."""
    _read(text, lambda loader, node: None)


def _read(text: str, construct: Callable[[Any, Any], Any]) -> Any:
    import yaml  # few runs read any

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its anchors stand for more than {MOST_VALUES:,} values")
        return construct(loader, node)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply, or an anchor holds itself") from None
    except (ValueError, TypeError, OverflowError) as error:  # a date or a number that cannot be
        raise yaml.YAMLError(f"it holds a value that cannot be read: {error}") from error
    finally:
        loader.dispose()


def _count(node: Any, known: dict[int, int]) -> int:
    """Count the values that a node stands for, each alias as often as it is used."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = MOST_VALUES + 1  # for a node that holds itself
    children = node.value if isinstance(node.value, list) else []
    pairs = [each if isinstance(each, tuple) else (each,) for each in children]
    known[id(node)] = 1 + sum(_count(child, known) for pair in pairs for child in pair)
    return known[id(node)]
