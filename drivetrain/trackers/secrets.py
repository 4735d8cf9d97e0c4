"""Keys, tokens and passwords, which reach no tracker, no checkpoint and no message."""

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
# Tokens that a vocabulary has.
_VOCABULARY = re.compile(
    r"(?:^|_)(?:pad|bos|eos|sos|unk|mask|sep|cls|start|end|stop|special|prefix|suffix|middle|image|video|audio|tool"
    r"|boundary|begin|first|last|next|per|each)_token$"
)
_SHORTEST = 8
"""Characters below which a value in the environment is taken for a switch rather than for a secret."""


class Secrets:
    """Finds secrets by the names that values have, and wherever known ones are repeated.

    A name such as `api_key`, `hf_token`, `password` or `clientSecret` makes a text secret, whatever it is. The values
    of environment variables with such names are known, and so are those that are given.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = {value for value in values if value}
        known |= {value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= _SHORTEST}
        # The longest first, so that no rest of one remains where another is a part of it.
        parts = sorted(map(re.escape, known), key=len, reverse=True)
        self._known = re.compile("|".join(parts)) if parts else None

    def in_text(self, text: str) -> str:
        """Return a text with `<hidden>` in the place of every known secret and of what URLs hold of the kind."""
        text = without_credentials(text)
        return self._known.sub(HIDDEN, text) if self._known is not None else text

    def hide(self, value: Any) -> Any:
        """Return nested values with `<hidden>` in the place of every secret; the original is left as it is."""
        return self._clean(value, drops=False)

    def drop(self, value: Any) -> Any:
        """Return nested values without the entries whose names are those of secrets, and known secrets hidden."""
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
    """Whether what has this name is a secret: `api_key`, `HF_TOKEN`, `clientSecret`; not `max_tokens`, `pad_token`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    return bool(_SECRET_NAME.search(snake)) and not _VOCABULARY.search(snake)


def _covered(value: Any) -> Any:
    """`<hidden>` for a text or for anything that holds one; numbers, switches and None as they are."""
    if value is None or isinstance(value, (bool, int, float)) or value in ("", HIDDEN):
        return value
    return HIDDEN
