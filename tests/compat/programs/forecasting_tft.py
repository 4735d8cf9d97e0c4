"""pytorch-forecasting's temporal fusion transformer: fit, validate, load the best checkpoint, predict."""

from __future__ import annotations

import os
import sys
import warnings

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.metrics import QuantileLoss


def sales(shops: int = 8, weeks: int = 40) -> pd.DataFrame:
    draws = np.random.default_rng(0)
    rows = []
    for shop in range(shops):
        level = 5 + 2 * shop
        for week in range(weeks):
            price = 1 + draws.random()
            sold = level * (1.5 + np.sin(week / 4)) / price
            rows.append({"shop": str(shop), "week": week, "month": str(week // 4 % 6), "price": price, "sold": sold})
    return pd.DataFrame(rows)


def main() -> None:
    warnings.filterwarnings("ignore")
    processes = int(sys.argv[1])
    pl.seed_everything(42)
    data = sales()
    training = TimeSeriesDataSet(
        data[data.week < 36],
        time_idx="week",
        target="sold",
        group_ids=["shop"],
        min_encoder_length=6,
        max_encoder_length=12,
        min_prediction_length=1,
        max_prediction_length=4,
        static_categoricals=["shop"],
        time_varying_known_categoricals=["month"],
        time_varying_known_reals=["week", "price"],
        time_varying_unknown_reals=["sold"],
        target_normalizer=GroupNormalizer(groups=["shop"], transformation="softplus"),
        add_relative_time_idx=True,
        add_target_scales=True,
        add_encoder_length=True,
    )
    validation = TimeSeriesDataSet.from_dataset(training, data, predict=True, stop_randomization=True)
    train_dataloader = training.to_dataloader(train=True, batch_size=16, num_workers=0)
    # One sample: the root of a batch's mean square depends on which samples the batch holds.
    val_dataloader = validation.to_dataloader(train=False, batch_size=1, num_workers=0)
    device, strategy = os.environ.get("DRIVETRAIN_TESTS_DEVICE", "cpu"), "ddp" if processes > 1 else "auto"
    places = {"accelerator": device, "devices": processes, "strategy": strategy}
    trainer = pl.Trainer(
        max_epochs=2,
        gradient_clip_val=0.1,
        limit_train_batches=4,
        callbacks=[LearningRateMonitor(), EarlyStopping("val_loss", min_delta=1e-4, patience=10)],
        logger=CSVLogger("logs"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        **places,
    )
    model = TemporalFusionTransformer.from_dataset(
        training,
        learning_rate=0.03,
        hidden_size=8,
        attention_head_size=2,
        dropout=0.1,
        hidden_continuous_size=4,
        loss=QuantileLoss(),
        log_interval=-1,
        reduce_on_plateau_patience=4,
    )
    trainer.fit(model, train_dataloaders=train_dataloader, val_dataloaders=val_dataloader)
    trainer.validate(model, val_dataloader)
    best = TemporalFusionTransformer.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    best.predict(val_dataloader, trainer_kwargs={"logger": False, "enable_progress_bar": False, **places})


if __name__ == "__main__":
    main()
