"""A real notebook, run by a real kernel, with and without ipywidgets."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

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


TRAINER = """
import sys, traceback
import torch
from drivetrain import Accelerator, Task, Trainer

class Broken(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[:, :3]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def quiet(**options):
    return Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_run_report=False, **options)
"""
IN_THE_TRAINER = "quiet().fit(Broken(), torch.utils.data.DataLoader(torch.randn(8, 4)))"
IN_AN_ARGUMENT = "quiet(precision='17')"
IN_BACKWARD = "Accelerator().backward(torch.ones(2))"
WHOLE = "print(len(traceback.extract_tb(sys.last_traceback)))"


def executed(cells: list[str], **variables: str) -> list[Any]:
    """Run the cells in a kernel of their own, and return them with their outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    client = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", allow_errors=True)
    client.execute(env={**clean_environment(), "DRIVETRAIN_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": "", **variables})
    return notebook.cells  # type: ignore[no-any-return]


def shown_error(cell: Any) -> str:
    (error,) = [each for each in cell.outputs if each.output_type == "error"]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))


@pytest.mark.parametrize("widgets", [True, False], ids=["ipywidgets", "no ipywidgets"])
def test_a_notebook_trains_on_two_processes_and_shows_a_failure_in_a_few_lines(
    widgets: bool,
) -> None:
    if widgets and importlib.util.find_spec("ipywidgets") is None:
        pytest.skip("ipywidgets is not installed")
    cells = ["" if widgets else WITHOUT_WIDGETS, TRAIN, "notebook_launcher(train, (1,), num_processes=2)", FAIL]
    _, _, trained, failed = executed(cells)
    values = [each["data"]["text/plain"] for each in trained.outputs if each.output_type == "execute_result"]
    assert values == ["43"], trained.outputs
    shown = shown_error(failed).splitlines()
    assert len(shown) <= 12
    assert shown[-1] == "ValueError: wrong in the cell"


def test_an_error_shows_the_lines_of_the_notebook_and_the_message():
    in_processes = IN_THE_TRAINER.replace("quiet()", "quiet(strategy='ddp_notebook', devices=2, accelerator='cpu')")
    _, in_processes, in_the_trainer, whole, in_an_argument, in_backward = executed(
        [TRAINER, in_processes, IN_THE_TRAINER, WHOLE, IN_AN_ARGUMENT, IN_BACKWARD]
    )
    for cell, most_lines in ((in_processes, 12), (in_the_trainer, 25)):
        shown = shown_error(cell)
        assert "return self.layer(batch[:, :3]).sum()" in shown
        assert "mat1 and mat2 shapes cannot be multiplied" in shown.splitlines()[-1]
        assert f"{os.sep}drivetrain{os.sep}" not in shown
        assert len(shown.splitlines()) <= most_lines
    assert int(whole.outputs[0].text) > 8, "the frames are not printed, but `sys.last_traceback` has them"
    shown = shown_error(in_an_argument)
    assert "quiet(precision='17')" in shown
    assert f"{os.sep}drivetrain{os.sep}" not in shown
    assert "Unknown precision '17'" in shown.splitlines()[-1]
    shown = shown_error(in_backward)
    assert "(torch.ones(2))" in shown
    assert f"{os.sep}drivetrain{os.sep}" not in shown


def test_all_frames_of_an_error_are_shown_on_request():
    _, in_the_trainer, in_an_argument = executed(
        [TRAINER, IN_THE_TRAINER, IN_AN_ARGUMENT], DRIVETRAIN_FULL_TRACEBACK="1"
    )
    assert "fit_loop.py" in shown_error(in_the_trainer)
    assert "accelerator.py" in shown_error(in_an_argument)
