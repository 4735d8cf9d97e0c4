"""neuralforecast's NHITS: fit with a validation set, predict, save, load, and predict again."""

from __future__ import annotations

import os
import sys
import warnings

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS


def series(count: int = 6, days: int = 60) -> pd.DataFrame:
    draws = np.random.default_rng(0)
    days_of_all = pd.date_range("2024-01-01", periods=days)
    parts = []
    for number in range(count):
        values = 10 + number + np.sin(np.arange(days) / 3) + draws.normal(0, 0.1, days)
        parts.append(pd.DataFrame({"unique_id": f"series {number}", "ds": days_of_all, "y": values}))
    return pd.concat(parts)


def main() -> None:
    warnings.filterwarnings("ignore")
    processes = int(sys.argv[1])
    places = {"accelerator": "cpu", "devices": processes, "strategy": "ddp" if processes > 1 else "auto"}
    model = NHITS(
        h=4,
        input_size=8,
        max_steps=16,
        val_check_steps=4,
        early_stop_patience_steps=3,
        batch_size=2,
        windows_batch_size=16,
        mlp_units=3 * [[16, 16]],
        random_seed=1,
        enable_progress_bar=False,
        **places,
    )
    forecast = NeuralForecast(models=[model], freq="D")
    forecast.fit(df=series(), val_size=8)
    made = forecast.predict()
    # Every process removes the folder and makes it again; the first one writes.
    forecast.save(f"saved by {os.environ.get('RANK', '0')}", overwrite=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    again = NeuralForecast.load("saved by 0").predict()
    assert processes > 1 or np.allclose(made.NHITS, again.NHITS)


if __name__ == "__main__":
    main()
