"""The workload to time: FedAvg rounds on random images with the shape of a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcat.core.errors import unknown_name
from fedcat.data.dataset import Dataset
from fedcat.data.pool import Pool
from fedcat.runs.build import Builder
from fedcat.runs.run import Run


@dataclass(frozen=True)
class Images:
    """The shape and the number of a dataset's images, and the batch size of its experiments."""

    shape: tuple[int, int, int]
    samples: int
    batch_size: int


MNIST, CIFAR, DIGITS = Images((1, 28, 28), 60_000, 50), Images((3, 32, 32), 50_000, 50), Images((1, 8, 8), 1_797, 10)
IMAGES = {
    "digits-cnn": DIGITS,
    "lab-cifar": CIFAR,
    "lab-mnist": MNIST,
    "lab-femnist": MNIST,
    "mcmahan-mnist": MNIST,
    "mcmahan-cifar": CIFAR,
}


@dataclass(frozen=True)
class Workload:
    """The work of a round.

    Attributes
    ----------
    net : str
        The net.
    per_round, clients : int
        Clients per round (K) and in total (N).
    epochs : int
        Local epochs.
    alpha : float
        Concentration of the Dirichlet partition.
    samples : int or None
        Total samples of all clients; by default as many as the net's dataset has.
    """

    net: str
    per_round: int = 10
    clients: int = 100
    epochs: int = 5
    alpha: float = 0.5
    samples: int | None = None

    @property
    def images(self) -> Images:
        """The format of the net's inputs."""
        if self.net not in IMAGES:
            raise unknown_name("net", self.net, IMAGES)
        return IMAGES[self.net]

    @property
    def batch_size(self) -> int:
        """Samples per batch."""
        return self.images.batch_size

    def dataset(self) -> Dataset:
        """Return random images with random labels."""
        rng = np.random.default_rng(0)
        count = self.samples or self.images.samples
        x = rng.integers(256, size=(count, *self.images.shape), dtype=np.uint8)
        y = rng.integers(10, size=count)
        return Dataset("random images", Pool(x, y), Pool(x[:1000], y[:1000]), 10)

    def runs(self, runs: int, data: Dataset, **settings: Any) -> list[Run]:
        """Return FedAvg runs with different seeds, which are never evaluated."""
        builder = Builder()
        given = {"dataset": data, "net": self.net, "method": "fedavg", "clients": self.clients, "alpha": self.alpha}
        given |= {"per_round": self.per_round, "epochs": self.epochs, "batch_size": self.batch_size, "data_seed": 0}
        given |= {"rounds": 10**9, "evaluate_every": 10**9, "lr": 1e-3, "momentum": 0.5, "min_samples": 2, **settings}
        return [builder.build({**given, "seed": seed}) for seed in range(runs)]

    def steps(self, run: Run, clients: list[int]) -> int:
        """Return the number of local steps that `clients` take in a round."""
        return sum(self.epochs * -(-run.task.samples(client) // self.batch_size) for client in clients)
