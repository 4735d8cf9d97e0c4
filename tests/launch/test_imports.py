"""Which imports of a script are done once, before its processes are forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.launch.preload import leading_imports, why_not_preload
from tests.launch.launching import write_script


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\nimport numpy as np", ["torch", "numpy"]),
        ('"""Doc."""\nfrom __future__ import annotations\nimport os, torch.nn', ["torch.nn"]),
        ("from transformers import AutoModel", ["transformers"]),
        ("import os\nos.environ['HF_HOME'] = '/x'\nimport transformers", []),
        ("import numpy\nimport my_patches\nimport transformers", ["numpy"]),
        ("import numpy\nif True:\n    import pandas\nimport scipy", ["numpy"]),
        ("import numpy\nfrom . import model\nimport scipy", ["numpy"]),
    ],
)
def test_imports_are_taken_from_the_top_until_something_else_may_change_them(
    tmp_path: Path, source: str, expected: list[str]
) -> None:
    assert [each.module for each in leading_imports(str(write_script(tmp_path, source)))] == expected


def test_names_that_a_package_imports_lazily_are_taken_too(tmp_path: Path) -> None:
    (found,) = leading_imports(str(write_script(tmp_path, "from drivetrain import Trainer, Task as T")))
    assert found.names == ("Trainer", "Task")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch", "sets OMP_NUM_THREADS"),
        ("import os\nos.environ.setdefault('TORCH_LOGS', 'x')\nimport torch", "sets TORCH_LOGS"),
        ("from os import environ\nenviron.update({'A': '1', 'MKL_NUM_THREADS': '1'})\nimport torch", "MKL_NUM_THREADS"),
        ("import os\nos.putenv('KMP_BLOCKTIME', '0')\nimport torch", "KMP_BLOCKTIME"),
        ("import settings\nimport torch", "settings.py sets PYTORCH_ALLOC_CONF"),
        ("import json, sys", "nothing but the standard library"),
        ("import torch\nthis is no Python", "cannot be read as Python"),
    ],
)
def test_a_script_that_must_import_by_itself_is_found(tmp_path: Path, source: str, said: str) -> None:
    write_script(tmp_path, "import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'x'", "settings.py")
    assert said in (why_not_preload(str(write_script(tmp_path, source))) or "")


@pytest.mark.parametrize(
    "source",
    [
        "import os, torch\nprint(os.environ['OMP_NUM_THREADS'], os.environ.get('TORCH_LOGS'))",
        "import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\nimport torch",
        "import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'\nimport torch",
        "import helper_of_this_project",
    ],
)
def test_reading_variables_and_setting_others_is_no_reason(tmp_path: Path, source: str) -> None:
    assert why_not_preload(str(write_script(tmp_path, source))) is None
