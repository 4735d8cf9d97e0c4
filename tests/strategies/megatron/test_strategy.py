"""Megatron in a raw loop, beside its own checks, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, ConfigurationError, MegatronLMPlugin, Task
from tests.pool import ROOT, run_in_processes
from tests.shared_runs import SharedRuns
from tests.strategies.megatron import cpu_shim, models
from tests.strategies.megatron.models import ACCUMULATE, GPT, MAX_NORM, ROWS, Texts, fit
from tests.strategies.quiet import quiet_trainer
from tests.test_snippets import scripts_of

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

runs = SharedRuns(__name__, timeout=280)


def raw_loop(plugin: MegatronLMPlugin, initial: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    """A loop of one's own over a bare `GPTModel`."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, gradient_accumulation_steps=ACCUMULATE)
    task = GPT()
    with accelerator.init_context():
        config = accelerator.strategy.transformer_config(task.transformer_config())
        model = task.model_provider(config=config)
    optimizer = models.adamw(model.parameters())
    rows = ROWS // accelerator.strategy.topology.data_shard.count
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Texts(), batch_size=rows))
    if initial is not None:
        accelerator.strategy.state.load_model(model, initial)
    begun = accelerator.strategy.state.model(model, full=True)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            positions = torch.arange(models.LENGTH).expand_as(batch["tokens"])
            loss = model(batch["tokens"], positions, None, labels=batch["labels"]).mean()
            losses.append(float(accelerator.strategy.topology.sum(loss.detach())) / (ROWS // rows))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
    return {"losses": losses, "norms": norms, "parameters": accelerator.get_state_dict(model), "begun": begun}


@runs
def raw_loops() -> list[dict[str, Any]]:
    cpu_shim.install()
    from drivetrain import broadcast_object_list

    tensor = raw_loop(MegatronLMPlugin(tp_degree=2), None)
    begun = broadcast_object_list([tensor["begun"]])[0]
    whole = raw_loop(MegatronLMPlugin(use_distributed_optimizer=False), begun)
    data = raw_loop(MegatronLMPlugin(use_distributed_optimizer=True, num_micro_batches=ACCUMULATE), begun)
    from drivetrain import Megatron

    named = {f"model.{name}": value for name, value in begun.items()}
    outcome = fit(Megatron(), initial=named, evaluate=False)
    parameters = {name.removeprefix("model."): value for name, value in outcome.parameters.items()}
    return [tensor, whole, data, {"losses": outcome.losses, "norms": outcome.norms, "parameters": parameters}]


def test_a_raw_loop_gives_what_the_trainer_gives() -> None:
    *loops, trainer = runs.of(raw_loops)[0]
    for loop in loops:
        assert loop["losses"] == pytest.approx(trainer["losses"], abs=5e-6)
        assert loop["norms"] == pytest.approx(trainer["norms"], abs=5e-6)
        assert loop["parameters"].keys() == trainer["parameters"].keys()
        for name, value in trainer["parameters"].items():
            torch.testing.assert_close(loop["parameters"][name], value, atol=5e-6, rtol=0, msg=name)


class Schedules(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        placed = next(iter(trainer.strategy._models))
        self.rates.append(placed.optimizer.inner.param_groups[0]["lr"])


class Scheduled(GPT):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@runs
def follows_schedules() -> Any:
    cpu_shim.install()
    from drivetrain import Megatron

    seen = Schedules()
    outcome = fit(
        Megatron(pipeline_parallel=2, distributed_optimizer=False), Scheduled(), callbacks=[seen], evaluate=False
    )
    return seen.rates[1::2], outcome.losses


def test_learning_rate_schedules_reach_the_inner_optimizer() -> None:
    for rates, _ in runs.of(follows_schedules):
        # Of each step as it was taken; the scheduler steps after it.
        assert rates == pytest.approx([0.1, 0.05, 0.025, 0.0125])


@runs
def clips_by_itself() -> Any:
    cpu_shim.install()
    from drivetrain import Megatron

    found = []
    for strategy, clip in ((Megatron(gradient_clipping=MAX_NORM), None), (Megatron(), MAX_NORM)):
        torch.manual_seed(0)
        outcome = fit(strategy, seed=3, gradient_clip_val=clip, evaluate=False)
        found.append(outcome.losses)
    return found


def test_the_strategys_own_clipping_is_the_trainers() -> None:
    own, trainers = runs.of(clips_by_itself)[0]
    assert own == trainers


@runs
def overflows() -> Any:
    cpu_shim.install()
    from drivetrain import Megatron

    scale = {"initial_loss_scale": 2.0**40}
    outcome = fit(Megatron(pipeline_parallel=2, optimizer=scale), precision="fp16", evaluate=False)
    trainer = outcome.trainer
    (optimizer,) = (each.optimizer for each in trainer.task_run.optimizers)
    scaler = trainer.strategy.state.optimizer(trainer.model, optimizer)["grad_scaler"]
    return trainer.global_step, float(scaler["scale"])


def test_steps_that_overflow_are_left_out_on_all_stages_and_lower_the_scale() -> None:
    for steps, scale in runs.of(overflows):
        assert steps == 0
        assert scale < 2.0**40


@runs
def counts_whole_parameters() -> Any:
    cpu_shim.install()
    from drivetrain import Megatron

    outcome = fit(Megatron(tensor_parallel=2), evaluate=False)
    task = outcome.trainer.task_run.task
    held = sum(parameter.numel() for parameter in task.parameters())
    described = sum(outcome.trainer.strategy.state.describe(parameter)[0] for parameter in task.parameters())
    return held, described, sum(value.numel() for value in outcome.parameters.values())


def test_a_summary_counts_whole_parameters() -> None:
    held, described, whole = runs.of(counts_whole_parameters)[0]
    assert held < described == whole


def run_example(text: str) -> int:
    cpu_shim.install()
    names: dict[str, Any] = {}
    exec(compile(text, "docs/megatron.md", "exec"), names)
    return names["trainer"].global_step


def test_the_example_of_the_documentation_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "megatron.md"
    (script,) = [each for each in scripts_of(page, page.read_text()) if "megatron" in each.needs]
    monkeypatch.chdir(tmp_path)
    assert run_in_processes(run_example, 1, args=(script.text,), timeout=60) == [2]


# what is refused


class Plain(Task):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class LeavesOut(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([next(iter(self.parameters()))])


class Unusual(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters())


class NoModel(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


REFUSED: dict[str, tuple[dict[str, Any], Any, dict[str, Any], str]] = {
    "layers": ({"pipeline_parallel": 2}, lambda: GPT(num_layers=3), {}, "num_layers=3 is not a multiple of pipeline"),
    "interleaved layers": (
        {"pipeline_parallel": 2, "virtual_pipeline": 3},
        GPT,
        {},
        "num_layers=4 is not a multiple of pipeline_parallel x virtual_pipeline, which is 6",
    ),
    "heads": (
        {"tensor_parallel": 2},
        lambda: GPT(num_attention_heads=1),
        {},
        "num_attention_heads=1 is not a multiple of tensor_parallel, which is 2. Set tensor_parallel to 1, or",
    ),
    "query groups": ({"tensor_parallel": 2}, lambda: GPT(num_query_groups=1), {}, "num_query_groups=1 is not a mul"),
    "vocabulary": (
        {"tensor_parallel": 2},
        lambda: GPT(vocabulary=47),
        {},
        "size 47, such as vocab_size.* Pad it to 48",
    ),
    "no experts": ({"expert_parallel": 2}, GPT, {}, "TransformerConfig has no num_moe_experts"),
    "size given twice": (
        {},
        lambda: GPT(tensor_model_parallel_size=2),
        {},
        "contradicts the strategy's tensor_parallel=1",
    ),
    "experts per token": (
        {},
        lambda: GPT(num_moe_experts=2, calculate_per_token_loss=True),
        {},
        "not weighted per token",
    ),
    "another task": ({}, Plain, {}, "Plain is not a MegatronTask.*Subclass drivetrain.MegatronTask.*Parallel"),
    "an unusual optimizer": ({}, Unusual, {}, "own AdamW, Adam or SGD, not with Adagrad"),
    "SGD, spread": ({}, Scheduled, {}, "cannot shard the state of SGD.*distributed_optimizer=False"),
    "parameters left out": ({}, LeavesOut, {}, "leaves out .* trainable parameters"),
    "a step without a loss": ({}, NoModel, {}, "NoModel.training_step returned no loss"),
    "a field that is not there": ({"transformer": {"hiden_dropout": 0.1}}, GPT, {}, "hidden_dropout"),
    "64 bits": ({}, GPT, {"precision": "64"}, "precision='64' cannot run.*Use '32', 'bf16' or 'fp16'"),
    "two counts of micro-batches": (
        {"gradient_accumulation_steps": 3},
        GPT,
        {},
        r"gradient_accumulation_steps=3\) contradicts .*=2",
    ),
    "shapes that differ": (
        {"pipeline_parallel": 2, "virtual_pipeline": 2},
        GPT,
        {"samples": ROWS + 3},
        r"shapes \[\(3, 16\), \(4, 16\)\], but virtual_pipeline with two stages",
    ),
    "two norms": ({"gradient_clipping": 1.0}, GPT, {}, "contradicts the loop, which clips to 0.5"),
}


@runs
def refusals() -> dict[str, str]:
    cpu_shim.install()
    from drivetrain import Megatron

    found = {}
    for name, (sizes, make, options, _) in REFUSED.items():
        samples = options.get("samples")
        data = torch.randn(8, 4) if name == "another task" else None if samples is None else Texts(samples)
        options = {key: value for key, value in options.items() if key != "samples"}
        try:
            fit(Megatron(**sizes), make(), data, evaluate=False, **options)
        except ConfigurationError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    for found in runs.of(refusals):
        assert name in found
        assert re.search(REFUSED[name][3], found[name], re.DOTALL), found[name]


def elsewhere() -> dict[str, str]:
    """Without the shim: the CPU; and a task of megatron-core under another strategy."""
    from drivetrain import Accelerator, Megatron

    found = {}
    for name, run in {
        "the CPU": lambda: quiet_trainer(Megatron()),
        "another strategy": lambda: fit("single", evaluate=False),
        "another model": lambda: Accelerator(cpu=True, strategy=shimmed()).prepare(nn.Linear(2, 2), adam()),
        "stages in a raw loop": lambda: Accelerator(cpu=True, strategy=shimmed()).prepare(nn.Linear(2, 2)),
        "a task in a raw loop": lambda: Accelerator(cpu=True, strategy=shimmed()).prepare(GPT()),
    }.items():
        try:
            run()
        except ConfigurationError as error:
            found[name] = str(error)
    return found


def shimmed() -> Any:
    from drivetrain import Megatron

    cpu_shim.install()
    return Megatron()


def adam() -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters())


def test_it_is_refused_elsewhere() -> None:
    found = run_in_processes(elsewhere, 1, timeout=60)[0]
    assert "needs CUDA GPUs" in found["the CPU"]
    assert "GPT is a MegatronTask" in found["another strategy"]
    assert "Linear is not built from megatron-core's layers" in found["another model"]
    assert "GPT is a MegatronTask, whose steps need a Trainer" in found["a task in a raw loop"]
