"""DeepSpeed beside one plain process: checkpoints, stand-ins, partitioned building, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from drivetrain import DeepSpeed
from drivetrain.cli.main import cli
from tests.launch.launching import launch, write_script
from tests.pool import ProcessesFailed, run_in_processes
from tests.strategies.fsdp_runs import NetTask, loader
from tests.strategies.quiet import quiet_trainer

pytestmark = [
    pytest.mark.sharded,
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="deepspeed is missing: pip install 'drivetrain[deepspeed]'"
    ),
]

# What sums in another order may differ by.
EXACT = 2e-6


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def everyone(directory):
    from tests.strategies.deepspeed_runs import RUNS, run_all

    return run_in_processes(run_all, 2, args=(list(RUNS), str(directory)), timeout=240)


@pytest.fixture
def result_of(everyone):
    def find(name: str) -> Any:
        for rank, results in enumerate(everyone):
            succeeded, value = results[name]
            assert succeeded, f"rank {rank}:\n{value}"
        return everyone[0][name][1]

    return find


def assert_all_below(gaps: dict[Any, float], limit: float) -> None:
    assert {name: gap for name, gap in gaps.items() if not gap <= limit} == {}


def test_a_run_goes_on_exactly_under_the_same_stage_or_another_or_ddp(result_of):
    gaps = result_of("resume_under_any_stage")
    assert len(gaps) >= 16
    assert_all_below(gaps, EXACT)


def test_a_run_goes_on_exactly_with_its_master_weights(result_of):
    assert_all_below(result_of("resume_with_master_weights"), 0.0)


def test_deepspeeds_own_checkpoints_go_on_exactly(result_of):
    assert_all_below({stage: gap for stage, (gap, _) in result_of("native_checkpoints").items()}, 0.0)


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_weights_come_out_of_deepspeeds_own_checkpoints(result_of, directory, tmp_path, stage):
    _, expected = result_of("native_checkpoints")[stage]
    arguments = ["merge-weights", str(directory / "native_checkpoints" / stage), str(tmp_path / "out")]
    assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    # Tied weights are written once; a count of batches is none.
    assert expected.keys() - found.keys() <= {"tied.weight", "norm.num_batches_tracked"}


def test_zero_3_takes_parameters_apart_where_they_are_made(result_of):
    found = result_of("built_in_parts")
    assert all(found["partitioned"])
    assert found["gap"] <= EXACT
    assert found["losses"][0] == pytest.approx(found["losses"][1], abs=EXACT)


def test_optimizer_and_scheduler_of_the_configuration(result_of):
    for gap, lr in result_of("optimizer_of_the_configuration").values():
        assert gap <= EXACT
        assert lr == pytest.approx(1e-2 * (0.1 + 0.9 * 3 / 4))  # after four steps


def test_the_configurations_clipping_is_the_trainers(result_of):
    assert_all_below(result_of("clipped_by_the_configuration"), 0.0)


def test_gradients_are_clipped_by_value(result_of):
    assert_all_below(result_of("clipped_by_value"), EXACT)


def test_gradients_of_a_step_left_out_count_for_nothing(result_of):
    assert_all_below(result_of("a_step_left_out"), EXACT)


def test_a_model_can_be_fitted_again(result_of):
    assert_all_below(result_of("fitted_twice"), EXACT)


def test_experts_that_only_some_processes_use(result_of):
    assert result_of("mixture_of_experts") <= EXACT


def test_several_models_have_an_engine_each(result_of):
    assert_all_below(result_of("two_models"), EXACT)


def test_evaluation_and_checkpoints_see_rank_0s_buffers(result_of):
    assert result_of("unshared_buffers")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fp16", "precision='fp16' cannot run under strategy='deepspeed' on the CPU"),
        ("fp16-true", "precision='fp16-true' cannot run under strategy='deepspeed' on the CPU"),
        ("64", "precision='64' cannot run under strategy='deepspeed'"),
        ("zero option", "no zero_optimization option 'overlap_com'. Did you mean 'overlap_comm'?"),
        ("accumulation", "says gradient_accumulation_steps=4, but Trainer(accumulate_grad_batches=1)"),
        ("clipping", "says gradient_clipping=1.0, but Trainer(gradient_clip_val=0.5)"),
        ("clipping in a loop", "says gradient_clipping=1.0, but the loop clips to 0.5"),
        ("two optimizers", "drives one optimizer, but 2 hold parameters of this NetTask"),
        ("L-BFGS", "a closure"),
        ("two models at stage 0", "Use stage 1, 2 or 3, or make them one model"),
        ("unprepared", "was not prepared together with its model"),
        ("moe", "no module of such a class. Did you mean 'Mixture'?"),
        ("nvme", "async_io"),
    ],
)
def test_what_cannot_work_is_refused(result_of, case, message):
    assert message in result_of("refusals")[case]


def fit_with_a_step_left_out() -> None:
    quiet_trainer(DeepSpeed(stage=3)).fit(NetTask(skipped=0), loader())


def test_a_step_left_out_on_one_process_is_refused_at_stage_3():
    with pytest.raises(ProcessesFailed, match=r"NetTask.training_step returned None on rank 0"):
        run_in_processes(fit_with_a_step_left_out, 2, timeout=60)


SCRIPT = """
    import torch
    from drivetrain import Accelerator

    accelerator = Accelerator(strategy="deepspeed_stage_3")
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 3)).mean())
    optimizer.step()
    print("trained on", accelerator.num_processes, "processes,", accelerator.state.backend, flush=True)
"""


@pytest.mark.slow
def test_torchs_agent_starts_it(tmp_path):
    """No MPI, no hostfile, no launcher of DeepSpeed's own; and nothing is compiled."""
    script = write_script(tmp_path, SCRIPT)
    built = str(tmp_path / "built")
    ended = launch("--cpu", "--num_processes", "2", script, cwd=tmp_path, TORCH_EXTENSIONS_DIR=built)
    assert ended.code == 0, ended.err
    assert ended.out.count("trained on 2 processes, gloo") == 2
    assert not (tmp_path / "built").exists()
