"""The `config` command: create, update and show the configuration file of `drivetrain launch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from drivetrain.cli.launch import add_settings
from drivetrain.launch.options import SETTINGS, LaunchOptions
from drivetrain.launch.settings.setting import FP8_SETTINGS_OF
from drivetrain.launch.settings.sources import collect, default_config_file, find_config_file, read_config, write_config
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import visible

ONE, CPUS, GPUS, TPU = "one process", "several processes on the CPU", "several accelerators", "a TPU"
PLAIN, FSDP, DEEPSPEED, MEGATRON = "DDP", "FSDP", "DeepSpeed", "Megatron"
_INSTALL = 'pip install "drivetrain[config]"'
_FILE = click.option("--config_file", "--config-file", metavar="FILE", help="Settings file. Default: the user's own.")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_FILE
@click.pass_context
def config(context: click.Context, config_file: str | None) -> None:
    """Answer questions about your setup to create the configuration file of `drivetrain launch`."""
    if context.invoked_subcommand is None:
        path = _file(config_file)
        _write(path, Questionnaire(_terminal()).ask())
    elif config_file is not None:
        context.obj = config_file


@config.command()
@_FILE
@click.option("--mixed_precision", "--mixed-precision", metavar="NAME", default="no", help="Default precision.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@click.pass_obj
def default(group_file: str | None, config_file: str | None, mixed_precision: str, overwrite: bool) -> None:
    """Write a launch configuration file with default settings for this machine, without asking questions."""
    path = _file(config_file or group_file)
    precision = SETTINGS["mixed_precision"].parse(mixed_precision, "--mixed_precision")
    if path.exists() and not overwrite:
        raise ConfigurationError(
            f"{path} already exists. Replace it with --overwrite, or view it with `drivetrain config show`."
        )
    from drivetrain.runtime.devices import detect_device_kind

    kind = detect_device_kind()
    count = kind.default_processes()
    values: dict[str, Any] = {"num_processes": count, "mixed_precision": precision}
    if kind.name == "cpu":
        values["cpu"] = True
    elif kind.drives_all:
        values["tpu"] = True
    elif count > 1:
        values["multi_gpu"] = True
    _write(path, values)


@config.command()
@_FILE
@click.pass_obj
def update(group_file: str | None, config_file: str | None) -> None:
    """Rewrite an older launch configuration file with the current key names. A JSON file is converted to YAML."""
    path = _file(config_file or group_file)
    values = read_config(path)
    _write(path.with_suffix(".yaml") if path.suffix == ".json" else path, values)


@config.command(context_settings={"token_normalize_func": lambda token: token.replace("-", "_")})
@click.option("--config_file", metavar="FILE", help="Configuration file. Default: the user's own.")
@add_settings
@click.pass_obj
def show(group_file: str | None, /, config_file: str | None, **flags: Any) -> None:
    """Show the value of every launch setting and where it comes from. Accepts the flags of `drivetrain launch`."""
    named = config_file or group_file
    given = collect({name: value for name, value in flags.items() if value != ()}, os.environ, named)
    options = LaunchOptions.from_given(given)
    file = find_config_file(named, os.environ)
    click.echo(visible(f"file: {file}" if file else f"file: none ({default_config_file()} does not exist)"))
    from drivetrain.launch.launcher import settings_table  # imports torch

    click.echo(visible(settings_table(options, given)))


def _file(named: str | None) -> Path:
    return default_config_file({"DRIVETRAIN_CONFIG_FILE": named} if named else None)


def _write(path: Path, values: dict[str, Any]) -> None:
    LaunchOptions.from_sources(values)  # raises for invalid values
    write_config(path, values)
    click.echo(visible(f"Written: {path}"))


def _terminal() -> Terminal:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError(
            "`drivetrain config` asks questions, so it needs a terminal. Use `drivetrain config default`, flags of "
            "`drivetrain launch`, or an Accelerate configuration file with --config_file.",
        )
    try:
        import questionary  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            f"`drivetrain config` needs questionary, which is not installed. Install it: {_INSTALL}.",
        ) from None
    return Terminal()


class Terminal:
    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        import questionary

        return str(self._answer(questionary.select(question, choices=list(choices), default=default)))

    def confirm(self, question: str, default: bool) -> bool:
        import questionary

        return bool(self._answer(questionary.confirm(question, default=default)))

    def enter(self, question: str, name: str, default: str) -> Any:
        import questionary

        setting = SETTINGS[name]

        def check(text: str) -> bool | str:
            try:
                setting.parse(text, name)
            except ConfigurationError as error:
                return error.message
            return True

        return setting.parse(self._answer(questionary.text(question, default=default, validate=check)) or None, name)

    @staticmethod
    def _answer(question: Any) -> Any:
        try:
            return question.unsafe_ask()
        except (KeyboardInterrupt, EOFError):
            raise click.exceptions.Abort from None


class Questionnaire:
    """The questions of `drivetrain config`, whose answers become the user's configuration file.

    Attributes:
        values: The answers, by name of the setting.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.values: dict[str, Any] = {}
        self._terminal = terminal

    def ask(self) -> dict[str, Any]:
        kind = self._terminal.choose("What should the script run on?", (ONE, CPUS, GPUS, TPU), ONE)
        if kind == TPU:
            self.values["tpu"] = True
        elif kind == ONE:
            self._confirm("cpu", "Run on the CPU even if there is an accelerator?")
            self.values["num_processes"] = 1
        else:
            self.values["cpu" if kind == CPUS else "multi_gpu"] = True
            self._machines()
            self._enter("num_processes", "How many processes, over all machines together?", "1")
        if kind == GPUS:
            self._enter("gpu_ids", "Which accelerators of this machine (numbers, separated by commas)?", "all")
        if kind in (CPUS, GPUS):
            self._confirm("debug", "Compare the calls of all processes before each collective (slower)?")
            self._confirm("enable_cpu_affinity", "Bind each process to its own share of the cores?")
        if kind == CPUS and self._terminal.confirm("Start the processes with mpirun?", False):
            self._enter("mpirun_hostfile", "Which host file for mpirun?", "~/hostfile")
        if kind in (CPUS, GPUS):
            self._strategy(kind)
        self._compilation()
        self._numbers(kind)
        return {name: value for name, value in self.values.items() if value is not None}

    def _confirm(self, name: str, question: str, default: bool = False) -> bool:
        answer = self._terminal.confirm(question, default)
        if answer or SETTINGS[name].kind == "bool":  # switches have no explicit "off"
            self.values[name] = answer
        return answer

    def _choose(self, name: str, question: str, default: str, choices: Sequence[str] = ()) -> str:
        answer = self._terminal.choose(question, choices or SETTINGS[name].choices, default)
        self.values[name] = answer
        return answer

    def _enter(self, name: str, question: str, default: str = "") -> Any:
        answer = self._terminal.enter(question, name, default)
        if answer is not None and answer != []:
            self.values[name] = answer
        return answer

    def _machines(self) -> None:
        machines = self._enter("num_machines", "How many machines?", "1")
        if machines in (None, "1"):
            self.values.pop("num_machines", None)
            return
        self._enter("machine_rank", "Which one is this, from 0?", "0")
        self._enter("main_process_ip", "What is the address of machine 0?")
        self._enter("main_process_port", "Which port on machine 0?", "29500")
        self._choose("rdzv_backend", "How do machines meet?", "static", ("static", "c10d"))

    def _strategy(self, kind: str) -> None:
        choices = (PLAIN, FSDP, DEEPSPEED, *((MEGATRON,) if kind == GPUS else ()))
        chosen = self._terminal.choose("How is the model distributed over the processes?", choices, PLAIN)
        further = {FSDP: self._fsdp, DEEPSPEED: self._deepspeed, MEGATRON: self._megatron}
        if chosen in further:
            further[chosen]()

    def _deepspeed(self) -> None:
        self.values["use_deepspeed"] = True
        if self._terminal.confirm("Do you have a DeepSpeed JSON configuration file?", False):
            self._enter("deepspeed_config_file", "Path of the file?")
        else:
            stage = self._choose("zero_stage", "Which ZeRO stage?", "2")
            if stage != "0":
                device = self._choose("offload_optimizer_device", "Where to offload optimizer state?", "none")
                if device == "nvme":
                    self._enter("offload_optimizer_nvme_path", "In which folder?", "/local_nvme")
            if stage == "3":
                device = self._choose("offload_param_device", "Where to offload parameters?", "none")
                if device == "nvme":
                    self._enter("offload_param_nvme_path", "In which folder?", "/local_nvme")
                self._confirm("zero3_save_16bit_model", "Save full 16-bit weights?")
            self._enter("gradient_accumulation_steps", "How many micro-batches per optimizer step?", "1")
            if self._terminal.confirm("Clip gradients?", False):
                self._enter("gradient_clipping", "To which total norm?", "1.0")
        if self.values.get("zero_stage", "3") == "3":
            self._confirm("zero3_init_flag", "Shard parameters while the model is built (ZeRO-3)?")
        if self._terminal.confirm("Does the model have mixture-of-experts layers?", False):
            self._enter("deepspeed_moe_layer_cls_names", "Class names of these layers, separated by commas?")

    def _fsdp(self) -> None:
        self.values |= {"use_fsdp": True, "fsdp_version": "2"}
        self._choose(
            "fsdp_reshard_after_forward", "Free parameters after the forward (less memory)?", "true", ("true", "false")
        )
        self._confirm("fsdp_offload_params", "Keep parameters and gradients on the CPU?")
        policy = self._choose("fsdp_auto_wrap_policy", "How to form FSDP units?", "TRANSFORMER_BASED_WRAP")
        if policy == "TRANSFORMER_BASED_WRAP":
            self._enter(
                "fsdp_transformer_layer_cls_to_wrap", "Class names of layers, with commas? Empty: repeated blocks."
            )
        elif policy == "SIZE_BASED_WRAP":
            self._enter("fsdp_min_num_params", "Minimum number of parameters in a unit?", "100000000")
        self.values["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
        self._confirm("fsdp_cpu_ram_efficient_loading", "Load weights on rank 0 only?", True)
        self._confirm("fsdp_activation_checkpointing", "Use activation checkpointing?")
        if self._terminal.confirm("Use a device mesh (tensor and context parallelism)?", False):
            self.values["use_parallelism_config"] = True
            self._enter("parallelism_config_dp_replicate_size", "How many replicas of the model?", "1")
            self._enter("parallelism_config_dp_shard_size", "Over how many processes is each replica sharded?", "1")
            self._enter("parallelism_config_tp_size", "Tensor-parallel size?", "1")
            if (self._enter("parallelism_config_cp_size", "Context-parallel size?", "1") or 1) > 1:
                self._choose("parallelism_config_cp_comm_strategy", "How are keys and values exchanged?", "allgather")

    def _megatron(self) -> None:
        self.values["use_megatron_lm"] = True
        if (self._enter("megatron_lm_tp_degree", "Tensor-parallel size?", "1") or 1) > 1:
            self._confirm("megatron_lm_sequence_parallelism", "Use sequence parallelism?", True)
        if (self._enter("megatron_lm_pp_degree", "How many pipeline stages?", "1") or 1) > 1:
            self._enter("megatron_lm_num_micro_batches", "How many micro-batches per optimizer step?", "1")
        self._confirm("megatron_lm_recompute_activations", "Recompute attention during the backward?", True)
        self._confirm("megatron_lm_use_distributed_optimizer", "Shard the optimizer's state?", True)
        self._enter("megatron_lm_gradient_clipping", "Clip gradients to which total norm (0 for none)?", "1.0")

    def _compilation(self) -> None:
        if not self._terminal.confirm("Compile models with torch.compile?", False):
            return
        backends = ("inductor", "eager", "aot_eager", "cudagraphs", "onnxrt", "openxla", "tvm")
        self._choose("dynamo_backend", "With which backend?", "inductor", backends)
        if self._terminal.confirm("Choose its mode and options?", False):
            self._choose("dynamo_mode", "Which mode?", "default")
            self._confirm("dynamo_use_fullgraph", "Require a single graph without breaks (fullgraph)?")
            self._confirm("dynamo_use_dynamic", "Expect dynamic shapes?")
            self._confirm("dynamo_use_regional_compilation", "Compile repeated blocks only once?")

    def _numbers(self, kind: str) -> None:
        if self.values.get("deepspeed_config_file"):
            return  # the DeepSpeed file sets the precision
        chosen = self._choose("mixed_precision", "Which mixed precision?", "no", ("no", "fp16", "bf16", "fp8"))
        if chosen == "bf16" and kind == TPU:
            self._confirm("downcast_bf16", "Round float32 tensors to bfloat16 too?")
        if chosen != "fp8":
            return
        backend = self._choose("fp8_backend", "Which library for FP8?", "ao")
        if backend == "te":
            self._confirm("fp8_use_autocast_during_eval", "Use FP8 in evaluation too?")
            self._enter("fp8_margin", "Margin of the scales?", "0")
            self._choose("fp8_format", "Which FP8 format?", "HYBRID")
            self._enter("fp8_amax_history_len", "Length of the amax history, in steps?", "1024")
            self._choose("fp8_amax_compute_algo", "How is the scale chosen from the amax history?", "most_recent")
        elif backend == "msamp":
            self._choose("fp8_opt_level", "Which optimization level?", "O2")
        else:
            for name in FP8_SETTINGS_OF["ao"]:
                self._confirm(name, f"{SETTINGS[name].help.removeprefix('ao: ').rstrip('.')}?", True)
