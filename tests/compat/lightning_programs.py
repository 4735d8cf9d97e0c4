"""Programs written for Lightning; `python -m tests.compat.lightning_programs` writes their table into the page."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.compat.lightning_cases import PAGE, TOLERANCE
from tests.compat.pages import written
from tests.compat.running import APART
from tests.compat.running import PROGRAMS as FOLDER

PART = "programs"
"""What the page calls the table."""

EXAMPLES, TEMPLATE = "LIGHTNING_CHECKOUT", "LIGHTNING_HYDRA_TEMPLATE"
CHECKOUTS = {EXAMPLES: "Lightning-AI/pytorch-lightning at 2.6.6", TEMPLATE: "ashleve/lightning-hydra-template"}
"""Variables that name a checkout, and of what: programs that no package has."""


@dataclass(frozen=True, eq=False)
class LightningProgram:
    """A program, which runs with nothing changed.

    Attributes:
        name: What it is called here.
        what: What it is, in the table.
        script: Its path: below the folder of programs, or in the checkout.
        packages: What it needs beside Lightning, as pip's names, with the modules to look for.
        arguments: What its command line is given.
        on_two: What else, on two processes.
        options: Arguments of its Trainer that take the place of its own, where it has no option for them.
        checkout: The variable that names the checkout that the script is in; empty where it is one of ours.
        alone: Why it runs on one process only; empty where it runs on two as well.
        imported: Modules that take long to import.
        slow: Whether it is apart from `make test-compat`.
        versions: What it was found to be equal with, for the table; empty where it is not yet.
        unfreezes: Whether it unfreezes parameters during the run, whose gradients Lightning does not average.
    """

    name: str
    what: str
    script: str
    packages: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    on_two: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    checkout: str = ""
    alone: str = ""
    package: str = "lightning"
    slow: bool = True
    versions: str = ""
    unfreezes: bool = False

    def __str__(self) -> str:
        return self.name

    def trainer(self, processes: int) -> dict[str, Any]:
        """What takes the place of its Trainer's arguments."""
        if not self.options:
            return {}
        places = {"accelerator": "cpu", "devices": processes, "strategy": _DDP if processes > 1 else "auto"}
        return {**places, "enable_progress_bar": False, **self.options}

    def missing(self) -> str:
        """What it needs and is not here, with how to get it; empty where nothing is missing."""
        apart = {each.name for each in Path(APART).glob("*")}
        absent = [name for name, module in self.packages.items() if module not in apart and find_spec(module) is None]
        if absent:
            return f"needs {', '.join(absent)}: pip install {' '.join(absent)}"
        if self.checkout and not os.environ.get(self.checkout):
            return f"needs a checkout of {CHECKOUTS[self.checkout]}: set {self.checkout} to its folder"
        return ""

    def found(self, folder: Callable[[str], Path]) -> Path:
        """The script.

        Args:
            folder: The copy of a checkout, by its variable.
        """
        place = folder(self.checkout) if self.checkout else FOLDER
        return place / self.script


_SHORT = (
    "--trainer.max_epochs=2",
    "--trainer.limit_train_batches=6",
    "--trainer.limit_val_batches=3",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
)
_TESTED = ("--trainer.limit_test_batches=3", "--trainer.limit_predict_batches=3")
# Some programs have several losses, of which each uses a part of the parameters.
_DDP = "ddp_find_unused_parameters_true"
_ONE = ("--trainer.devices=1",)
_TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")
_STEPS = {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 3, "limit_test_batches": 3}
_VISION = {"torchvision": "torchvision", "scikit-learn": "sklearn", "pillow": "PIL"}
_CLI = {"jsonargparse[signatures]": "jsonargparse"}
_EPISODES = {"gymnasium": "gymnasium"}
_BASICS, _DOMAINS = "examples/pytorch/basics/", "examples/pytorch/domain_templates/"

PROGRAMS = (
    LightningProgram(
        "autoencoder",
        "Lightning's example `autoencoder`: fit, test and predict with the best checkpoint, through its CLI",
        f"{_BASICS}autoencoder.py",
        {**_VISION, **_CLI},
        (*_SHORT, *_TESTED),
        _TWO,
        versions="Lightning 2.6.6, torchvision 0.28.0",
        checkout=EXAMPLES,
    ),
    LightningProgram(
        "image_classifier",
        "Lightning's example `backbone_image_classifier`: fit, test and predict, through its CLI",
        f"{_BASICS}backbone_image_classifier.py",
        {**_VISION, **_CLI},
        (*_SHORT, *_TESTED),
        _TWO,
        checkout=EXAMPLES,
        versions="Lightning 2.6.6, torchvision 0.28.0",
    ),
    LightningProgram(
        "transformer",
        "Lightning's example `transformer`: a language model on WikiText2",
        f"{_BASICS}transformer.py",
        options=_STEPS,
        versions="Lightning 2.6.6",
        checkout=EXAMPLES,
    ),
    LightningProgram(
        "bug_report",
        "Lightning's `bug_report_model`",
        "examples/pytorch/bug_report/bug_report_model.py",
        options={"max_epochs": 2},
        versions="Lightning 2.6.6",
        checkout=EXAMPLES,
    ),
    LightningProgram(
        "gan",
        "Lightning's example `generative_adversarial_net`: two optimizers by hand",
        f"{_DOMAINS}generative_adversarial_net.py",
        {**_VISION, "tensorboard": "tensorboard"},
        options=_STEPS,
        versions="Lightning 2.6.6, torchvision 0.28.0",
        checkout=EXAMPLES,
    ),
    LightningProgram(
        "qnet",
        "Lightning's example `reinforce_learn_Qnet`: a deep Q-network that plays as it trains",
        f"{_DOMAINS}reinforce_learn_Qnet.py",
        _EPISODES,
        options={"max_epochs": 4},
        versions="Lightning 2.6.6, gymnasium 1.4.0",
        checkout=EXAMPLES,
    ),
    LightningProgram(
        "ppo",
        "Lightning's example `reinforce_learn_ppo`: proximal policy optimization by hand",
        f"{_DOMAINS}reinforce_learn_ppo.py",
        _EPISODES,
        ("--env", "CartPole-v1", "--steps_per_epoch", "512", "--batch_size", "64"),
        options={"max_epochs": 2},
        versions="Lightning 2.6.6, gymnasium 1.4.0",
        checkout=EXAMPLES,
    ),
    LightningProgram(
        "transfer_learning",
        "Lightning's example `computer_vision_fine_tuning`: a ResNet-50 that is unfrozen in parts",
        f"{_DOMAINS}computer_vision_fine_tuning.py",
        {**_VISION, **_CLI},
        (
            "fit",
            "--trainer.max_epochs=3",
            "--trainer.limit_train_batches=2",
            "--trainer.limit_val_batches=1",
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
            "--data.batch_size=2",
            "--finetuning.milestones=[1,2]",
        ),
        _TWO,
        checkout=EXAMPLES,
        versions="Lightning 2.6.6, torchvision 0.28.0",
        unfreezes=True,
    ),
    LightningProgram(
        "hydra_template",
        "lightning-hydra-template: train and test by its configuration files",
        "src/train.py",
        {**_VISION, "hydra-core": "hydra", "hydra-colorlog": "hydra_plugins", "rootutils": "rootutils", "rich": "rich"},
        (
            "seed=12",
            "logger=csv",
            "trainer.max_epochs=2",
            "+trainer.limit_train_batches=6",
            "+trainer.limit_val_batches=3",
            "+trainer.limit_test_batches=3",
            "extras.print_config=false",
        ),
        ("trainer.devices=2", "+trainer.strategy=ddp"),
        versions="hydra-core 1.3.8, torchvision 0.28.0",
        checkout=TEMPLATE,
    ),
    LightningProgram(
        "forecasting_tft",
        "pytorch-forecasting's temporal fusion transformer: fit, validate, load, predict",
        "forecasting_tft.py",
        {"pytorch-forecasting": "pytorch_forecasting"},
        slow=False,
        versions="pytorch-forecasting 1.8.0",
    ),
    LightningProgram(
        "neuralforecast_nhits",
        "neuralforecast's NHITS: fit with a validation set, predict, save, load",
        "neuralforecast_nhits.py",
        {"neuralforecast": "neuralforecast"},
        package="pytorch_lightning",
        versions="neuralforecast 3.3.0",
    ),
    LightningProgram(
        "segmentation_smp",
        "A module over segmentation-models-pytorch, as in its examples: fit, validate, test",
        "segmentation_smp.py",
        {"segmentation-models-pytorch": "segmentation_models_pytorch"},
        package="pytorch_lightning",
        versions="segmentation-models-pytorch 0.6.0",
    ),
    *(
        LightningProgram(
            f"torchgeo_{kind}",
            f"torchgeo's `{name}`: fit, test of the best checkpoint, predict",
            "torchgeo_tasks.py",
            {"torchgeo": "torchgeo"},
            (kind,),
            versions=versions,
        )
        for kind, name, versions in (
            ("classification", "ClassificationTask", "torchgeo 0.8.1"),
            ("regression", "RegressionTask", "torchgeo 0.8.1"),
            ("segmentation", "SemanticSegmentationTask", "torchgeo 0.8.1"),
        )
    ),
)


_AVERAGED = ", on 2 processes after the gradients of unfrozen parameters are averaged under Lightning too"


def table() -> str:
    """The table of the page: what was found to be equal."""
    lines = ["| program | versions | processes | losses and metrics | lines changed |", "|---|---|---|---|---:|"]
    for each in PROGRAMS:
        if each.versions:
            processes = "1" if each.alone else "1, 2"
            equal = f"equal to {TOLERANCE:g}{_AVERAGED if each.unfreezes else ''}"
            lines.append(f"| {each.what} | {each.versions} | {processes} | {equal} | 0 |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), table(), PART))
