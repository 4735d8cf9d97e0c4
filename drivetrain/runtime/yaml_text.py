"""Loading of YAML files from untrusted sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_VALUES = 100_000


def load_yaml(text: str) -> Any:
    """Load a YAML document of plain values.

    PyYAML shares the objects behind aliases. A file of 1 KB may therefore load quickly but expand to 10^9 values or
    contain itself, which hangs code that traverses it.
    """
    return _read(text, lambda loader, node: loader.construct_document(node))


def check_yaml(text: str) -> None:
    """Raise an error if a YAML document is too deep or expands to too many values."""
    _read(text, lambda loader, node: None)


def _read(text: str, construct: Callable[[Any, Any], Any]) -> Any:
    import yaml  # imported late, because few runs need it

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_values(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its anchors expand to more than {MOST_VALUES:,} values")
        return construct(loader, node)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply, or an anchor contains itself") from None
    except (ValueError, TypeError, OverflowError) as error:  # an impossible date or number
        raise yaml.YAMLError(f"it contains a value that cannot be read: {error}") from error
    finally:
        loader.dispose()


def _count_values(node: Any, known: dict[int, int]) -> int:
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = MOST_VALUES + 1  # the result for a node that contains itself
    children = node.value if isinstance(node.value, list) else []
    pairs = [each if isinstance(each, tuple) else (each,) for each in children]
    known[id(node)] = 1 + sum(_count_values(child, known) for pair in pairs for child in pair)
    return known[id(node)]
