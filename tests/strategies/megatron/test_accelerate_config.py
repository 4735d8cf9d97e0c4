"""Accelerate's names for the options of Megatron; needs no megatron-core."""

from __future__ import annotations

import pytest

from drivetrain import ConfigurationError
from drivetrain.strategies.megatron.configuration import arguments_from


def test_the_keys_that_accelerate_config_writes_are_arguments() -> None:
    written = {
        "megatron_lm_gradient_clipping": 1.0,
        "megatron_lm_num_micro_batches": 2,
        "megatron_lm_pp_degree": 2,
        "megatron_lm_recompute_activations": True,
        "megatron_lm_sequence_parallelism": True,
        "megatron_lm_tp_degree": 2,
        "megatron_lm_use_distributed_optimizer": True,
    }
    assert arguments_from(written) == {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "sequence_parallel": True,
        "distributed_optimizer": True,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "recompute": "selective",
    }


def test_further_keys_go_to_the_configurations_of_megatron_core() -> None:
    given = {
        "expert_model_parallel_size": 2,
        "context_parallel_size": 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "hidden_dropout": 0.1,
        "use_precision_aware_optimizer": True,
        "tp_degree": None,
        "gradient_clipping": 0,
    }
    assert arguments_from(given) == {
        "expert_parallel": 2,
        "context_parallel": 2,
        "transformer": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "hidden_dropout": 0.1,
        },
        "optimizer": {"use_precision_aware_optimizer": True},
    }


def test_what_the_loop_decides_is_logged(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    assert arguments_from({"megatron_lm_train_iters": 10}) == {}
    assert "Trainer(max_steps)" in capsys.readouterr().err + caplog.text


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"megatron_lm_tp_degre'.*tp_degree"):
        arguments_from({"megatron_lm_tp_degre": 2})
