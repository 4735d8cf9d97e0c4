"""Settings of the Megatron strategy."""

from __future__ import annotations

from drivetrain.launch.settings.setting import Group, Setting


def _megatron(name: str, help: str, kind: str, **more: object) -> Setting:
    return Setting(
        f"megatron_lm_{name}",
        help,
        kind,
        "Megatron (with --use_megatron_lm)",
        "megatron_lm_config",
        variable=f"DRIVETRAIN_MEGATRON_LM_{name.upper()}",
        theirs=f"MEGATRON_LM_{name.upper()}",
        **more,  # type: ignore[arg-type]
    )


_CHECKPOINTS = "a checkpoint holds the optimizer, and what is loaded is chosen where it is loaded"

MEGATRON = Group(
    "megatron_lm_config",
    "megatron_lm_",
    (
        _megatron("tp_degree", "Processes that share the computation of each layer.", "int", least=1),
        _megatron("pp_degree", "Stages that the layers are spread over.", "int", least=1),
        _megatron("context_parallel_size", "Processes that share each sequence.", "int", least=1),
        _megatron("expert_model_parallel_size", "Processes that the experts are spread over.", "int", least=1),
        _megatron("expert_tensor_parallel_size", "Processes that share each expert.", "int", least=1),
        _megatron("num_micro_batches", "Micro-batches of a step.", "int", least=1),
        _megatron("gradient_clipping", "Total norm to which gradients are clipped; 0 for none.", "float", least=0),
        _megatron("sequence_parallelism", "Split sequences where layers are not split.", "bool"),
        _megatron("use_distributed_optimizer", "Shard the optimizer's state over the data-parallel processes.", "bool"),
        _megatron("recompute_activations", "Compute attention again during the backward.", "bool"),
        _megatron("recompute_granularity", "full or selective.", "choice", choices=("full", "selective")),
        _megatron("recompute_method", "uniform or block.", "choice", choices=("uniform", "block")),
        _megatron("recompute_num_layers", "Layers of a block that is computed again.", "int", least=1),
        _megatron("decoder_last_pipeline_num_layers", "Layers of the last stage.", "int", least=1),
        _megatron("attention_dropout", "Rate of dropout in attention.", "float", least=0),
        _megatron("hidden_dropout", "Rate of dropout elsewhere.", "float", least=0),
        _megatron("attention_softmax_in_fp32", "Compute attention's softmax in 32 bits.", "bool"),
        _megatron("calculate_per_token_loss", "Average the loss over tokens, not over micro-batches.", "bool"),
        _megatron("optimizer_cpu_offload", "Keep the optimizer's state on the CPU.", "bool"),
        _megatron("overlap_cpu_optimizer_d2h_h2d", "Overlap that with copies.", "bool"),
        _megatron("use_precision_aware_optimizer", "Keep the optimizer's state in fewer bits.", "bool"),
        _megatron("attention_backend", "Accepted.", "bool", inert="Megatron chooses the attention that is there"),
        _megatron("eod_mask_loss", "Accepted.", "bool", inert="the task's loss_func decides"),
        _megatron("use_rotary_position_embeddings", "Accepted.", "bool", inert="the task's model_provider decides"),
        _megatron("no_load_optim", "Accepted.", "bool", inert=_CHECKPOINTS),
        _megatron("no_save_optim", "Accepted.", "bool", inert=_CHECKPOINTS),
        _megatron(
            "use_custom_fsdp",
            "false: --use_fsdp shards parameters.",
            "bool",
            inert="it is off",
            refused="Megatron's own FSDP is not used. Leave it out, or shard parameters with use_fsdp.",
        ),
        # Older files and plugins.
        _megatron("seq_length", "Accepted.", "int", inert="the batches decide"),
        _megatron("train_iters", "Accepted.", "int", inert="the loop decides"),
        _megatron("eval_iters", "Accepted.", "int", inert="the loop decides"),
        _megatron("eval_interval", "Accepted.", "int", inert="the loop decides"),
    ),
    switch="use_megatron_lm",
)
