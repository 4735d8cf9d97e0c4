"""`drivetrain plan`: hardware, candidates, advice, what-if questions, scripts, and one line for each bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drivetrain.planning import plan
from drivetrain.planning.candidates import Candidate, Facts, candidates
from drivetrain.planning.hardware import DEVICES, Cluster, Device, read_hardware
from drivetrain.planning.planner import epoch_of, largest, ranked, vary
from drivetrain.planning.run import estimate, simulate
from drivetrain.planning.workload import Workload
from drivetrain.runtime.errors import ConfigurationError
from tests.pool import ROOT

LM = "tests.planning.models:LM"
TOKENS = ("4x64:int64",)
SMALL = Workload(LM, inputs=TOKENS)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drivetrain", "plan", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() > 0 else x


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[x[:, 0] > 0])


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = float(self.layer.weight.mean())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


# Hardware


def test_names_and_files_of_hardware(tmp_path: Path) -> None:
    cluster = read_hardware("8xH100-80GBx4")
    assert (cluster.world_size, cluster.devices, cluster.machines) == (32, 8, 4)
    assert str(cluster) == "8xH100-80GBx4"
    assert read_hardware("A100-40GB").world_size == 1
    path = tmp_path / "mine.yaml"
    path.write_text(
        "device: {memory: 1.0e+10, tflops: {float32: 5}, memory_speed: 1.0e+11, link_speed: 1.0e+9, "
        "network_speed: 1.0e+9}\ndevices: 4\n"
    )
    mine = read_hardware(str(path))
    assert (mine.world_size, mine.device.name, mine.device.flops(torch.bfloat16)) == (4, "mine", 5e12)


def test_every_known_device_has_a_source() -> None:
    for device in DEVICES.values():
        assert device.source.startswith("https://"), device
        assert min(device.memory, device.memory_speed / 10) > 1e10
        assert "float32" in device.tflops


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH100-80G", "Did you mean 'H100-80GB'"),
        ("0xH100-80GB", "at least one device"),
        ("missing.yaml", "does not exist"),
        ("8x", "is not known"),
    ],
)
def test_wrong_hardware_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(")):
        read_hardware(text)


# Candidates


def test_refused_candidates_have_a_reason() -> None:
    cluster = read_hardware("8xH100-80GB")
    facts = Facts(blocks=6, plans_tp=True, heads=4, width=30, seq=100)
    found, refused = candidates(cluster, facts, [1], ["single", "ddp", "hsdp", "tp", "fsdp+tp", "cp", "pp"])
    assert {each.strategy for each in found} == {"single", "ddp", "parallel"}
    assert refused["tp, tp=8"] == "4 attention heads are not divisible by 8"
    assert refused["fsdp+tp, tp=4"] == "a width of 30 is not divisible by 4"
    assert refused["cp, cp=4"] == "100 tokens are not divisible by 2 x 4"
    assert refused["pp, pp=8"] == "6 blocks do not fill 8 stages"
    assert refused["hsdp, dp_replicate=1"] == "it needs several machines"
    assert "recomputes blocks" in refused["ddp, recomputed"]


@pytest.mark.parametrize(
    ("given", "said"),
    [({"batches": [0]}, "batch of 0 rows"), ({"strategies": ["fsdpp"]}, "Did you mean 'fsdp'")],
)
def test_wrong_candidates_are_refused(given: dict[str, list[int | str]], said: str) -> None:
    options = {"batches": [1], "strategies": ["fsdp"], **given}
    with pytest.raises(ConfigurationError, match=said):
        candidates(read_hardware("2xL4-24GB"), Facts(), **options)  # type: ignore[arg-type]


def test_offloading_needs_host_memory_instead_of_the_devices() -> None:
    cluster = read_hardware("2xL4-24GB")
    (candidate,), _ = candidates(cluster, Facts(), [4], ["fsdp+offload"], recompute=(False,))
    assert (candidate.way, "--fsdp_offload_params true" in candidate.flags(cluster)) == ("fsdp+offload", True)
    kept = estimate(SMALL, replace(candidate, offload=False), cluster)
    moved = estimate(SMALL, candidate, cluster)
    states = 16 * kept.parameters / 2
    assert moved.host >= states
    assert moved.peak <= kept.peak - 0.9 * 12 * kept.parameters / 2
    assert moved.seconds > kept.seconds


def test_stages_of_deepspeed_are_candidates() -> None:
    pytest.importorskip("deepspeed")
    found, refused = candidates(read_hardware("2xL4-24GB"), Facts(), [1], ["deepspeed:2"], recompute=(False,))
    (candidate,) = found
    assert not refused
    assert candidate.label == "deepspeed:2, bf16, batch 1"
    assert "--use_deepspeed --zero_stage 2" in " ".join(candidate.flags(read_hardware("2xL4-24GB")))
    assert candidate.configuration(read_hardware("2xL4-24GB"))["deepspeed_config"] == {"zero_stage": 2}
    assert "DeepSpeed(stage=2)" in candidate.python()
    assert candidates(read_hardware("L4-24GB"), Facts(), [1], ["deepspeed:3"])[1]["deepspeed:3, stage=3"]


def test_the_strategy_is_that_of_the_three_lines() -> None:
    import drivetrain

    names = {name: getattr(drivetrain, name) for name in ("FSDP", "Parallel")}
    for candidate in (
        Candidate("fsdp", 8, dp_replicate=2, checkpointing=True),
        Candidate("parallel", 8, tp=2, dp_replicate=2),
        Candidate("parallel", 4, pp=4, accumulation=4),
    ):
        line = candidate.python().splitlines()[1]
        made = eval(line.partition("strategy=")[2].partition(", precision")[0], names)
        assert repr(made) == repr(candidate.make("auto"))


# Estimates


@pytest.mark.parametrize("candidate", [Candidate("single", 1, "32", 4), Candidate("fsdp", 2, "bf16", 4)])
def test_a_step_with_values_needs_what_one_without_needs(candidate: Candidate, tmp_path: Path) -> None:
    torch.save(torch.zeros(4, 64, dtype=torch.int64), tmp_path / "batch.pt")
    valued = replace(SMALL, inputs=(), sample_inputs=str(tmp_path / "batch.pt"))
    ((expected,), (step,)) = simulate(SMALL, candidate), simulate(valued, candidate)
    assert step.peak == pytest.approx(expected.peak, rel=0.01)
    assert [(each.operation, each.bytes) for each in step.collectives] == [
        (each.operation, each.bytes) for each in expected.collectives
    ]


def test_sample_inputs_are_for_models_that_read_values(tmp_path: Path) -> None:
    torch.save((torch.ones(3, 2),), tmp_path / "batch.pt")
    source = f"{__name__}:Selects"
    made = plan(source, "L4-24GB", sample_inputs=str(tmp_path / "batch.pt"), strategies=["single"], jobs=1)
    assert made.best is not None
    assert made.best.candidate.batch == 3
    with pytest.raises(ConfigurationError, match=r"--sample-inputs '.*none.pt' cannot be read"):
        plan(source, "L4-24GB", sample_inputs=str(tmp_path / "none.pt"), strategies=["single"], jobs=1)


def test_measured_steps_correct_the_times() -> None:
    cluster = Cluster(Device("this-slow", 1e12, {"float32": 1e-6}, 1e9, 1e9, 1e9), 1)
    options = {"inputs": ["2x8:int64"], "strategies": ["single"], "precisions": ["32"], "recompute": [False], "jobs": 1}
    made = plan(LM, cluster, measures=True, **options)  # type: ignore[arg-type]
    (note,) = made.notes
    measured, predicted = (float(each.replace(",", "")) for each in re.findall(r"([\d,]+) ms", note))
    assert measured < predicted / 10  # since the described device is so slow
    assert made.results[0].estimate is not None
    assert 1000 * made.results[0].estimate.seconds == pytest.approx(measured, abs=1)
    assert made.to_dict()["notes"] == [note]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without an accelerator")
def test_steps_are_measured_on_the_planned_kind_of_device_only() -> None:
    with pytest.raises(ConfigurationError, match="which has no L4-24GB"):
        plan(LM, "L4-24GB", inputs=["2x8:int64"], strategies=["single"], measures=True, jobs=1)


def test_few_blocks_tell_what_all_need() -> None:
    """Also where the largest peak of a small model is at another place than that of the whole model."""
    workload = Workload(LM, inputs=TOKENS, kwargs={"blocks": 14, "vocabulary": 500})
    cluster = read_hardware("8xH100-80GB")
    for candidate in (
        Candidate("ddp", 8, "bf16", 4),
        Candidate("fsdp", 8, "bf16", 4, checkpointing=True),
        Candidate("parallel", 8, "32", 4, tp=2),
    ):
        few, full = (estimate(workload, candidate, cluster, full=each) for each in (False, True))
        assert few.peak == pytest.approx(full.peak, rel=0.01), candidate.label
        assert few.flops == pytest.approx(full.flops, rel=1e-6)
        assert few.seconds == pytest.approx(full.seconds, rel=0.01)
        assert few.traffic.keys() == full.traffic.keys()
        for name, (count, size) in few.traffic.items():
            if candidate.kind.has_buckets:  # of 25 MB each, so their number is not linear
                count = full.traffic[name][0]
            assert (count, size) == pytest.approx(full.traffic[name], rel=1e-6)


def test_shards_of_a_thousand_ranks_are_small() -> None:
    (one,), (many,) = (simulate(SMALL, Candidate("fsdp", count, "bf16", 4)) for count in (2, 1024))
    assert many.checkpoint_bytes < one.checkpoint_bytes / 100
    assert {each.ranks for each in many.collectives} == {tuple(range(1024))}


def test_the_advice_flips_with_memory_and_with_the_network() -> None:
    """A large model does not fit without sharding. A slow network makes sharding slower than copies."""
    base = read_hardware("4xH100-80GB")
    small = Cluster(replace(base.device, memory=90e6), 4)
    tight = plan(LM, small, inputs=TOKENS, strategies=["ddp", "fsdp"], recompute=[False], precisions=["32"], jobs=1)
    assert tight.best is not None
    assert tight.best.candidate.strategy == "fsdp"
    assert [result.fits for result in tight.results] == [True, False]
    slow = Cluster(replace(base.device, network_speed=1e7), 1, 4)
    wide = plan(LM, slow, inputs=TOKENS, strategies=["ddp", "fsdp"], recompute=[False], precisions=["32"], jobs=1)
    assert wide.best is not None
    assert wide.best.candidate.strategy == "ddp"
    assert wide.advice.startswith("Use ddp, 32, batch 4 on 1xH100-80GBx4")
    assert wide.best.estimate is not None
    assert set(wide.best.estimate.traffic) == {"all_reduce between machines"}
    # What if?
    varied = vary(wide, batch=[1, 8], world=[2, 4], jobs=1)
    assert [(each.candidate.world_size, each.candidate.batch) for each in varied] == [(2, 1), (2, 8), (4, 1), (4, 8)]
    peaks = [each.estimate.peak for each in varied if each.estimate is not None]
    assert peaks[0] < peaks[1]
    most = largest(tight, "batch", jobs=1)
    assert most is not None
    assert most.fits
    one_more = vary(tight, batch=[most.candidate.batch + max(2, most.candidate.batch // 8)], jobs=1)
    assert not one_more[0].fits
    found = epoch_of(wide.best, 1e9, price=2.0, mean_hours_between_failures=1000)
    assert found.seconds == pytest.approx(1e9 / wide.best.rate)
    assert found.price == pytest.approx(2.0 * 4 * found.seconds / 3600)
    assert found.save_every == pytest.approx((2 * found.checkpoint_seconds * 250 * 3600) ** 0.5)
    assert ranked(reversed(wide.results)) == list(wide.results)


# Bad input, one line each


@pytest.mark.parametrize(
    ("name", "inputs", "said"),
    [
        ("Reads", ("2x2",), "depends on values, through aten._local_scalar_dense"),
        ("Selects", ("2x2",), "depends on values, through aten.nonzero"),
        ("NeedsValues", ("2x2",), "test_plan.py, line \\d+.*--real-init"),
        ("Missing", ("2x2",), "'Missing' does not exist"),
    ],
)
def test_models_that_cannot_be_planned_are_refused(name: str, inputs: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        simulate(Workload(f"tests.planning.test_plan:{name}", inputs=inputs), Candidate("single", 1, "32", 2))
    assert "\n" not in str(raised.value)


def test_a_model_that_needs_values_is_planned_with_real_init() -> None:
    workload = Workload("tests.planning.test_plan:NeedsValues", inputs=("2x2",), real_init=True)
    (step,) = simulate(workload, Candidate("single", 1, "32", 2))
    assert step.parameters == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py", "--hardware", "2xL4-24GB"], "missing.py does not exist"),
        ([LM, "--hardware", "2xL4-24GB", "--", "--lr", "3"], "are arguments of a script, but"),
        ([LM, "--hardware", "2xL4-24GB"], "needs the shape of its inputs"),
        ([LM, "--hardware", "2xL4-24GB", "--input", "4x64:int64", "--batch", "0"], "batch of 0 rows"),
        ([LM, "--hardware", "2xL4", "--input", "4x64:int64"], "is not known"),
        ([LM, "--hardware", "2xL4-24GB", "--input", "4x64:int64", "--headroom", "200%"], "headroom"),
        ([LM, "--hardware", "2xL4-24GB", "--input", "4x64:int64", "--optimizer", "adamww"], "Did you mean 'adamw'"),
    ],
)
def test_bad_input_of_the_command_is_one_line(arguments: list[str], said: str) -> None:
    done = run(*arguments, "--jobs", "1")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


# Scripts and the command


def test_a_script_is_planned_with_its_own_model_batch_and_optimizer(tmp_path: Path) -> None:
    output = tmp_path / "plan.html"
    done = run(
        str(ROOT / "examples/char_lm.py"),
        "--hardware",
        "2xL4-24GB",
        "--strategies",
        "ddp,fsdp",
        "--jobs",
        "1",
        "--recompute",
        "no",
        "--json",
        "--output",
        str(output),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["candidate"]["strategy"] for each in found["results"]] == ["ddp", "fsdp"]
    assert found["launch"].startswith("drivetrain launch --num_processes 2 --mixed_precision bf16 ")
    assert found["results"][0]["collectives"]["all_reduce"]["count"] == 1
    assert output.stat().st_size > 10_000
    assert not (tmp_path / "drivetrain_logs").exists()


def test_no_process_outlives_the_command() -> None:
    command = [sys.executable, "-m", "drivetrain", "plan", LM, "--hardware", "8xL4-24GBx8", "--input", "64x64:int64"]
    process = subprocess.Popen([*command, "--kwargs", '{"blocks": 400}', "--full", "--jobs", "1"], cwd=ROOT)
    import psutil

    parent = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    while process.poll() is None and len(children) < 2:  # the estimating process, and multiprocessing's tracker
        children = parent.children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
