"""Pages made from what runs have left: what they show, that nothing in them is markup, and what they are read from."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain import ConfigurationError
from drivetrain.callbacks.report.charts import (
    COLUMNS,
    Lane,
    Markup,
    Sample,
    element,
    is_higher_better,
    json_within_script,
    kind_of,
    places_of,
    read_lanes,
    subject_of,
)
from drivetrain.callbacks.report.page import RunPage, comparison_of, distinct_names, page_of, write_page
from drivetrain.callbacks.report.record import Curve, RunValues, read_record, read_values, write_record, write_whole
from drivetrain.runtime.timing import PARTS
from drivetrain.trackers import CSVLogger, TensorBoardLogger
from tests.pool import ROOT

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def sample(step: int, **changed: float) -> Sample:
    values = dict.fromkeys(COLUMNS, 0.0) | {"time": 1e9 + step, "seconds": 1.0, "step": step, "epoch": step / 10}
    return Sample(**values | {"forward": 1.0, "cpu": 0.5, "gpu": math.nan} | changed)


def run_in(folder: Path, lr: float = 0.1, loss: float = 1.0, **changed: Any) -> Path:
    """The folder of a run of three epochs, as a Trainer leaves it."""
    logger = CSVLogger(folder.parent, "", folder.name)
    for step in range(1, 31):
        logger.log({"epoch": (step - 1) // 10, "train_loss": loss / step}, step)
        if step % 10 == 0:
            logger.log({"epoch": (step - 1) // 10, "val_loss": abs(step - 20) + loss, "val_acc": step / 30}, step)
    logger.finish()
    lane = Lane(folder, 0, {"host": "here"})
    for step in (10, 20, 30):
        lane.write(
            sample(step, steps_per_sec=10.0, samples_per_sec=40.0, memory=2.0**20, forward=0.75, data=0.25, lr=lr)
        )
    lane.close()
    record = {
        "state": "finished",
        "reason": "max_epochs=3 is reached",
        "started": 1e9,
        "updated": 1e9 + 90,
        "command": "python train.py",
        "progress": {"step": 30, "epoch": 3},
        "hyper_parameters": {"lr": lr, "width": 8},
        "best": {"monitor": "val_loss", "mode": "min", "value": loss, "path": "best.ckpt", "task": "Net"},
        "warnings": [[1e9, 3, "odd", 1], [1e9 + 1, 4, "even odder", 2]],
    }
    write_record(folder, record | changed)
    return folder


def charts_in(page: bytes) -> list[dict[str, Any]]:
    text = re.search(rb'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    return json.loads(text[1])  # type: ignore[no-any-return]


def shown(page: bytes) -> str:
    """The text of a page, without its scripts."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page.decode(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def test_a_page_has_everything_about_the_run(tmp_path: Path) -> None:
    page = page_of(RunPage.read(run_in(tmp_path / "digits")))
    text = shown(page)
    for part in (
        "finished",
        "python train.py",
        "1 min 30 s",
        "forward 75.0 %",
        "waiting for data 25.0 %",
        "Net.load_from_checkpoint(&#39;best.ckpt&#39;)",
        "Finished: max_epochs=3 is reached.",
        "lr 0.1",
    ):
        assert part in text, part
    assert text.index("step 3 odd") < text.index("step 4, 2 times even odder")
    assert '<td class="best">1</td>' in page.decode()  # the lowest val_loss, at step 20
    titles = [chart["title"] for chart in charts_in(page)]
    assert titles == [
        *("loss", "acc", "learning rate"),
        *("steps per second", "samples per second", "waiting for data", "memory in use", "CPU in use"),
    ]
    loss = charts_in(page)[0]
    assert loss["names"] == ["train_loss", "val_loss"]
    assert loss["data"][0] == list(range(1, 31))
    assert loss["data"][2][9] == 11


def test_a_page_shows_the_share_of_each_part(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "digits")
    (folder / "ranks" / "rank_0.csv").unlink()
    lane = Lane(folder, 0, {"host": "here"})
    shares = {name: 0.01 * (number + 1) for number, name in enumerate(PARTS[:-1])}
    lane.write(sample(30, **(shares | {"idle": 1.0 - sum(shares.values())})))
    lane.close()
    page = page_of(RunPage.read(folder))
    shown_shares = dict(re.findall(r"<li><i class=\"(c\d)\"></i>.*? ([\d.]+) %</li>", page.decode()))
    assert len(shown_shares) == len(PARTS)
    assert sum(map(float, shown_shares.values())) == pytest.approx(100.0)
    text = shown(page)
    for part in ("waiting for data 1.0 %", "waiting for other processes 5.0 %", "everything else 55.0 %"):
        assert part in text
    for color in shown_shares:  # in light and dark
        assert page.decode().count(f"--{color}: #") == 2


def test_nothing_outside_of_the_page_is_asked_for(tmp_path: Path) -> None:
    page = page_of(RunPage.read(run_in(tmp_path / "digits"))).decode()
    assert "default-src 'none'" in page
    assert not re.search(
        r"""(?:src|href)\s*=\s*["']?(?!data:)[\w/.]""", re.sub(r"<script>.*", "", page, flags=re.DOTALL)
    )
    assert "@import" not in page
    assert "url(" not in page


def test_nothing_that_a_run_holds_is_markup(tmp_path: Path) -> None:
    folder = run_in(
        tmp_path / "<b>run<b>",
        command=HOSTILE,
        reason=HOSTILE,
        state="failed",
        hyper_parameters={HOSTILE: HOSTILE},
        warnings=[[0, 1, HOSTILE, 1]],
        best={"monitor": HOSTILE, "value": 1.0, "path": HOSTILE},
    )
    logger = CSVLogger(tmp_path, "", folder.name)
    logger.log({f"val_{HOSTILE}": 1.0}, 40)
    logger.log_table("errors", [HOSTILE, "b"], [[HOSTILE, HOSTILE]], 40)
    logger.finish()
    (folder / "output.log").write_text(HOSTILE)
    runs = [RunPage.read(folder), RunPage.read(run_in(tmp_path / "other"))]
    for page in (page_of(runs[0]), comparison_of(runs)):
        assert page.count(b"alert(1)") >= 2
        assert b"<script>alert" not in page
        assert b"<img" not in page
        assert b"<b>run" not in page
        assert any(HOSTILE in name for chart in charts_in(page) for name in chart["names"])


def test_an_element_escapes_its_text_and_its_attributes() -> None:
    inner = element("b", HOSTILE)
    outer = element("p", inner, "&'", class_='"><i>', aria_label="", title="a'b")
    assert "<script" not in inner
    assert outer == f'<p class="&#34;&gt;&lt;i&gt;" title="a&#39;b">{inner}&amp;&#39;</p>'
    assert isinstance(outer, Markup)
    assert not isinstance(outer + HOSTILE, Markup)  # what is put together by hand is text again
    held = {"name": HOSTILE + "'&"}
    assert json.loads(json_within_script(json.dumps(held))) == held
    assert not set("<>&'") & set(json_within_script(json.dumps(held)))


def test_the_first_page_of_a_run_has_its_facts_and_no_curves(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "digits")
    page = write_page(folder, {"state": "running", "command": "python train.py"}, with_values=False).read_bytes()
    assert charts_in(page) == []
    assert "digits running" in shown(page)
    assert "python train.py" in shown(page)
    assert page.endswith(b"</html>\n")


def test_a_lane_for_each_rank_where_there_are_several(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "digits")
    assert not any(chart["stacked"] for chart in charts_in(page_of(RunPage.read(folder))))
    lane = Lane(folder, 1, {"host": "there"})
    lane.write(sample(30, forward=0.5, data=0.5, steps_per_sec=5.0))
    lane.close()
    charts = charts_in(page_of(RunPage.read(folder)))
    lanes = [chart for chart in charts if chart["stacked"]]
    assert [chart["title"] for chart in lanes] == ["rank 0 host=here", "rank 1 host=there"]
    assert lanes[1]["data"][1:3] == [[0.5], [0.5]]
    speed = next(chart for chart in charts if chart["title"] == "steps per second")
    assert speed["names"] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(("recorded", "rate"), [({}, 80), ({"data_shards": 2}, 80), ({"data_shards": 1}, 40)])
def test_a_batch_that_processes_share_counts_once(recorded: dict[str, int], rate: int, tmp_path: Path) -> None:
    folder = run_in(tmp_path / "digits", **recorded)
    lane = Lane(folder, 1, {"host": "there"})
    lane.write(sample(30, steps_per_sec=10.0, samples_per_sec=40.0))
    lane.close()
    assert f"samples per second {rate} " in shown(page_of(RunPage.read(folder)))


def test_a_comparison_overlays_curves_and_marks_what_differs(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / "a" / "version_0", lr=0.1), run_in(tmp_path / "b" / "version_0", lr=0.2, loss=0.5)]
    page = comparison_of([RunPage.read(run) for run in runs])
    loss = charts_in(page)[0]
    assert loss["names"][:2] == ["a/version_0 · train_loss", "a/version_0 · val_loss"]
    assert loss["runs"] == [0, 0, 1, 1]
    assert loss["dashed"] == [True, False, True, False]
    rate = next(chart for chart in charts_in(page) if chart["title"] == "learning rate")
    assert [values[0] for values in rate["data"][1:]] == [0.1, 0.2]
    rows = re.findall(r"<tr( class=\"differs\")?><th scope=\"row\">(\w+)</th>", page.decode())
    assert (' class="differs"', "lr") in rows
    assert ("", "width") in rows
    assert rows.index((' class="differs"', "lr")) < rows.index(("", "width"))
    [best] = re.findall(r"<tr><th scope=\"row\">val_loss \(lowest\)</th>(.*?)</tr>", page.decode())
    assert re.findall(r"<td( class=\"best\")?>([\d.]+),", best) == [("", "1"), (' class="best"', "0.5")]


def test_headings_of_a_comparison_stand_over_their_cells(tmp_path: Path) -> None:
    runs = [RunPage.read(run_in(tmp_path / name)) for name in ("a", "b")]
    tables = re.findall(r'<table class="data">(.*?)</table>', comparison_of(runs).decode(), re.DOTALL)
    assert len(tables) == 3
    for table in tables:
        head, *rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.DOTALL)
        are_left = ["text" in cell for cell in re.findall(r"<th([^>]*)>", head)[1:]]
        for row in rows:
            cells = re.findall(r"<td([^>]*)>", row)
            assert [bool(re.search("text|wide", cell)) for cell in cells] == are_left


def test_runs_are_compared_by_their_names(tmp_path: Path) -> None:
    for names, expected in ((("wide", "deep"), ["wide", "deep"]), (("same", "same"), ["a", "b"])):
        runs = [run_in(tmp_path / folder, name=name) for folder, name in zip("ab", names, strict=True)]
        text = shown(comparison_of([RunPage.read(run) for run in runs]))
        assert f"metric {' '.join(expected)} " in text


def test_names_of_compared_runs_are_as_long_as_they_must_be() -> None:
    assert distinct_names([Path("/r/x/version_0"), Path("/r/x/version_1")]) == ["version_0", "version_1"]
    assert distinct_names([Path("/r/x/v"), Path("/r/y/v")]) == ["x/v", "y/v"]
    assert len(set(distinct_names([Path("/r/x"), Path("/r/x")]))) == 2


def test_values_are_read_from_a_table_and_from_tensorboard_alike(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "events")]
    for logger in loggers:
        for step in range(3):
            logger.log({"epoch": 0, "loss": 1.0 - step / 4, "note": "text"} if step else {"loss": 1.0}, step)
        logger.finish()
    found = [read_values(logger.log_dir) for logger in loggers]
    for values in found:
        assert list(values.curves) == ["loss"]
        assert values.curves["loss"] == Curve([0.0, 1.0, 2.0], [1.0, 0.75, 0.5])
    [events] = Path(loggers[1].log_dir).glob("*tfevents*")
    assert read_values(events).curves == found[0].curves
    assert b"<h1>csv/version_0</h1>" in page_of(RunPage.read(loggers[0].log_dir))


@pytest.mark.parametrize("column", ["global_step", "_step", "anything"])
def test_tables_of_others_are_read(tmp_path: Path, column: str) -> None:
    (tmp_path / "mine.csv").write_text(f"{column},loss,name\n0,1.5,a\n1,nan,b\n2,0.5,c\n3,")
    curve = read_values(tmp_path).curves["loss"]
    assert (curve.steps, curve.values[0], curve.last) == ([0.0, 1.0, 2.0], 1.5, 0.5)
    assert curve.best(highest=False) == (0.5, 2.0)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_page_shows_the_images_of_the_run(kind: type[CSVLogger] | type[TensorBoardLogger], tmp_path: Path) -> None:
    logger = kind(tmp_path)
    rng = np.random.default_rng(0)
    for step in (10, 20):
        logger.log({"loss": 1.0}, step)
        logger.log_images({"digits": rng.random((3, 4, 4, 1)), "mask": rng.random((4, 4))}, step)
    logger.finish()
    page = page_of(RunPage.read(logger.log_dir)).decode()
    figures = dict(re.findall(r"<figure><figcaption><h3>(\w+)</h3>(.*?)</figure>", page, re.DOTALL))
    assert {name: figure.count("data:image/png;base64,") for name, figure in figures.items()} == {
        "digits": 6,
        "mask": 2,
    }
    for figure in figures.values():
        hidden = re.findall(r'<div class="frame" data-step="([^"]*)"( hidden="hidden")?>', figure)
        assert hidden == [("step 10", ' hidden="hidden"'), ("step 20", "")]


def test_only_the_newest_images_are_on_the_page(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step in range(20):
        logger.log_images({"noise": np.random.default_rng(step).random((400, 400, 3)), "dot": np.zeros((1, 1))}, step)
    logger.log({"loss": 1.0}, 20)
    logger.finish()
    page = page_of(RunPage.read(logger.log_dir)).decode()
    assert len(page) < 8e6
    figures = dict(re.findall(r"<h3>(noise|dot)</h3>(.*?)</figure>", page, re.DOTALL))
    steps = {name: re.findall(r'data-step="step (\d+)"', figure) for name, figure in figures.items()}
    assert steps["dot"] == [str(step) for step in range(8, 20)]
    assert 1 < len(steps["noise"]) < 12
    assert steps["noise"][-1] == "19"


def test_a_page_shows_the_newest_table_of_each_name(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log({"loss": 1.0}, 1)
    for step in (9, 10):
        logger.log_table("errors", ["digit", "count", "why"], [[each, step, "a <b>"] for each in range(70)], step)
    logger.log_table("classes-of", ["name", "id"], [["cat", 1]])
    logger.finish()
    page = page_of(RunPage.read(logger.log_dir))
    text = shown(page)
    assert "errors, step 10 digit count why 0 10 a &lt;b&gt; 1 10 a" in text
    assert "49 10 a &lt;b&gt; The first 50 of 70 rows." in text
    assert "step 9" not in text
    assert "classes-of name id cat 1" in text
    heads = re.findall(r"<thead>(.*?)</thead>", page.decode())
    assert any('count</th><th scope="col" class="text">why' in head for head in heads)


def test_event_files_without_tensorboard_name_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.out.tfevents.1").touch()
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(ConfigurationError, match=re.escape('pip install "drivetrain[tensorboard]"')):
        read_values(tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="contains no metrics of a run"):
        RunPage.read(tmp_path)


def test_long_curves_keep_their_extremes() -> None:
    values = [0.0] * 100_000
    values[54_321], values[777] = 9.0, -9.0
    thin = Curve(list(map(float, range(100_000))), values).thinned(1000)
    assert len(thin) <= 1010
    assert {9.0, -9.0} <= set(thin.values)
    assert thin.steps[-1] == 99_999
    assert thin.steps == sorted(thin.steps)


@pytest.mark.parametrize(
    ("name", "kind", "subject"),
    [
        ("train_loss_epoch", "Loss", "loss"),
        ("val/loss", "Loss", "loss"),
        ("val_accuracy", "Metrics", "accuracy"),
        ("lr-AdamW", "Learning rate", "lr_adamw"),
        ("grad_norm/0", "Gradient norm", "grad_norm"),
        ("speed/data_wait", "Data wait", "speed_data_wait"),
        ("train/device/samples_per_sec", "Throughput", "device_samples_per_sec"),
        ("val", "Metrics", "val"),
    ],
)
def test_curves_of_one_subject_share_a_chart(name: str, kind: str, subject: str) -> None:
    assert (kind_of(name), subject_of(name)) == (kind, subject)


def test_whether_higher_is_better_follows_from_the_name() -> None:
    assert [is_higher_better(name) for name in ("val_acc", "val_f1", "val_loss", "acc_loss", "perplexity")] == [
        *(True, True),
        *(False, False, False),
    ]


def test_a_lane_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lane = Lane(tmp_path, 0, {"host": "here"})
    lane.write(sample(1))
    lane.close()
    with (tmp_path / "ranks" / "rank_0.csv").open("a") as file:
        file.write("1000000002,1,")
    assert [each.step for each in read_lanes(tmp_path)[0][1]] == [1]


def test_a_lane_of_an_older_version_is_read_and_continued(tmp_path: Path) -> None:
    columns = COLUMNS[: COLUMNS.index("epoch")]
    folder = tmp_path / "ranks"
    folder.mkdir()
    cells = ",".join(str(getattr(sample(1), name)) for name in columns)
    (folder / "rank_0.csv").write_text(f"# host=here\n{','.join(columns)}\n{cells}\n")
    lane = Lane(tmp_path, 0, {"host": "here"})
    lane.write(sample(2))
    lane.close()
    first, second = read_lanes(tmp_path)[0][1]
    assert (first.step, second.step, second.epoch) == (1, 2, 0.2)
    assert math.isnan(first.epoch)


def test_places_of_a_run_grow_where_it_was_resumed_from_an_earlier_step() -> None:
    samples = [sample(step, epoch=step / 10) for step in (10, 20, 30)]
    resumed = [sample(step, epoch=step / 10, time=1e9 + 100 + step) for step in (22, 32)]
    places = places_of([*samples, *resumed], RunValues())
    assert places["step"] == [0, 10, 20, 22, 32]
    assert places["epoch"] == pytest.approx([0, 1, 2, 2.2, 3.2])
    assert all(map(float.__lt__, places["seconds"], places["seconds"][1:]))


def test_a_run_whose_process_is_gone_has_failed(tmp_path: Path) -> None:
    import os

    import psutil

    here = {"host": os.uname().nodename, "id": os.getpid(), "started": psutil.Process().create_time()}
    for process, state in ((here, "running"), ({**here, "started": 1.0}, "failed"), ({**here, "id": 2**22}, "failed")):
        write_record(tmp_path, {"state": "running", "process": process})
        assert read_record(tmp_path)["state"] == state
    write_record(tmp_path, {"state": "running", "process": {"host": "elsewhere"}, "due": 1.0})
    assert read_record(tmp_path)["state"] == "failed"


def test_a_page_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    target, ended, broken = tmp_path / "page", threading.Event(), []
    write_whole(target, b"0" * 500_000)

    def read() -> None:
        while not ended.is_set():
            content = target.read_bytes()
            if len(content) != 500_000 or len(set(content)) != 1:
                broken.append(len(content))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        write_whole(target, bytes([number]) * 500_000)
    ended.set()
    reader.join()
    assert broken == []
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_pages_are_made_without_a_template_engine_and_without_torch(tmp_path: Path) -> None:
    script = "import sys; from drivetrain.callbacks.report.page import write_page; write_page(sys.argv[1])"
    script += "; print(sorted({'jinja2', 'torch', 'tensorboard'} & set(sys.modules)))"
    command = [sys.executable, "-c", script, str(run_in(tmp_path / "run"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_page_is_written_into_the_folder(tmp_path: Path) -> None:
    assert write_page(run_in(tmp_path / "run")) == tmp_path / "run" / "report.html"
