"""Settings of number formats and of compilation, and of a launch through MPI."""

from __future__ import annotations

from drivetrain.launch.settings.setting import Group, Setting


def _fp8(name: str, help: str, kind: str, keys: tuple[str, ...] = (), **more: object) -> Setting:
    return Setting(
        f"fp8_{name}",
        help,
        kind,
        "8-bit floats (with --mixed_precision fp8)",
        "fp8_config",
        keys,
        variable=f"DRIVETRAIN_FP8_{name.upper()}",
        theirs=f"ACCELERATE_FP8_{name.upper()}",
        **more,  # type: ignore[arg-type]
    )


FP8 = Group(
    "fp8_config",
    "fp8_",
    (
        _fp8("backend", "ao (torchao), te (TransformerEngine) or msamp.", "choice", choices=("ao", "te", "msamp")),
        _fp8("use_autocast_during_eval", "te: use 8-bit floats in evaluation too.", "switch"),
        _fp8("margin", "te: margin of the scales.", "int"),
        _fp8("interval", "te: accepted; scales are computed in every step.", "int"),
        _fp8("format", "te: HYBRID, E4M3 or E5M2.", "choice", choices=("HYBRID", "E4M3", "E5M2"), metavar="NAME"),
        _fp8("amax_history_len", "te: steps of the history.", "int", ("fp8_amax_history_length",), least=1),
        _fp8(
            "amax_compute_algo",
            "te: max or most_recent.",
            "choice",
            ("fp8_amax_compute_algorithm",),
            choices=("max", "most_recent"),
            metavar="NAME",
        ),
        _fp8(
            "override_linear_precision",
            "te: compute the three products of a layer in more bits; only false,false,false.",
            "bools",
            metavar="BOOL,BOOL,BOOL",
        ),
        _fp8("use_mxfp8_block_scaling", "te: one scale for each block of 32.", "bool"),
        _fp8("opt_level", "msamp: O1 or O2.", "choice", ("fp8_optimization_level",), choices=("O1", "O2")),
        _fp8("enable_fsdp_float8_all_gather", "ao: gather shards in 8-bit floats.", "bool"),
        _fp8("pad_inner_dim", "ao: pad products to multiples of 16.", "bool"),
    ),
)
FP8_SETTINGS_OF = {
    "ao": ("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim"),
    "te": tuple(each.name for each in FP8.settings[1:9]),
    "msamp": ("fp8_opt_level",),
}

_BACKENDS = (
    *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt"),
    *("onnxrt", "tensorrt", "aot_torchxla_trace_once", "torhchxla_trace_once", "torchxla_trace_once", "tvm"),
    *("hpu_backend", "neuron", "openxla"),
)


def _dynamo(name: str, help: str, kind: str, **more: object) -> Setting:
    return Setting(
        f"dynamo_{name}",
        help,
        kind,
        "torch.compile",
        "dynamo_config",
        variable=f"DRIVETRAIN_DYNAMO_{name.upper()}",
        theirs=f"ACCELERATE_DYNAMO_{name.upper()}",
        **more,  # type: ignore[arg-type]
    )


DYNAMO = Group(
    "dynamo_config",
    "dynamo_",
    (
        _dynamo(
            "backend", "Compile prepared models: inductor, aot_eager, ...", "choice", choices=_BACKENDS, metavar="NAME"
        ),
        _dynamo(
            "mode",
            "default, reduce-overhead or max-autotune.",
            "choice",
            choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            metavar="NAME",
        ),
        _dynamo("use_fullgraph", "Refuse models that are not one graph.", "switch"),
        _dynamo("use_dynamic", "Expect changing shapes.", "switch"),
        _dynamo("use_regional_compilation", "Compile repeated blocks each once.", "switch"),
    ),
)

MPI = Group(
    "mpirun_config",
    "mpirun_",
    (
        Setting(
            "mpirun_hostfile",
            "Start the processes with mpirun on the hosts of this file.",
            section="MPI",
            group="mpirun_config",
            metavar="FILE",
        ),
        Setting(
            "mpirun_ccl",
            "Accepted.",
            section="MPI",
            group="mpirun_config",
            inert="processes meet over gloo, NCCL or the device's own backend",
        ),
    ),
)
