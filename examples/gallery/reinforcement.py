"""Reinforcement learning: PPO balances a pole on a cart, with rollouts as the data.

    python examples/gallery/reinforcement.py

The cart and its pole are simulated here (Barto, Sutton and Anderson 1983): the data are made, none are real. An
iterable dataset lets the policy act in 16 environments at once and yields what they went through, from which proximal
policy optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) learns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import CSVLogger, EarlyStopping, ModelCheckpoint, Task, Trainer

LONGEST = 500  # steps of an episode; each is worth 1


class CartPoles:
    """Several carts with poles; those whose pole has fallen, or that have left the track, begin again."""

    def __init__(self, count: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.states, self.steps = torch.zeros(count, 4), torch.zeros(count)
        self.restart(torch.ones(count, dtype=torch.bool))

    def restart(self, which: Tensor) -> None:
        self.states[which] = torch.rand(int(which.sum()), 4, generator=self.generator) / 10 - 0.05
        self.steps[which] = 0

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Push left (0) or right (1) for 20 ms; which have fallen, and which have stood for 500 steps."""
        _, v, angle, spin = self.states.unbind(1)  # positions, velocities, angles, angular velocities
        sine, cosine = angle.sin(), angle.cos()
        pushed = (20.0 * actions - 10.0 + 0.05 * spin.square() * sine) / 1.1
        turned = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        moved = pushed - 0.05 * turned * cosine / 1.1
        self.states, self.steps = self.states + 0.02 * torch.stack([v, moved, spin, turned], dim=1), self.steps + 1
        fallen = (self.states[:, 0].abs() > 2.4) | (self.states[:, 2].abs() > 0.2095)
        return fallen, (self.steps >= LONGEST) & ~fallen


class Rollouts(IterableDataset):
    """What the present policy goes through: batches of (state, action, log-probability, advantage, return)."""

    def __init__(self, task: PPO, count: int = 16, length: int = 128, passes: int = 4, seed: int = 1) -> None:
        self.task, self.length, self.passes = task, length, passes
        self.carts, self.episodes = CartPoles(count, seed), []  # and how long they were

    @torch.no_grad()
    def act(self, gamma: float = 0.99, decay: float = 0.95) -> list[Tensor]:
        """Act for a while; generalised advantages are summed from the last step back."""
        rows = []
        for _ in range(self.length):
            states = self.carts.states
            logits, values = self.task(states)
            actions = (chosen := Categorical(logits=logits)).sample()
            fallen, cut = self.carts.step(actions)
            after = self.task(self.carts.states)[1] * ~fallen  # a fallen pole is worth nothing from then on
            rows.append((states, actions, chosen.log_prob(actions), values, 1 + gamma * after - values, fallen | cut))
            self.episodes += self.carts.steps[fallen | cut].tolist()
            self.carts.restart(fallen | cut)
        states, actions, chances, values, surprises, ended = (torch.stack(part) for part in zip(*rows, strict=True))
        advantages, running = torch.zeros_like(values), torch.zeros_like(values[0])
        for t in reversed(range(self.length)):
            advantages[t] = running = surprises[t] + gamma * decay * running * ~ended[t]
        return [part.flatten(0, 1) for part in (states, actions, chances, advantages, advantages + values)]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rows = self.act()
        for _ in range(self.passes):
            for chosen in torch.randperm(len(rows[0])).split(256):
                yield tuple(part[chosen] for part in rows)


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class PPO(Task):
    def __init__(self, lr: float = 3e-3, clip: float = 0.2, entropy: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.policy, self.value, self.rollouts = network(2), network(1), Rollouts(self)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (rows, 2) of the actions, and the values (rows,) of the states."""
        return self.policy(states), self.value(states).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        states, actions, before, advantages, returns = batch
        logits, values = self(states)
        chosen = Categorical(logits=logits)
        ratio, clip = (chosen.log_prob(actions) - before).exp(), self.hparams["clip"]
        clipped, advantages = ratio.clamp(1 - clip, 1 + clip), (advantages - advantages.mean()) / advantages.std()
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        value_loss, entropy = F.smooth_l1_loss(values, returns), chosen.entropy().mean()
        self.log_dict({"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}, on_epoch=True)
        return policy_loss + 0.5 * value_loss - self.hparams["entropy"] * entropy

    def on_train_epoch_end(self) -> None:
        self.log("episode_length", torch.tensor(self.rollouts.episodes[-32:]).mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


@torch.no_grad()
def judge(task: PPO, count: int = 100) -> float:
    """The mean length of as many episodes, each action the likelier one."""
    carts, alive, total = CartPoles(count, seed=2), torch.ones(count, dtype=torch.bool), 0.0
    for _ in range(LONGEST):
        total += float(alive.sum())
        alive &= ~carts.step(task(carts.states)[0].argmax(1))[0]
    return total / count


@click.command()
@click.option("--small", is_flag=True, help="Few updates, to see that it runs.")
@click.option("--output", default="reinforcement", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    longest = {"monitor": "episode_length", "mode": "max"}
    trainer = Trainer(
        max_epochs=6 if small else 40,  # each is a rollout, and four passes over it
        seed=0,
        logger=CSVLogger(output, name="run"),
        log_every_n_steps=32,
        default_root_dir=output,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(**longest), EarlyStopping(**longest, stopping_threshold=LONGEST - 1, patience=40)],
    )
    task = PPO()
    before = judge(task)
    trainer.fit(task, DataLoader(task.rollouts, batch_size=None))
    after, episodes = judge(task), len(task.rollouts.episodes)
    trainer.print(f"the pole stands for {after:.0f} steps, {before:.0f} before training")
    if trainer.is_global_zero:
        results = {"untrained_episode_length": before, "episode_length": after, "episodes": episodes}
        (output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
