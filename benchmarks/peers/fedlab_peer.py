"""FedLab: its standalone pipeline, and its scale mode with several processes."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from work import LR, MOMENTUM, Turns, Work, command_line, flat, make_data, make_net, slices

stub = ModuleType("torchvision")
stub.transforms = ModuleType("torchvision.transforms")
sys.modules |= {"torchvision": stub, "torchvision.transforms": stub.transforms}

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import FedDataset  # noqa: E402
from fedlab.core.client.manager import PassiveClientManager  # noqa: E402
from fedlab.core.network import DistNetwork  # noqa: E402
from fedlab.core.server.manager import SynchronousServerManager  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402

SHIMS = "a stub instead of torchvision, which FedLab imports but this workload does not use"
THREADS = {
    "standalone, slices, one thread": 1,
    "standalone, slices, two threads": 2,
    "standalone, DataLoader, one thread": 1,
    "scale, slices, two processes": 1,
}


class Sliced:
    """An iterable of batches, sliced by a new permutation in each epoch."""

    def __init__(self, x: Tensor, y: Tensor, batch: int) -> None:
        self.x, self.y, self.batch = x, y, batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return slices(self.x, self.y, self.batch)


class InMemory(FedDataset):
    """Some clients' samples in memory."""

    def __init__(self, x: Tensor, y: Tensor, loader: bool) -> None:
        super().__init__()
        self.x, self.y, self.loader, self.num = x, y, loader, len(y)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Iterable[tuple[Tensor, Tensor]]:
        """Return the batches of one client."""
        if self.loader:
            return DataLoader(TensorDataset(self.x[id], self.y[id]), batch_size, shuffle=True)
        return Sliced(self.x[id], self.y[id], batch_size)


class Trainer(SGDSerialClientTrainer):
    """FedLab's trainer with momentum and a new optimizer per client."""

    def train(self, model_parameters: Tensor, train_loader: Iterable) -> list[Tensor]:
        """Train one client."""
        self.optimizer = torch.optim.SGD(self._model.parameters(), self.lr, momentum=MOMENTUM)
        return super().train(model_parameters, train_loader)


class Pipeline(StandalonePipeline):
    """FedLab's loop in one process, timed in the evaluation hook, which users write themselves."""

    turns: Turns

    def evaluate(self) -> None:
        """End this round and begin the next one."""
        self.turns.end(lambda: self.handler.model_parameters.clone())
        self.turns.begin()


class Handler(SyncServerHandler):
    """The server of the scale mode; a round ends when its last upload is aggregated."""

    turns: Turns

    def load(self, payload: list[Tensor]) -> bool:
        """Receive one upload."""
        complete = super().load(payload)
        if complete:
            self.turns.end(lambda: self.model_parameters.clone())
            self.turns.begin()
        return complete


def make_trainer(net: nn.Module, work: Work, clients: slice, loader: bool) -> Trainer:
    """Return a trainer for some of the clients."""
    x, y = make_data(work)
    trainer = Trainer(net, len(y[clients]))
    trainer.setup_dataset(InMemory(x[clients], y[clients], loader))
    trainer.setup_optim(work.epochs, work.batch, LR)
    return trainer


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_standalone(turns: Turns, net: nn.Module, loader: bool) -> None:
    """Run FedLab in this process."""
    handler = SyncServerHandler(net, turns.total, 1.0)
    pipeline = Pipeline(handler, make_trainer(net, turns.work, slice(None), loader))
    pipeline.turns = turns
    turns.begin()
    pipeline.main()


def run_scale(turns: Turns, net: nn.Module) -> None:
    """Run FedLab's server in this process and its clients in two others."""
    half, port = turns.work.clients // 2, str(free_port())
    managers = []
    for rank, clients in enumerate((slice(half), slice(half, None)), start=1):
        trainer = make_trainer(net, turns.work, clients, loader=False)
        managers.append(PassiveClientManager(DistNetwork(("127.0.0.1", port), 3, rank), trainer))
        managers[-1].start()
    handler = Handler(net, turns.total, 1.0)
    handler.turns = turns
    turns.begin()
    SynchronousServerManager(DistNetwork(("127.0.0.1", port), 3, 0), handler).run()
    for manager in managers:
        manager.join()


def main() -> None:
    """Time FedLab."""
    words = command_line()
    logging.disable(logging.INFO)
    torch.set_num_threads(THREADS[words.setting])
    net = make_net(words.work)
    turns = Turns(words, THREADS[words.setting], flat(net.state_dict()))
    if words.setting.startswith("scale"):
        run_scale(turns, net)
    else:
        run_standalone(turns, net, loader="DataLoader" in words.setting)
    turns.report("fedlab", version("fedlab"), SHIMS)


if __name__ == "__main__":
    main()
