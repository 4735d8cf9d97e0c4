"""FSDP beside the numbers: what is divided, what is kept, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drivetrain import FSDP, ConfigurationError, Trainer
from tests.pool import ProcessesFailed, run_in_processes
from tests.strategies import fsdp_runs
from tests.strategies.fsdp_runs import NetTask, loader, run_all
from tests.strategies.quiet import quiet_trainer

pytestmark = pytest.mark.sharded

EXACT = 2e-6


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """What every run saw on each of two processes; they share one pair of processes."""
    return run_in_processes(run_all, 2, args=(list(fsdp_runs.RUNS),), timeout=180)


@pytest.fixture(params=[0, 1])
def here(request, seen) -> dict[str, Any]:
    return seen[request.param]


def test_an_optimizer_made_before_goes_on_with_the_shards_of_its_parameters(here):
    found = here["follows_the_parameters"]
    assert found.pop("gap") < EXACT
    assert all(found.values()), found


def test_each_process_holds_its_share_of_parameters_and_moments(here):
    found = here["divides_evenly"]
    assert found["share"] == pytest.approx(0.5, abs=0.06)
    assert found["moments per parameter"] == 2


def test_frozen_parameters_beside_trained_ones(here):
    assert here["trains_adapters"] < EXACT


def test_tied_weights_stay_tied(here):
    assert here["ties_weights"] < EXACT


def test_blocks_that_share_a_weight_are_divided_with_what_is_around_them(here):
    found = here["ties_weights_across_units"]
    assert found["units"] == ["", "blocks.1"]
    assert found["gap"] < EXACT


def test_ignored_modules_and_scalars_stay_whole_and_are_trained_all_the_same(here):
    found = here["keeps_some_whole"]
    blocks = [f"net.blocks.1.{name}" for name in ("linear.bias", "linear.weight", "norm.bias", "norm.weight")]
    assert found["whole"] == [*blocks, "net.head.weight", "temperature"]
    assert found["gap"] < EXACT


def test_whole_parameters_in_accumulation_windows(here):
    assert here["keeps_some_whole_in_windows"] < EXACT


def test_several_models_with_optimizers_of_their_own_or_one_over_both(here):
    assert here["several_models"] < EXACT


def test_a_model_built_without_values_starts_as_a_plain_one(seen):
    for rank, each in enumerate(seen):
        found = each["builds_without_values"]
        assert found["meta: built"] == 0
        assert (found["rank0: built"] > 0) == (rank == 0)
        for init in ("meta", "rank0"):
            assert found[f"{init}: start"] == 0
            assert found[f"{init}: end"] < EXACT
            assert found[f"{init}: table"]


def test_a_module_that_does_not_say_how_it_starts_is_named(here):
    assert "Unheard cannot make them" in here["refuses_to_guess_values"]


def test_activations_are_recomputed_and_the_numbers_stay(here):
    found = here["recomputes"]
    assert {name: calls for name, (calls, _) in found.items()} == {"kept": 9, "recomputed": 18, "offloaded": 18}
    assert max(gap for _, gap in found.values()) < EXACT


def test_blocks_are_compiled(here):
    assert here["compiles"]["gap"] < EXACT
    assert here["compiles"]["graphs"] > 0


def test_copies_are_divided_models_of_their_own_and_averages_follow(here):
    found = here["copies"]
    assert found["average"] < EXACT
    assert found["loaded"] == 0
    assert found["untouched"] == 0
    assert found["moved"] > 0
    assert found["classes"] == ["FSDPNet", "FSDPBlock"]
    assert found["sharded"]


def test_overflow_in_one_shard_skips_the_step_everywhere(here):
    assert here["skips_together"] == {"overflow": (True, False), "clean": (False, True), "scale": 4.0}


@pytest.mark.parametrize("norm", ["2.0", "1.0", "inf"])
def test_the_norm_is_that_of_whole_and_divided_gradients_together(here, norm):
    off, gap, kind = here["clips"][norm]
    assert off < 1e-5
    assert gap < EXACT
    assert kind == "Tensor"


def test_summoned_parameters_are_whole_and_written_back_where_asked(here):
    found = here["summons"]
    assert found["read"] == 0
    assert found["not written"] == 0
    assert found["written"] < EXACT


def test_load_state_dict_takes_whole_tensors(here):
    assert here["loads_whole_tensors"] == {"model": 0, "block": 0}


def test_inference_before_the_first_step_changes_nothing(here):
    found = here["evaluates_first"]
    assert found["sharded"]
    assert found["gap"] < EXACT


def test_parameters_that_others_use_are_reduced_where_asked(here):
    assert here["reduces_unused"] < EXACT


def test_an_optimizer_prepared_apart_from_its_model_is_refused(here):
    assert "AdamW holds parameters as they were before the model was sharded" in here["refuses_stale_parameters"]


def test_other_methods_than_forward_gather_too(here):
    assert here["calls_other_methods"] == 0


def test_uneven_inputs_are_refused(here):
    assert "all need as many batches" in here["refuses_to_join"]


def test_a_callback_that_averages_the_task_and_validates_with_it(here):
    found = here["averages_in_the_trainer"]
    assert max(found.values()) < 5e-6, found


def test_a_task_is_fitted_by_one_trainer_and_validated_by_another(here):
    found = here["fits_again"]
    assert max(found.values()) < 5e-6, found


def test_optimizing_by_hand_with_two_backwards_in_a_step(here):
    assert here["optimizes_by_hand"] < EXACT


def test_a_window_that_is_left_open_is_forgotten(here):
    assert here["leaves_a_window_open"] < EXACT


def test_a_step_left_out_on_one_process_is_refused():
    with pytest.raises(ProcessesFailed, match=r"NetTask.training_step returned None on rank 0"):
        run_in_processes(fit_with_a_step_left_out, 2, timeout=30)


def fit_with_a_step_left_out() -> None:
    quiet_trainer("fsdp").fit(NetTask(skipped=0), loader())


def test_weights_are_streamed_from_files(tmp_path):
    state = fsdp_runs.weights_to_stream()
    names = sorted(set(state) - {"net.head.weight"})  # tied: one name is enough
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: state[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for each in run_in_processes(fsdp_runs.streams_weights, 2, args=(str(tmp_path),)):
        assert each == {"": (True, 0.0)}
    save_file({"net.tokens.weight": state["net.tokens.weight"]}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ProcessesFailed, match="holds the weights of another model: not in it"):
        run_in_processes(fsdp_runs.streams_weights, 2, args=(str(tmp_path),), timeout=30)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"replicate_size": 0}, "replicate_size must be a whole number of at least 1, got 0"),
        ({"init": "rank"}, "init must be one of 'rank0', 'meta', got 'rank'. Did you mean 'rank0'?"),
        ({"activation_offload": True}, "needs activation_checkpointing"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward must be"),
        ({"compile": "inductor"}, "compile must be True, False or a dict"),
    ],
)
def test_options_that_cannot_be(options, says):
    with pytest.raises(ConfigurationError, match=says.replace("?", r"\?")):
        FSDP(**options)


def test_copies_that_do_not_divide_the_processes():
    with pytest.raises(ConfigurationError, match="replicate_size=2 does not divide the 1 processes of this run"):
        Trainer(accelerator="cpu", strategy=FSDP(replicate_size=2), logger=False)


def test_one_process_is_enough():
    trainer = quiet_trainer("fsdp")
    task = NetTask()
    trainer.fit(task, loader(8))
    state = trainer.strategy.state.full(trainer.model)
    assert fsdp_runs.gap(state, fsdp_runs.plain_task(1)) < EXACT
    assert torch.equal(state["net.scale"], torch.tensor([2.0]))
