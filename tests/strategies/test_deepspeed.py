"""DeepSpeed beside one plain process: stand-ins, partitioned building, clipping, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import (
    DDP,
    Accelerator,
    Callback,
    ConfigurationError,
    DeepSpeed,
    DummyOptim,
    DummyScheduler,
    Task,
    Trainer,
    gather_object,
)
from tests.launch.launching import launch, write_script
from tests.pool import ProcessesFailed, run_in_processes
from tests.shared_runs import SharedRuns
from tests.strategies import fsdp_models
from tests.strategies.deepspeed_models import (
    EXACT,
    NEEDS_DEEPSPEED,
    ROWS,
    STAGES,
    Loop,
    NetTask,
    adamw,
    assert_all_below,
    data,
    fitted,
    furthest,
    net,
    whole_weights,
)
from tests.strategies.quiet import quiet_trainer

pytestmark = NEEDS_DEEPSPEED

runs = SharedRuns(__name__, timeout=240)


@pytest.fixture
def result_of() -> Callable[[Callable[..., Any]], Any]:
    return lambda run: runs.of(run)[0]


@runs
def built_in_parts(directory: Path) -> dict[str, Any]:
    """A model made in `configure_model` under ZeRO-3: taken apart where it is made; trained, and evaluated alone."""
    task = NetTask(build=False)
    one, weights = fitted(DeepSpeed(3), task)
    _, expected = fitted(DeepSpeed(3))
    alone, other = NetTask(build=False), quiet_trainer(DeepSpeed(3))
    path = directory / "weights.ckpt"
    one.save_checkpoint(path)
    evaluation = DataLoader(data(3), batch_size=3)
    loss = one.validate(task, evaluation, verbose=False)[0]["val_loss"]
    again = other.validate(alone, evaluation, ckpt_path=path, verbose=False)[0]["val_loss"]
    return {"partitioned": task.partitioned, "gap": furthest(weights, expected), "losses": (loss, again)}


def test_zero_3_takes_parameters_apart_where_they_are_made(result_of):
    found = result_of(built_in_parts)
    assert all(found["partitioned"])
    assert found["gap"] <= EXACT
    assert found["losses"][0] == pytest.approx(found["losses"][1], abs=EXACT)


@runs
def optimizer_of_the_configuration(directory: Path) -> dict[str, Any]:
    """`DummyOptim` and `DummyScheduler`, against the same built by hand."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_num_steps": "auto",
                "warmup_max_lr": "auto",
                "warmup_min_lr": 0.001,
                "warmup_type": "linear",
            },
        },
    }

    def stand_ins(model: nn.Module) -> Any:
        optimizer = DummyOptim([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)
        return [optimizer], [DummyScheduler(optimizer, warmup_num_steps=4)]

    def by_hand(model: nn.Module) -> Any:
        optimizer = adamw(model)
        # DeepSpeed's makes two steps at the lowest rate: it counts its own steps from the first one on.
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + 0.9 * max(0, step - 1) / 4)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]

    found = {}
    for stage in (1, 3):
        one, weights = fitted(DeepSpeed(stage, config=config), NetTask(stand_ins))
        _, expected = fitted(DeepSpeed(stage), NetTask(by_hand))
        found[stage] = (furthest(weights, expected), one.optimizers[0].param_groups[0]["lr"])
    return found


def test_optimizer_and_scheduler_of_the_configuration(result_of):
    for gap, lr in result_of(optimizer_of_the_configuration).values():
        assert gap <= EXACT
        assert lr == pytest.approx(1e-2 * (0.1 + 0.9 * 3 / 4))  # after four steps


@runs
def adagrad_under_a_schedule(directory: Path) -> dict[Any, Any]:
    """One group and two of other rates under Adagrad, which DeepSpeed makes again, against DDP; and the last rates."""

    def adagrad(split: bool) -> Callable[[nn.Module], Any]:
        def make(model: nn.Module) -> Any:
            trained = [p for p in model.parameters() if p.requires_grad]
            groups = [{"params": trained[:2], "lr": 4e-2}, {"params": trained[2:], "weight_decay": 0.1}]
            optimizer = torch.optim.Adagrad(groups if split else trained, lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        return make

    found: dict[Any, Any] = {}
    for split in (False, True):
        plain, expected = fitted(DDP(), NetTask(adagrad(split)))
        rates = [group["lr"] for group in plain.optimizers[0].param_groups]
        for stage in STAGES:
            trainer, weights = fitted(DeepSpeed(stage), NetTask(adagrad(split)))
            own = [group["lr"] for group in trainer.optimizers[0].param_groups]
            found[split, stage] = furthest(weights, expected), own, rates
    return found


def test_a_schedule_changes_the_rates_of_adagrad(result_of):
    for (split, _), (gap, rates, expected) in result_of(adagrad_under_a_schedule).items():
        assert expected == pytest.approx([4e-2 / 16, 1e-2 / 16] if split else [1e-2 / 16])
        assert rates == pytest.approx(expected)
        assert gap <= EXACT


@runs
def validated_before_training(directory: Path) -> dict[int, float]:
    """A sanity check and validations between the steps, against a run without them."""
    found = {}
    for stage in (2, 3):
        one = quiet_trainer(DeepSpeed(stage), val_check_interval=2)
        one.fit(NetTask(), DataLoader(data(4), batch_size=ROWS), DataLoader(data(2), batch_size=ROWS))
        _, expected = fitted(DeepSpeed(stage))
        found[stage] = furthest(whole_weights(one), expected)
    return found


def test_training_continues_after_a_validation_in_inference_mode(result_of):
    assert_all_below(result_of(validated_before_training), EXACT)


@runs
def clipped_by_the_configuration(directory: Path) -> dict[int, float]:
    """`gradient_clipping` in the configuration, against the Trainer's."""
    found = {}
    for stage in STAGES:
        _, weights = fitted(DeepSpeed(stage, gradient_clipping=0.1))
        _, expected = fitted(DeepSpeed(stage), gradient_clip_val=0.1)
        found[stage] = furthest(weights, expected)
    return found


def test_the_configurations_clipping_is_the_trainers(result_of):
    assert_all_below(result_of(clipped_by_the_configuration), 0.0)


@runs
def clipped_by_value(directory: Path) -> dict[int, float]:
    found = {}
    _, expected = fitted("ddp", gradient_clip_val=0.01, gradient_clip_algorithm="value")
    for stage in STAGES:
        _, weights = fitted(DeepSpeed(stage), gradient_clip_val=0.01, gradient_clip_algorithm="value")
        found[stage] = furthest(weights, expected)
    return found


def test_gradients_are_clipped_by_value(result_of):
    assert_all_below(result_of(clipped_by_value), EXACT)


class Veto(Callback):
    """Leaves out the second step, whose gradients must then count for nothing."""

    def __init__(self) -> None:
        self.seen = 0

    def on_gradients_ready(self, trainer: Trainer, task: Task) -> bool:
        self.seen += 1
        return self.seen != 2


@runs
def a_step_left_out(directory: Path) -> dict[str, float]:
    found = {}
    _, expected = fitted("ddp", callbacks=[Veto()], accumulate_grad_batches=2)
    for stage in STAGES:
        _, weights = fitted(DeepSpeed(stage), callbacks=[Veto()], accumulate_grad_batches=2)
        found[str(stage)] = furthest(weights, expected)
    _, weights = fitted(DeepSpeed(2, offload_optimizer="cpu"), callbacks=[Veto()], accumulate_grad_batches=2)
    found["2, offloaded"] = furthest(weights, expected)
    return found


def test_gradients_of_a_step_left_out_count_for_nothing(result_of):
    assert_all_below(result_of(a_step_left_out), EXACT)


@runs
def fitted_twice(directory: Path) -> dict[int, float]:
    found = {}
    for stage in STAGES:
        task = NetTask()
        one, _ = fitted(DeepSpeed(stage), task)
        one.fit(task, DataLoader(data(4), batch_size=ROWS))
        weights = whole_weights(one)
        task = NetTask()
        one, _ = fitted("ddp", task)
        one.fit(task, DataLoader(data(4), batch_size=ROWS))
        found[stage] = furthest(weights, whole_weights(one))
    return found


def test_a_model_can_be_fitted_again(result_of):
    assert_all_below(result_of(fitted_twice), EXACT)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](x)


class MixtureTask(Task):
    """Each process sends its rows to another expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tail, self.mixture, self.head = nn.Linear(7, 7), Mixture(), nn.Linear(7, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.mixture(F.gelu(self.tail(batch[0])), (self.trainer.global_rank + batch_idx) % 2)
        return F.cross_entropy(self.head(x), batch[1])

    def configure_optimizers(self) -> Any:
        return adamw(self)


@runs
def mixture_of_experts(directory: Path) -> float:
    _, weights = fitted(DeepSpeed(3, moe_layers=["Mixture"]), MixtureTask())
    _, expected = fitted(DDP(find_unused_parameters=True), MixtureTask())
    return furthest(weights, expected)


def test_experts_that_only_some_processes_use(result_of):
    assert result_of(mixture_of_experts) <= EXACT


@runs
def two_models(directory: Path) -> dict[int, float]:
    """Each with an optimizer of its own, and one loss over both."""

    def train(strategy: Any) -> dict[str, Tensor]:
        accelerator = Accelerator(cpu=True, strategy=strategy)
        torch.manual_seed(5)
        models = [nn.Linear(7, 6), nn.Linear(6, 5)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        loader = DataLoader(data(4), batch_size=ROWS)
        first, second, one, other, loader = accelerator.prepare(*models, *optimizers, loader)
        for x, y in loader:
            accelerator.backward(F.cross_entropy(second(F.gelu(first(x))), y))
            norm = accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1)
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        states = [gather_object([accelerator.get_state_dict(model)])[0] for model in (first, second)]
        weights = {f"{n}.{name}": value for n, state in enumerate(states) for name, value in state.items()}
        return weights | {"norm": norm}

    expected = train("ddp")
    return {stage: furthest(train(DeepSpeed(stage)), expected) for stage in (1, 2, 3)}


def test_several_models_have_an_engine_each(result_of):
    assert_all_below(result_of(two_models), EXACT)


@runs
def unshared_buffers(directory: Path) -> bool:
    """Each process's batch statistics differ; what is evaluated and saved is rank 0's on all."""
    loop = Loop(DeepSpeed(2)).train(2)
    own = loop.accelerator.unwrap_model(loop.model).norm.running_mean.clone()
    means = gather_object([own])
    saved = gather_object([loop.weights()["norm.running_mean"]])
    return not torch.equal(means[0], means[1]) and torch.equal(saved[0], saved[1]) and torch.equal(saved[0], means[0])


def test_evaluation_and_checkpoints_see_rank_0s_buffers(result_of):
    assert result_of(unshared_buffers)


@runs
def refusals(directory: Path) -> dict[str, str]:
    def message(call: Callable[[], Any]) -> str:
        try:
            call()
        except ConfigurationError as error:
            return str(error)
        return "nothing was raised"

    def two_optimizers(model: nn.Module) -> Any:
        return [torch.optim.SGD(model.embed.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]

    def two_models_at_stage_0() -> None:
        accelerator = Accelerator(cpu=True, strategy=DeepSpeed(0))
        models = [nn.Linear(7, 6), nn.Linear(6, 5)]
        first, second, *_ = accelerator.prepare(*models, *[torch.optim.SGD(m.parameters(), lr=0.1) for m in models])
        accelerator.backward(second(first(torch.ones(2, 7))).sum())

    def unprepared() -> None:
        accelerator = Accelerator(cpu=True, strategy=DeepSpeed(1))
        accelerator.prepare(net())
        accelerator.prepare(torch.optim.SGD(net().parameters(), lr=0.1)).step()

    def rejected(config: dict[str, Any], optimizer: Any = None) -> str:
        def fit() -> None:
            fitted(DeepSpeed(config=config), NetTask(optimizer or adamw))

        found = message(fit)
        assert "\n" not in found
        return found

    def placeholder(model: nn.Module) -> Any:
        return DummyOptim(model.parameters())

    def clipped_otherwise() -> None:
        loop = Loop(DeepSpeed(1, gradient_clipping=1.0))
        loop.train(1)

    return {
        "fp16": message(lambda: quiet_trainer("deepspeed", precision="fp16")),
        "fp16-true": message(lambda: quiet_trainer("deepspeed", precision="16-true")),
        "64": message(lambda: quiet_trainer("deepspeed", precision="64")),
        "unknown keys": rejected({"compile": {"disable": False, "backend": "inductor"}}),
        "removed feature": rejected({"curriculum_learning": {"enabled": True}}),
        "wrong type": rejected({"communication_data_type": 16}),
        "unknown value": rejected({"data_types": {"grad_accum_dtype": "fp64"}}),
        "zero value": rejected({"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}}),
        "engine": rejected({"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
        "engine's optimizer": rejected({"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}}, placeholder),
        "zero option": message(lambda: quiet_trainer(DeepSpeed(2, overlap_com=True))),
        "accumulation": message(lambda: fitted(DeepSpeed(config={"gradient_accumulation_steps": 4}))),
        "clipping": message(lambda: fitted(DeepSpeed(gradient_clipping=1.0), gradient_clip_val=0.5)),
        "clipping in a loop": message(clipped_otherwise),
        "two optimizers": message(lambda: fitted(DeepSpeed(1), NetTask(two_optimizers))),
        "L-BFGS": message(lambda: fitted(DeepSpeed(1), NetTask(lambda m: torch.optim.LBFGS(m.head.parameters())))),
        "unprepared": message(unprepared),
        "two models at stage 0": message(two_models_at_stage_0),
        "moe": message(lambda: fitted(DeepSpeed(3, moe_layers=["Mixtur"]), MixtureTask())),
        "nvme": message(lambda: quiet_trainer(DeepSpeed(2, offload_optimizer="nvme", nvme_path=directory))),
    }


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fp16", "precision='fp16' cannot run under strategy='deepspeed' on the CPU"),
        ("fp16-true", "precision='fp16-true' cannot run under strategy='deepspeed' on the CPU"),
        ("64", "precision='64' cannot run under strategy='deepspeed'"),
        ("unknown keys", "rejects compile in the DeepSpeed configuration: disable: Extra inputs are not permitted"),
        ("unknown keys", "use Trainer(compile=...) or Accelerator(dynamo_backend=...)"),
        ("removed feature", "rejects curriculum_learning in the DeepSpeed configuration: Legacy"),
        ("wrong type", "rejects communication_data_type in"),
        ("unknown value", "rejects data_types.grad_accum_dtype in the DeepSpeed configuration: 'fp64' is not a valid"),
        ("zero value", "rejects zero_optimization.reduce_bucket_size in"),
        ("engine", "rejects gradient_predivide_factor in"),
        ("engine's optimizer", "optimizer.params.momentun in the DeepSpeed configuration"),
        ("zero option", "no zero_optimization option 'overlap_com'. Did you mean 'overlap_comm'?"),
        ("accumulation", "says gradient_accumulation_steps=4, but Trainer(accumulate_grad_batches=1)"),
        ("clipping", "says gradient_clipping=1.0, but Trainer(gradient_clip_val=0.5)"),
        ("clipping in a loop", "says gradient_clipping=1.0, but the loop clips to 0.5"),
        ("two optimizers", "supports one optimizer per model, but 2 hold parameters of this NetTask"),
        ("L-BFGS", "a closure"),
        ("two models at stage 0", "Use stage 1, 2 or 3, or combine the models in one module"),
        ("unprepared", "was not prepared together with its model"),
        ("moe", "no module of this class. Did you mean 'Mixture'?"),
        ("nvme", "async_io"),
    ],
)
def test_what_cannot_work_is_refused(result_of, case, message):
    assert message in result_of(refusals)[case]


class AutocastTask(NetTask):
    """Lists, for each call of the wrapper and each step, whether autocast is enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.around: list[bool] = []
        self.inside: list[bool] = []

    def on_train_start(self) -> None:
        self.trainer.model.register_forward_pre_hook(lambda *_: self.around.append(torch.is_autocast_enabled("cpu")))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.inside.append(torch.is_autocast_enabled("cpu"))
        return super().training_step(batch, batch_idx)


@runs
def autocast_around_and_inside_of_the_engine() -> dict[str, Any]:
    """An engine that finds autocast enabled on CUDA disables it, and so would compute in 32 bits."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", "deepspeed_stage_1", "deepspeed_stage_3"):
        task = AutocastTask()
        one = quiet_trainer(strategy, precision="bf16-mixed")
        one.fit(task, DataLoader(data(4), batch_size=ROWS))
        found[strategy] = (set(task.around), set(task.inside))
        loop = Loop(strategy, precision="bf16")
        around: list[bool] = []
        loop.model.register_forward_pre_hook(lambda *_, seen=around: seen.append(torch.is_autocast_enabled("cpu")))
        loop.train(2)
        found[f"{strategy}, loop"] = (set(around), {True})
    return found


def test_autocast_is_enabled_inside_of_the_engine_only(result_of):
    found = result_of(autocast_around_and_inside_of_the_engine)
    assert found
    assert all(places == ({False}, {True}) for places in found.values()), found


def fit_with_a_step_left_out() -> None:
    quiet_trainer(DeepSpeed(stage=3)).fit(fsdp_models.NetTask(skipped=0), fsdp_models.loader())


def test_a_step_left_out_on_one_process_is_refused_at_stage_3():
    with pytest.raises(ProcessesFailed, match=r"NetTask.training_step returned None on rank 0"):
        run_in_processes(fit_with_a_step_left_out, 2, timeout=60)


SCRIPT = """
    import torch
    from drivetrain import Accelerator

    accelerator = Accelerator(strategy="deepspeed_stage_3")
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 3)).mean())
    optimizer.step()
    print("trained on", accelerator.num_processes, "processes,", accelerator.state.backend, flush=True)
"""


@pytest.mark.slow
def test_torchs_agent_starts_it(tmp_path):
    """No MPI, no hostfile, no launcher of DeepSpeed's own; and nothing is compiled."""
    script = write_script(tmp_path, SCRIPT)
    built = str(tmp_path / "built")
    ended = launch("--cpu", "--num_processes", "2", script, cwd=tmp_path, TORCH_EXTENSIONS_DIR=built)
    assert ended.code == 0, ended.err
    assert ended.out.count("trained on 2 processes, gloo") == 2
    assert not (tmp_path / "built").exists()
