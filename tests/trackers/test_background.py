from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.runtime.errors import TrackerError
from drivetrain.trackers import Tracker, group
from drivetrain.trackers.group import BackgroundTracker


class Recorded(Tracker):
    """Keeps what it is given, once `gate` is open, and the thread that gave it."""

    name = "recorded"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()

    def _keep(self, *call: Any) -> None:
        assert self.gate.wait(20)
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)

    def start(self) -> None:
        self._keep("start")

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._keep("configuration", dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self._keep("log", dict(values), step)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self._keep("images", {name: [image.shape for image in images] for name, images in values.items()}, step)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self._keep("histogram", {name: each.tolist() for name, each in values.items()}, step)

    def log_table(self, name: str, columns: Any = None, data: Any = None, step: int | None = None) -> None:
        self._keep("table", name, columns, data, step)

    def finalize(self, status: str = "completed", message: str = "") -> None:
        self._keep("finalize", status, message)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    @property
    def tracker(self) -> Any:
        return "raw"


class Broken(Recorded):
    """Raises in every third call of `log`."""

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        super().log(values, step)
        if step is not None and step % 3 == 0:
            raise ConnectionError(f"server said no at step {step}\nwith details")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_calls_are_made_in_order_on_one_other_thread_and_the_run_is_opened_first() -> None:
    inner = Recorded()
    tracker = BackgroundTracker(inner)
    tracker.store_init_configuration({"lr": 0.1})
    for step in range(3):
        tracker.log({"loss": step}, step)
    tracker.finalize("failed", "ValueError: no")
    assert inner.calls == [
        ("start",),
        ("configuration", {"lr": 0.1}),
        *[("log", {"loss": step}, step) for step in range(3)],
        ("finalize", "failed", "ValueError: no"),
    ]
    assert inner.threads == {"tracker-Recorded"}
    assert "tracker-Recorded" not in {thread.name for thread in threading.enumerate()}


def test_a_caller_is_not_kept_waiting_by_a_slow_tracker() -> None:
    inner = Recorded()
    inner.gate.clear()
    tracker = BackgroundTracker(inner)
    started = time.monotonic()
    for step in range(500):
        tracker.log({"loss": 1.0}, step)
    assert time.monotonic() - started < 1
    assert inner.calls == []
    inner.gate.set()
    tracker.finish()
    assert len([call for call in inner.calls if call[0] == "log"]) == 500
    assert tracker.lost == 0


def test_what_finds_no_room_in_the_queue_is_counted_and_reported_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    inner = Recorded()
    inner.gate.clear()
    tracker = BackgroundTracker(inner, limit=10)
    for step in range(25):
        tracker.log({"a": 1.0, "b": 2.0}, step)
    inner.gate.set()
    tracker.finish()
    assert tracker.lost == 30
    full, report = warnings_in(caplog)
    assert full.startswith("Recorded: It is slower than the run, so its queue is full.")
    assert report == "Recorded lost 30 of 50 values: 30 by It is slower than the run, so its queue is full."


def test_a_tracker_that_raises_in_the_middle_warns_once_and_is_called_again(caplog: pytest.LogCaptureFixture) -> None:
    inner = Broken()
    tracker = BackgroundTracker(inner)
    for step in range(1, 11):
        tracker.log({"loss": 1.0}, step)
    tracker.finish()
    assert [call[2] for call in inner.calls if call[0] == "log"] == list(range(1, 11))
    assert tracker.lost == 3
    once, report = warnings_in(caplog)
    assert once == "Broken: ConnectionError: server said no at step 3 The run continues without these values."
    assert report == "Broken lost 3 of 10 values: 3 by ConnectionError: server said no at step #."


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TrackerError("It has no key. Set KEY."), "Refused: It has no key. Set KEY."),
        (OSError("no route"), "Refused: It cannot be started: OSError: no route."),
        (SystemExit(3), "Refused: It cannot be started: SystemExit: 3."),
    ],
)
def test_one_that_cannot_start_is_tried_once_a_run(
    error: BaseException, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(Recorded):
        tries = 0

        def start(self) -> None:
            self.tries += 1
            raise error

    inner = Refused()
    tracker = BackgroundTracker(inner)
    for step in range(4):
        tracker.log({"loss": 1.0}, step)
    assert not tracker.tracker  # takes calls, and does nothing
    tracker.experiment.log_image("x")
    tracker.finish()
    assert (inner.tries, inner.calls, tracker.lost) == (1, [], 4)
    assert warnings_in(caplog)[0] == f"{message} The run continues without it."
    tracker.log({"loss": 1.0}, 5)
    tracker.finish()
    assert inner.tries == 2


def test_the_end_of_a_run_waits_for_a_slow_tracker_only_so_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group, "FINISH_SECONDS", 0.2)
    inner = Recorded()
    inner.gate.clear()
    tracker = BackgroundTracker(inner)
    for step in range(7):
        tracker.log({"loss": 1.0}, step)
    started = time.monotonic()
    tracker.finish()
    assert 0.1 < time.monotonic() - started < 5
    inner.gate.set()
    assert tracker.lost >= 6  # one call may have been under way
    assert "not done 0 s after the end of the run" in warnings_in(caplog)[0]


def test_values_are_those_of_the_moment_they_were_logged() -> None:
    inner = Recorded()
    inner.gate.clear()
    tracker = BackgroundTracker(inner)
    values, weights, image = {"loss": torch.tensor(0.5)}, torch.ones(2), torch.zeros(3, 4, 5)
    tracker.log(values, 1)
    tracker.log_histogram({"w": weights}, 1)
    tracker.log_images({"x": image, "two": torch.zeros(2, 1, 4, 5)}, 1)
    rows = [[1, 2]]
    tracker.log_table("t", ["a", "b"], rows, 1)
    values["loss"] += 1
    weights.zero_()
    rows[0][0] = 9
    inner.gate.set()
    tracker.finish()
    assert inner.calls[1:-1] == [
        ("log", {"loss": 0.5}, 1),
        ("histogram", {"w": [1.0, 1.0]}, 1),
        ("images", {"x": [(4, 5, 3)], "two": [(4, 5, 1), (4, 5, 1)]}, 1),
        ("table", "t", ["a", "b"], [[1, 2]], 1),
    ]


def test_a_checkpoint_waits_for_one_that_is_behind_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inner = Recorded()
    tracker = BackgroundTracker(inner)
    tracker.log({"loss": 1.0}, 1)
    assert tracker.state_dict() == {"calls": 2}
    monkeypatch.setattr(group, "STATE_SECONDS", 0.2)
    inner.gate.clear()
    tracker.log({"loss": 1.0}, 2)
    started = time.monotonic()
    assert [tracker.state_dict() for _ in range(50)] == [{"calls": 2}] * 50
    assert time.monotonic() - started < 5
    inner.gate.set()
    tracker.finish()
    assert "may start a new tracker run" in warnings_in(caplog)[0]


def test_the_raw_object_is_given_once_the_run_is_open() -> None:
    tracker = BackgroundTracker(Recorded())
    assert tracker.experiment == "raw"
    tracker.finish()


def test_a_run_that_was_never_used_is_neither_opened_nor_closed() -> None:
    inner = Recorded()
    tracker = BackgroundTracker(inner)
    tracker.save()
    assert tracker.state_dict() == {"calls": 0}
    tracker.finalize("failed")
    assert inner.calls == []


def test_on_another_process_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(group.PartialState, "existing", classmethod(lambda cls: None))
    inner = Recorded()
    tracker = BackgroundTracker(inner)
    tracker.log({"loss": torch.ones(())}, 1)
    assert not tracker.tracker
    tracker.finish()
    assert inner.calls == []


def test_secrets_reach_neither_the_tracker_nor_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "planted-value")

    class Leaking(Recorded):
        def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
            super().log_text(values, step)
            raise ValueError("the server refused planted-value")

    inner = Leaking()
    tracker = BackgroundTracker(inner)
    tracker.log_hyperparams({"lr": 0.1, "password": "x", "nested": {"url": "planted-value"}})
    tracker.log({"note": "planted-value"}, 1)
    tracker.log_text({"note": "planted-value"}, 1)
    tracker.finalize("failed", "ValueError: planted-value")
    assert "planted-value" not in repr(inner.calls) + caplog.text
    assert inner.calls[1] == ("configuration", {"lr": 0.1, "password": "<hidden>", "nested": {"url": "<hidden>"}})


def test_images_of_every_form_become_bytes() -> None:
    from drivetrain.trackers.base import as_images

    ramp = torch.linspace(0, 1, 12).reshape(3, 4)
    forms = {"gray": ramp, "tensor": ramp.expand(3, 3, 4), "array": ramp.expand(3, 3, 4).permute(1, 2, 0).numpy()}
    found = as_images(forms)
    expected = np.rint(ramp.numpy() * 255).astype(int)
    assert all(np.abs(image.astype(int) - expected[..., None]).max() <= 1 for [image] in found.values())
    assert {name: image.shape for name, [image] in found.items()} == {
        "gray": (3, 4, 1),
        "tensor": (3, 4, 3),
        "array": (3, 4, 3),
    }
    assert as_images({"bytes": np.full((2, 2, 3), 7, np.uint8)})["bytes"][0].max() == 7
    with pytest.raises(ValueError, match=r"'odd' has the shape \(2, 5, 7\)"):
        as_images({"odd": torch.zeros(2, 5, 7)})
