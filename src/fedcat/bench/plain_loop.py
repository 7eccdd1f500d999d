"""The usual hand-written loop: one model, a new optimizer per client, clients one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fedcat.bench.workload import Workload
from fedcat.models.nets import NETS
from fedcat.runs.run import Run


class PlainLoop:
    """FedAvg in plain PyTorch on the clients of a run.

    Parameters
    ----------
    work : Workload
        The workload.
    like : Run
        The run whose clients, samples and device it uses.
    loader : bool
        Take batches from a ``DataLoader`` instead of slicing tensors.
    """

    def __init__(self, work: Workload, like: Run, loader: bool = False) -> None:
        self.work, self.loader = work, loader
        self.device = like.task.layout.device
        build = NETS.get(work.net)
        self.model = build(work.images.shape, 10).to(self.device)
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.task = like.task
        self.clients: dict[int, tuple[Tensor, Tensor]] = {}

    def prepare(self, clients: list[int]) -> None:
        """Load the samples of `clients` into memory as float tensors, as a user's script would."""
        for client in clients:
            if client not in self.clients:
                index = torch.from_numpy(self.task.federation.indices(client)).to(self.device)
                self.clients[client] = self.task.pool.inputs(index, torch.float32), self.task.pool.y[index]

    def round(self, clients: list[int]) -> None:
        """Train `clients` and average their models, weighted by samples."""
        total: dict[str, Tensor] = {}
        weight = sum(len(self.clients[client][1]) for client in clients)
        for client in clients:
            self.model.load_state_dict(self.state)
            self._train(*self.clients[client])
            share = len(self.clients[client][1]) / weight
            for name, value in self.model.state_dict().items():
                total[name] = total[name] + share * value if name in total else share * value
        self.state = total

    def _train(self, x: Tensor, y: Tensor) -> None:
        self.model.train()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.5)
        for _ in range(self.work.epochs):
            for batch in self._batches(x, y):
                _step(self.model, optimizer, *batch)

    def _batches(self, x: Tensor, y: Tensor) -> Any:
        size = self.work.batch_size
        if self.loader:
            return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True)
        order = torch.randperm(len(y), device=y.device)
        return ((x[order[i : i + size]], y[order[i : i + size]]) for i in range(0, len(y), size))


def _step(model: nn.Module, optimizer: torch.optim.SGD, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
