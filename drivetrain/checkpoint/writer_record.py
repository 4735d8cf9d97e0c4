"""Who writes a checkpoint, so that what dead runs left behind is distinguished from what a live one is writing."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any

import psutil

from drivetrain.checkpoint.manifest import WRITER_FILE, decoded
from drivetrain.checkpoint.storage import MANIFEST, LocalStorage
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.own_process import started_at

logger = get_logger(__name__)

OTHER_HOST_PATIENCE = 24 * 3600.0
"""Seconds after which a write on another machine, whose processes cannot be seen from here, counts as dead."""

UNRECORDED_PATIENCE = 600.0
"""Seconds after which a write that does not say whose it is counts as dead: saying so is the first thing it does."""

_LEFT = re.compile(r"^\.(?P<name>.+)\.(?P<token>[0-9a-f]+)\.(?P<what>writing|replaced|removed)$")


def this_writer() -> dict[str, Any]:
    """This process, as nothing else will ever be described."""
    return {"host": _host(), "pid": os.getpid(), "started": started_at()}


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
    return found


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
    try:
        process = psutil.Process(pid)
        # A later process may have the same number, but not the same start; clocks are adjusted, so not exactly.
        same = abs(process.create_time() - started) < 2.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_recent(storage: LocalStorage, path: str, patience: float) -> bool:
    return time.time() - storage.modified(path) < patience


def _host() -> str:
    """This machine since it was started, and this container: elsewhere process numbers mean other processes."""
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not Linux
    return " ".join(parts)
