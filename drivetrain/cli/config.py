"""`drivetrain config`: write the file that `drivetrain launch` reads, bring one up to date, show what is in force."""

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
_FILE = click.option("--config_file", "--config-file", metavar="FILE", help="The file. Default: the user's own.")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_FILE
@click.pass_context
def config(context: click.Context, config_file: str | None) -> None:
    """Ask how scripts are launched, and write it to a file that `drivetrain launch` reads."""
    if context.invoked_subcommand is None:
        path = _file(config_file)
        _write(path, Questionnaire(_terminal()).ask())
    elif config_file is not None:
        context.obj = config_file


@config.command()
@_FILE
@click.option("--mixed_precision", "--mixed-precision", metavar="NAME", default="no", help="Default number format.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@click.pass_obj
def default(group_file: str | None, config_file: str | None, mixed_precision: str, overwrite: bool) -> None:
    """Write what suits this machine, without a question."""
    path = _file(config_file or group_file)
    precision = SETTINGS["mixed_precision"].parse(mixed_precision, "--mixed_precision")
    if path.exists() and not overwrite:
        raise ConfigurationError(
            f"{path} is there already. Replace it with --overwrite, or see `drivetrain config show`."
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
    """Write a file again in today's keys, such as one of an older version."""
    path = _file(config_file or group_file)
    values = read_config(path)
    _write(path.with_suffix(".yaml") if path.suffix == ".json" else path, values)


@config.command(context_settings={"token_normalize_func": lambda token: token.replace("-", "_")})
@click.option("--config_file", metavar="FILE", help="The file. Default: the user's own.")
@add_settings
@click.pass_obj
def show(group_file: str | None, /, config_file: str | None, **flags: Any) -> None:
    """Show each setting and where its value comes from, with the launcher's flags if some are given."""
    named = config_file or group_file
    given = collect({name: value for name, value in flags.items() if value != ()}, os.environ, named)
    options = LaunchOptions.from_given(given)
    file = find_config_file(named, os.environ)
    click.echo(visible(f"file: {file}" if file else f"file: none ({default_config_file()} is not there)"))
    from drivetrain.launch.launcher import settings_table  # here: it imports torch

    click.echo(visible(settings_table(options, given)))


def _file(named: str | None) -> Path:
    return default_config_file({"DRIVETRAIN_CONFIG_FILE": named} if named else None)


def _write(path: Path, values: dict[str, Any]) -> None:
    LaunchOptions.from_sources(values)  # refuses what cannot be
    write_config(path, values)
    click.echo(visible(f"Written: {path}"))


def _terminal() -> Terminal:
    """What asks the questions."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError(
            "`drivetrain config` asks questions, but this is no terminal. Use `drivetrain config default`, flags of "
            "`drivetrain launch`, or a file of Accelerate's with --config_file.",
        )
    try:
        import questionary  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            f"`drivetrain config` asks through questionary, which is not installed. Install it: {_INSTALL}.",
        ) from None
    return Terminal()


class Terminal:
    """Asks questions in a terminal, with questionary."""

    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        """One of several answers."""
        import questionary

        return str(self._answer(questionary.select(question, choices=list(choices), default=default)))

    def confirm(self, question: str, default: bool) -> bool:
        """Yes or no."""
        import questionary

        return bool(self._answer(questionary.confirm(question, default=default)))

    def enter(self, question: str, name: str, default: str) -> Any:
        """The value of a setting, checked as it is entered."""
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
    """Asks for the settings of a launch.

    Attributes:
        values: The answers, by name of setting.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.values: dict[str, Any] = {}
        self._terminal = terminal

    def ask(self) -> dict[str, Any]:
        """Ask all questions that the answers lead to."""
        kind = self._terminal.choose("What should the script run on?", (ONE, CPUS, GPUS, TPU), ONE)
        if kind == TPU:
            self.values["tpu"] = True
        elif kind == ONE:
            self._confirm("cpu", "Run on the CPU, also where there is an accelerator?")
            self.values["num_processes"] = 1
        else:
            self.values["cpu" if kind == CPUS else "multi_gpu"] = True
            self._machines()
            self._enter("num_processes", "How many processes, over all machines together?", "1")
        if kind == GPUS:
            self._enter("gpu_ids", "Which accelerators of this machine, by number and comma?", "all")
        if kind in (CPUS, GPUS):
            self._confirm("debug", "Compare the calls of all processes before each collective? It is slower.")
            self._confirm("enable_cpu_affinity", "Bind each process to its own share of the cores?")
        if kind == CPUS and self._terminal.confirm("Start the processes with mpirun?", False):
            self._enter("mpirun_hostfile", "File with the names of its hosts?", "~/hostfile")
        if kind in (CPUS, GPUS):
            self._strategy(kind)
        self._compilation()
        self._numbers(kind)
        return {name: value for name, value in self.values.items() if value is not None}

    def _confirm(self, name: str, question: str, default: bool = False) -> bool:
        answer = self._terminal.confirm(question, default)
        if answer or SETTINGS[name].kind == "bool":  # a switch is given or left out
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
        chosen = self._terminal.choose("How is the model spread over the processes?", choices, PLAIN)
        further = {FSDP: self._fsdp, DEEPSPEED: self._deepspeed, MEGATRON: self._megatron}
        if chosen in further:
            further[chosen]()

    def _deepspeed(self) -> None:
        self.values["use_deepspeed"] = True
        if self._terminal.confirm("Is there a JSON file of DeepSpeed's own?", False):
            self._enter("deepspeed_config_file", "Where is it?")
        else:
            stage = self._choose("zero_stage", "Which stage of ZeRO?", "2")
            if stage != "0":
                device = self._choose("offload_optimizer_device", "Where is optimizer state kept?", "none")
                if device == "nvme":
                    self._enter("offload_optimizer_nvme_path", "In which folder?", "/local_nvme")
            if stage == "3":
                device = self._choose("offload_param_device", "Where are parameters kept?", "none")
                if device == "nvme":
                    self._enter("offload_param_nvme_path", "In which folder?", "/local_nvme")
                self._confirm("zero3_save_16bit_model", "Save whole 16-bit weights?")
            self._enter("gradient_accumulation_steps", "How many micro-batches in a step?", "1")
            if self._terminal.confirm("Clip gradients?", False):
                self._enter("gradient_clipping", "To which total norm?", "1.0")
        if self.values.get("zero_stage", "3") == "3":
            self._confirm("zero3_init_flag", "Shard parameters as the model is built, under stage 3?")
        if self._terminal.confirm("Are there layers with experts?", False):
            self._enter("deepspeed_moe_layer_cls_names", "What are their class names, by comma?")

    def _fsdp(self) -> None:
        self.values |= {"use_fsdp": True, "fsdp_version": "2"}
        self._choose(
            "fsdp_reshard_after_forward", "Free parameters after the forward (less memory)?", "true", ("true", "false")
        )
        self._confirm("fsdp_offload_params", "Keep parameters and gradients on the CPU?")
        policy = self._choose("fsdp_auto_wrap_policy", "What is sharded as one unit?", "TRANSFORMER_BASED_WRAP")
        if policy == "TRANSFORMER_BASED_WRAP":
            self._enter(
                "fsdp_transformer_layer_cls_to_wrap", "Class names of layers, by comma? Empty: the repeated blocks."
            )
        elif policy == "SIZE_BASED_WRAP":
            self._enter("fsdp_min_num_params", "How many parameters at least?", "100000000")
        self.values["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
        self._confirm("fsdp_cpu_ram_efficient_loading", "Load weights on rank 0 only?", True)
        self._confirm("fsdp_activation_checkpointing", "Compute activations again during the backward?")
        if self._terminal.confirm("Arrange the processes in a grid (tensor and context parallelism)?", False):
            self.values["use_parallelism_config"] = True
            self._enter("parallelism_config_dp_replicate_size", "How many copies of the model?", "1")
            self._enter("parallelism_config_dp_shard_size", "Over how many processes is each sharded?", "1")
            self._enter("parallelism_config_tp_size", "How many processes share each layer?", "1")
            if (self._enter("parallelism_config_cp_size", "How many share each sequence?", "1") or 1) > 1:
                self._choose("parallelism_config_cp_comm_strategy", "How do they exchange keys?", "allgather")

    def _megatron(self) -> None:
        self.values["use_megatron_lm"] = True
        if (self._enter("megatron_lm_tp_degree", "How many processes share each layer?", "1") or 1) > 1:
            self._confirm("megatron_lm_sequence_parallelism", "Split sequences where layers are not split?", True)
        if (self._enter("megatron_lm_pp_degree", "How many stages?", "1") or 1) > 1:
            self._enter("megatron_lm_num_micro_batches", "How many micro-batches in a step?", "1")
        self._confirm("megatron_lm_recompute_activations", "Compute attention again during the backward?", True)
        self._confirm("megatron_lm_use_distributed_optimizer", "Shard the optimizer's state?", True)
        self._enter("megatron_lm_gradient_clipping", "Clip gradients to which total norm (0 for none)?", "1.0")

    def _compilation(self) -> None:
        if not self._terminal.confirm("Compile models with torch.compile?", False):
            return
        backends = ("inductor", "eager", "aot_eager", "cudagraphs", "onnxrt", "openxla", "tvm")
        self._choose("dynamo_backend", "With which backend?", "inductor", backends)
        if self._terminal.confirm("Choose its mode and options?", False):
            self._choose("dynamo_mode", "Which mode?", "default")
            self._confirm("dynamo_use_fullgraph", "Refuse models that are not one graph?")
            self._confirm("dynamo_use_dynamic", "Expect changing shapes?")
            self._confirm("dynamo_use_regional_compilation", "Compile repeated blocks each once?")

    def _numbers(self, kind: str) -> None:
        if self.values.get("deepspeed_config_file"):
            return  # it decides
        chosen = self._choose("mixed_precision", "Which number format?", "no", ("no", "fp16", "bf16", "fp8"))
        if chosen == "bf16" and kind == TPU:
            self._confirm("downcast_bf16", "Let bf16 round 32-bit floats too?")
        if chosen != "fp8":
            return
        backend = self._choose("fp8_backend", "Which library for 8-bit floats?", "ao")
        if backend == "te":
            self._confirm("fp8_use_autocast_during_eval", "Use them in evaluation too?")
            self._enter("fp8_margin", "Margin of the scales?", "0")
            self._choose("fp8_format", "Which format?", "HYBRID")
            self._enter("fp8_amax_history_len", "How many steps of history?", "1024")
            self._choose("fp8_amax_compute_algo", "Which of them sets the scale?", "most_recent")
        elif backend == "msamp":
            self._choose("fp8_opt_level", "Which level?", "O2")
        else:
            for name in FP8_SETTINGS_OF["ao"]:
                self._confirm(name, f"{SETTINGS[name].help.removeprefix('ao: ').rstrip('.')}?", True)
