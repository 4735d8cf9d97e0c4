"""The `tpu-config` command: run commands on all workers of a TPU pod with gcloud."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import visible


@click.command(
    name="tpu-config",
    context_settings={
        "token_normalize_func": lambda token: token.replace("-", "_"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
@click.option("--config_file", type=click.Path(), help="YAML file with the TPU's name and the commands.")
@click.option("--tpu_name", help="Name of the TPU. Default: from the file.")
@click.option("--tpu_zone", help="Zone of the TPU. Default: from the file.")
@click.option("--use_alpha", is_flag=True, help="Run `gcloud alpha`.")
@click.option("--command_file", type=click.Path(), help="File with one command per line.")
@click.option("--command", multiple=True, help="Command to run. Repeat it for several commands.")
@click.option("--install_drivetrain", is_flag=True, help="Install drivetrain first.")
@click.option("--drivetrain_version", default="latest", show_default=True, help="Version of drivetrain, such as 0.1.0.")
@click.option("--install_accelerate", is_flag=True, help="Install Accelerate first.")
@click.option("--accelerate_version", default="latest", show_default=True, help="Version of Accelerate, or dev.")
@click.option("--debug", is_flag=True, help="Print the command instead of running it.")
def tpu_config(debug: bool, **options: Any) -> int:
    """Run shell commands on all workers of a TPU pod with gcloud, for example to install packages before a launch.

    The commands run in the folder /usr/share.

    \b
    drivetrain tpu-config --tpu_name pod --tpu_zone us-central1-a --command "pip install -r requirements.txt"
    """  # noqa: D301
    gcloud = gcloud_command(**options)
    if debug:
        click.echo(visible(f"Running {shlex.join(gcloud)}"))
        return 0
    if shutil.which(gcloud[0]) is None:
        raise ConfigurationError(
            "gcloud is not on PATH. Install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), or pass "
            "--debug to print the command.",
        )
    code = subprocess.run(gcloud, check=False).returncode
    click.echo("All workers ran the commands." if code == 0 else f"gcloud ended with exit code {code}.", err=code != 0)
    return code


def gcloud_command(
    config_file: str | None = None,
    tpu_name: str | None = None,
    tpu_zone: str | None = None,
    use_alpha: bool = False,
    command_file: str | None = None,
    command: Sequence[str] = (),
    install_drivetrain: bool = False,
    drivetrain_version: str = "latest",
    install_accelerate: bool = False,
    accelerate_version: str = "latest",
) -> list[str]:
    """Return the gcloud command that runs commands on all workers of a TPU pod.

    Raises:
        ConfigurationError: The name, the zone or the commands are missing, or a file does not exist.
    """
    defaults = _read(config_file)
    name = _needed("tpu_name", tpu_name or defaults.get("tpu_name"))
    zone = _needed("tpu_zone", tpu_zone or defaults.get("tpu_zone"))
    lines = _commands(command, command_file, defaults)
    installs = [
        f"pip install {_requirement(package, version)}"
        for package, version, wanted in (
            ("drivetrain", drivetrain_version, install_drivetrain),
            ("accelerate", accelerate_version, install_accelerate),
        )
        if wanted
    ]
    gcloud = ["gcloud", *(["alpha"] if use_alpha else []), "compute", "tpus", "tpu-vm", "ssh", name, "--zone", zone]
    return [*gcloud, "--command", "; ".join(["cd /usr/share", *installs, *lines]), "--worker", "all"]


def _commands(given: Sequence[str], file: str | None, defaults: Mapping[str, Any]) -> list[str]:
    if not given and file is None:
        file = defaults.get("command_file")
        given = defaults.get("commands") or ()
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise ConfigurationError(f"Command file {file!r} does not exist. Check the path.")
        given = path.read_text().splitlines()
    lines = [line for line in given if line.strip()]
    if not lines:
        raise ConfigurationError("There is no command to run. Pass --command or --command_file.")
    return lines


def _needed(name: str, value: str | None) -> str:
    if not value:
        raise ConfigurationError(f"{name} is missing. Pass --{name}, or a --config_file that contains it.")
    return value


def _requirement(package: str, version: str) -> str:
    if version == "latest":
        return f"{package} -U"
    if version == "dev" and package == "accelerate":
        return "git+https://github.com/huggingface/accelerate.git"
    if not version[:1].isdigit():
        raise ConfigurationError(f"{package}_version is {version!r}, but must be latest or a version, such as 1.0.0.")
    return f"{package}=={version}"


def _read(named: str | None) -> Mapping[str, Any]:
    import yaml

    from drivetrain.launch.settings.sources import find_config_file
    from drivetrain.runtime.yaml_text import load_yaml

    path = find_config_file(named, os.environ)
    if path is None:
        return {}
    if not path.is_file():
        raise ConfigurationError(f"Configuration file {str(path)!r} does not exist. Check the path.")
    try:
        config = load_yaml(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{str(path)!r} is not YAML: {error}") from error
    return config if isinstance(config, dict) else {}
