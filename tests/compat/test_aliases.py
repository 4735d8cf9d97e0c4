"""Imports of `accelerate` give ours: in this process, in a launch, and in what these start."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import drivetrain.compat.accelerate as accelerate
from drivetrain import ConfigurationError
from drivetrain.compat import install
from drivetrain.compat.aliases import STAND_INS
from drivetrain.launch import LaunchOptions
from drivetrain.launch.launcher import LaunchPlan
from drivetrain.launch.options import STAND_INS as LAUNCHED
from tests.pool import ROOT

OURS = Path(accelerate.__file__).parent


def python(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which nothing was imported into."""
    environment = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), str(ROOT)]))
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=60)


SHOW = """
import importlib.metadata, importlib.util
found = importlib.util.find_spec("accelerate") is not None
import accelerate, accelerate.utils.tqdm
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed, tqdm, is_xpu_available
import drivetrain
print(found, accelerate.__version__, importlib.metadata.version("accelerate"))
print(issubclass(Accelerator, drivetrain.Accelerator), set_seed is drivetrain.set_seed, callable(tqdm))
"""
SHOWN = "True 1.15.0 1.15.0\nTrue True True\n"


def test_after_install_imports_and_version_gates_find_ours() -> None:
    ran = python("import drivetrain.compat; drivetrain.compat.install('accelerate')\n" + SHOW)
    assert (ran.stdout, ran.stderr, ran.returncode) == (SHOWN, "", 0)


@pytest.mark.compat
def test_a_process_with_the_stand_in_on_its_path_gets_ours_without_a_call() -> None:
    ran = python(SHOW, PYTHONPATH=str(STAND_INS / "accelerate"))
    assert (ran.stdout, ran.stderr, ran.returncode) == (SHOWN, "", 0)


@pytest.mark.compat
def test_modules_are_the_same_under_both_names() -> None:
    ran = python(
        "import drivetrain.compat; drivetrain.compat.install('accelerate')\n"
        "import accelerate.utils.operations, drivetrain.compat.accelerate.utils.operations as own\n"
        "print(accelerate.utils.operations is own, own.__spec__.name)"
    )
    assert ran.stdout == "True drivetrain.compat.accelerate.utils.operations\n"


def test_install_refuses_where_another_accelerate_was_imported(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text("")
    ran = python(
        "import accelerate, drivetrain.compat; drivetrain.compat.install('accelerate')", PYTHONPATH=str(tmp_path)
    )
    assert "accelerate has been imported already, from" in ran.stderr
    assert "drivetrain launch --as accelerate" in ran.stderr


def test_install_names_what_can_be_replaced() -> None:
    with pytest.raises(ConfigurationError, match=r"allowed are 'accelerate'.*Did you mean"):
        install("accelerat")


def test_launch_as_puts_the_stand_in_first_on_the_path_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    plan = LaunchPlan.make(LaunchOptions(num_processes=1, cpu=True, stand_in="accelerate"))
    assert plan.variables["PYTHONPATH"] == f"{STAND_INS / 'accelerate'}{os.pathsep}mine"
    assert {path.name for path in STAND_INS.iterdir() if path.name != "__pycache__"} == set(LAUNCHED)


def test_launch_as_another_package_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be one of accelerate"):
        LaunchOptions(stand_in="keras")


@pytest.mark.parametrize("path", sorted(OURS.rglob("*.py")), ids=lambda path: str(path.relative_to(OURS)))
def test_every_module_imports(path: Path) -> None:
    name = ".".join(["drivetrain.compat.accelerate", *path.relative_to(OURS).with_suffix("").parts])
    importlib.import_module(name.removesuffix(".__init__"))


def test_every_name_of_utils_is_there() -> None:
    from drivetrain.compat.accelerate import utils

    assert [name for name in dir(utils) if not hasattr(utils, name)] == []


def test_a_model_built_without_memory_gets_its_values_one_by_one() -> None:
    from drivetrain.compat.accelerate import init_empty_weights
    from drivetrain.compat.accelerate.utils import set_module_tensor_to_device

    with init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model[1].running_mean.device.type == "cpu"
    with pytest.raises(ConfigurationError, match="has no value"):
        set_module_tensor_to_device(model, "0.weight", "cpu")
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(3, 2), dtype="bfloat16")
    assert model[0].weight.dtype is torch.bfloat16
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


def test_an_absent_name_raises_only_when_it_is_called() -> None:
    ran = python(
        "import drivetrain.compat; drivetrain.compat.install('accelerate')\n"
        "from accelerate.inference import pippy_forward\n"
        "from accelerate.utils.megatron_lm import MegatronEngine\n"
        "print(isinstance(object(), MegatronEngine), MegatronEngine.__doc__[:18])\n"
        "pippy_forward(None)"
    )
    assert ran.stdout == "False Not in drivetrain.\n"
    assert "AbsentNameError: accelerate's pippy_forward was called" in ran.stderr


def test_a_module_that_only_hands_names_on_is_one_under_each_name() -> None:
    ran = python(
        "import importlib, importlib.util, drivetrain.compat\n"
        "drivetrain.compat.install('lightning', 'pytorch_lightning', 'lightning_fabric', 'accelerate')\n"
        "from drivetrain.compat.handed_on import HANDED_ON\n"
        "for name in HANDED_ON:\n"
        "    assert importlib.util.find_spec(name), name\n"
        "    module = importlib.import_module(name)\n"
        "    for each in module.__all__:\n"
        "        assert hasattr(module, each), (name, each)\n"
        "import lightning.pytorch.callbacks.timer as one, pytorch_lightning.callbacks.timer as other\n"
        "from drivetrain import Timer\n"
        "print(one is other, one.Timer is Timer, one.__all__, len(HANDED_ON) > 70)"
    )
    assert (ran.stdout, ran.stderr) == ("True True ['Timer'] True\n", "")


def test_utils_are_those_of_accelerate_under_the_name_of_drivetrain() -> None:
    from drivetrain import utils

    assert utils.BnbQuantizationConfig is importlib.import_module("drivetrain").BnbQuantizationConfig
    assert set(dir(accelerate.utils)) <= set(dir(utils))
    with pytest.raises(AttributeError, match=r"module 'drivetrain.utils' has no attribute 'set_sed'"):
        utils.set_sed  # noqa: B018


def test_the_notebook_launcher_refuses_where_bitsandbytes_may_have_started_cuda(monkeypatch):
    from drivetrain.compat.accelerate.launchers import notebook_launcher

    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    with pytest.raises(RuntimeError, match="Please keep these imports inside the function"):
        notebook_launcher(print, num_processes=2)
    notebook_launcher(print, num_processes=1)
