"""From the data to predictions: what docs/start/quickstart.md builds up, in one script.

    python examples/quickstart.py

Leaves `drivetrain_logs/version_0/report.html`, the curves of the run, where it was started.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import Task, Trainer

x, y = map(torch.tensor, load_digits(return_X_y=True))
train, test = random_split(TensorDataset(x.float() / 16, y), [1500, 297])


class Digits(Task):
    def configure_model(self):
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


trainer = Trainer(max_epochs=10, seed=0)
trainer.fit(Digits(), DataLoader(train, 32, shuffle=True), DataLoader(test, 100))
digits = torch.cat(trainer.predict(dataloaders=DataLoader(test, 100), ckpt_path="best"))
print("predicted", digits[:12].tolist())
print("labels   ", [label.item() for _, label in test][:12])
