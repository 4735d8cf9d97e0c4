"""Who writes a checkpoint, so that what dead runs left behind is distinguished from what a live one is writing."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
import uuid
from typing import Any

from drivetrain.checkpoint.manifest import WRITER_FILE, decoded
from drivetrain.checkpoint.storage import MANIFEST, LocalStorage
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.own_process import boot_id, is_alive, started_at, started_since_boot

logger = get_logger(__name__)

OTHER_HOST_PATIENCE = 24 * 3600.0
"""Seconds after which a write on another machine, whose processes cannot be seen from here, counts as dead."""

UNRECORDED_PATIENCE = 600.0
"""Seconds after which a write that does not say whose it is counts as dead: saying so is the first thing it does."""

_TOKEN_LENGTH = 36

_LEFT_FILE = re.compile(r"^\.(?P<name>.+)\.(?P<token>[0-9a-f]{12,})\.(?P<what>writing|replaced|link)$")

_LEFT = re.compile(r"^\.(?P<name>.+)\.(?P<token>[0-9a-f]+)\.(?P<what>writing|replaced|removed)$")


def this_writer() -> dict[str, Any]:
    """Describe this process as no other will ever be: by its machine, its number and its start, not by the clock."""
    since_boot = started_since_boot()
    return {"host": _host(), "pid": os.getpid(), "started": started_at() if since_boot is None else since_boot}


def writer_token() -> str:
    """Return a new token for the name of a file that is being written, which names its writer."""
    started = round((started_since_boot() or 0.0) * 100)
    return f"{_host_hash()}{os.getpid():08x}{started:012x}{uuid.uuid4().hex[:8]}"


def clean_stale_files(root: str, patience: float = 3600.0) -> list[str]:
    """Remove what dead runs left of files half written, and give those back that were about to be replaced.

    Args:
        root: The directory that the files are in.
        patience: Seconds without a write after which a file counts as left whose name has no writer.

    Returns:
        What was removed or given back, by path.
    """
    try:
        with os.scandir(root) as entries:
            plain = sorted(each.name for each in entries if not each.is_dir(follow_symlinks=False))
    except OSError:
        return []
    found = []
    for match in filter(None, map(_LEFT_FILE.match, plain)):
        path, final = os.path.join(root, match.string), os.path.join(root, match["name"])
        lives = _is_token_alive(match["token"])
        if lives or (lives is None and _is_recent(LocalStorage(), path, patience)):
            continue
        try:
            if match["what"] == "replaced" and not os.path.lexists(final):
                os.rename(path, final)
                logger.warning(f"{final}: a run ended while it replaced this file. The one before it is back.")
            else:
                os.unlink(path)
        except OSError:
            continue  # another process was faster, or nothing may be written here
        found.append(path)
    return found


def _is_token_alive(token: str) -> bool | None:
    """Whether the process that has made a token runs; None if it is another machine's, or not known."""
    if len(token) != _TOKEN_LENGTH or token[:8] != _host_hash():
        return None
    started = int(token[16:28], 16) / 100
    return is_alive(int(token[8:16], 16), started) if started else None


def _host_hash() -> str:
    return hashlib.sha256(_host().encode()).hexdigest()[:8]


def clean_stale(root: str) -> list[str]:
    """Remove what dead runs left of checkpoints half written, and give those back that were about to be replaced.

    Args:
        root: The directory that the checkpoints are in, on a local or shared file system.

    Returns:
        What was removed or given back, by path.
    """
    storage = LocalStorage()
    found = []
    for path, match in _left_in(storage, root):
        final = os.path.join(root, match["name"])
        writing = os.path.join(root, f".{match['name']}.{match['token']}.writing")
        if match["what"] == "replaced":
            # A live run is in the middle of replacing only while the new one is there, under one name or the other.
            # The order matters: a rename makes it leave the first and appear under the second at once.
            new = next((one for one in (writing, final) if os.path.isdir(one)), None)
            if new is not None and _is_alive(storage, new):
                continue
        elif match["what"] == "writing" and _is_alive(storage, path):
            continue
        if match["what"] == "replaced" and not os.path.lexists(final):
            try:
                os.rename(path, final)
            except OSError:
                continue  # another process was faster, or nothing may be written here
            logger.warning(f"{final}: a run ended while it replaced this checkpoint. The one before it is back.")
        else:
            storage.discard(path)
        found.append(path)
    return found + clean_stale_files(root)


def replaced_beside(directory: str) -> str | None:
    """The checkpoint that had this name before a run died in replacing it, where there is none of the name now."""
    parent, name = os.path.split(directory)
    if os.path.lexists(directory):
        return None
    for path, match in _left_in(LocalStorage(), parent):
        if match["name"] == name and match["what"] == "replaced" and os.path.isfile(os.path.join(path, MANIFEST)):
            return path
    return None


def _left_in(storage: LocalStorage, root: str) -> list[tuple[str, re.Match[str]]]:
    """What writes may have left in a directory, and its names taken apart; the checkpoint written last comes first."""
    matches = [match for match in map(_LEFT.match, storage.children(root)) if match is not None]
    left = [(os.path.join(root, match.string), match) for match in matches]
    return sorted(left, key=lambda one: -storage.modified(os.path.join(one[0], MANIFEST)))


def _is_alive(storage: LocalStorage, place: str) -> bool:
    """Whether the process that wrote to a place still runs, as far as can be known."""
    path = os.path.join(place, WRITER_FILE)
    try:
        writer = decoded(storage.read(path), path)
        host, pid, started = writer["host"], int(writer["pid"]), float(writer["started"])
    except (OSError, CheckpointError, KeyError, TypeError, ValueError):
        return _is_recent(storage, place, UNRECORDED_PATIENCE)
    if host != _host():
        return _is_recent(storage, path, OTHER_HOST_PATIENCE)
    return is_alive(pid, started)


def _is_recent(storage: LocalStorage, path: str, patience: float) -> bool:
    return time.time() - storage.modified(path) < patience


def _host() -> str:
    """This machine since it was started, and this container: elsewhere process numbers mean other processes."""
    parts = [socket.gethostname(), boot_id()]
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not Linux
    return " ".join(filter(None, parts))
