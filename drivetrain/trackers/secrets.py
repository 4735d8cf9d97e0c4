"""Removal of keys, tokens and passwords from values that trackers, checkpoints and messages receive."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain.runtime.terminal import HIDDEN as HIDDEN
from drivetrain.runtime.terminal import without_credentials

_SECRET_NAME = re.compile(
    r"(?:^|[_\W])(?:api_?key|(?:access|secret|private|encryption|signing)_?key(?:_id)?|secrets?|token|password|passwd"
    r"|passphrase|credentials?)$"
)
# Vocabulary tokens, which are no secrets.
_VOCABULARY = re.compile(
    r"(?:^|_)(?:pad|bos|eos|sos|unk|mask|sep|cls|start|end|stop|special|prefix|suffix|middle|image|video|audio|tool"
    r"|boundary|begin|first|last|next|per|each)_token$"
)
_SHORTEST = 8
"""The minimum length of a secret in an environment variable. Shorter values are taken for switches."""


class Secrets:
    """Filter that removes secrets, such as API keys, from logged values and texts.

    A text is secret if its name is like `api_key`, `hf_token`, `password` or `clientSecret`. Known secrets are the
    given values and those of environment variables with such names.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = {value for value in values if value}
        known |= {value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= _SHORTEST}
        # Longest first: a secret may contain another one, and its rest must not remain.
        parts = sorted(map(re.escape, known), key=len, reverse=True)
        self._known = re.compile("|".join(parts)) if parts else None

    def in_text(self, text: str) -> str:
        """Return the text with known secrets and credentials replaced by `<hidden>`."""
        text = without_credentials(text)
        return self._known.sub(HIDDEN, text) if self._known is not None else text

    def hide(self, value: Any) -> Any:
        """Replace the secrets in nested dicts and lists by `<hidden>`."""
        return self._clean(value, drops=False)

    def drop(self, value: Any) -> Any:
        return self._clean(value, drops=True)

    def _clean(self, value: Any, drops: bool) -> Any:
        if isinstance(value, str):
            return self.in_text(value)
        if isinstance(value, Mapping):
            return {
                key: _covered(item) if is_secret_name(str(key)) else self._clean(item, drops)
                for key, item in value.items()
                if not (drops and is_secret_name(str(key)) and _covered(item) is not item)
            }
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self._clean(item, drops) for item in value)
        return value


def is_secret_name(name: str) -> bool:
    """Return True if a name denotes a secret, such as `api_key`."""
    # `clientSecret` becomes `client_secret`.
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    return bool(_SECRET_NAME.search(snake)) and not _VOCABULARY.search(snake)


def _covered(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)) or value in ("", HIDDEN):
        return value
    return HIDDEN
