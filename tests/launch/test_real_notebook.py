"""A real notebook, run by a real kernel, with and without ipywidgets."""

from __future__ import annotations

import importlib.util

import pytest

from tests.launch.launching import clean_environment

MISSING = [name for name in ("nbclient", "ipykernel") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.compat,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed"),
]

TRAIN = """
import torch
import torch.distributed as dist
from tqdm.auto import tqdm
from drivetrain import notebook_launcher

offset = 40

def train(add):
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + add])
    for _ in tqdm(range(3), disable=dist.get_rank() != 0):
        pass
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total) + offset
"""
FAIL = """
def broken():
    dist.init_process_group("gloo")
    raise ValueError("wrong in the cell")

notebook_launcher(broken, num_processes=2)
"""
WITHOUT_WIDGETS = "import sys; sys.modules['ipywidgets'] = None"


@pytest.mark.parametrize("widgets", [True, False], ids=["ipywidgets", "no ipywidgets"])
def test_a_notebook_trains_on_two_processes_and_shows_a_failure_in_a_few_lines(
    widgets: bool,
) -> None:
    if widgets and importlib.util.find_spec("ipywidgets") is None:
        pytest.skip("ipywidgets is not installed")
    import nbclient
    import nbformat

    cells = ["" if widgets else WITHOUT_WIDGETS, TRAIN, "notebook_launcher(train, (1,), num_processes=2)", FAIL]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    client = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", allow_errors=True)
    client.execute(env={**clean_environment(), "DRIVETRAIN_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""})
    _, _, trained, failed = notebook.cells
    values = [each["data"]["text/plain"] for each in trained.outputs if each.output_type == "execute_result"]
    assert values == ["43"], trained.outputs
    (error,) = [each for each in failed.outputs if each.output_type == "error"]
    shown = "\n".join(error.traceback).splitlines()
    assert len(shown) <= 12
    assert shown[-1] == "ValueError: wrong in the cell"
