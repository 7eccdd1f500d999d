"""The workload of every peer: the nets, the data, the plain loop, and the timing of both in turns.

It needs only PyTorch and NumPy, so that it runs in every environment.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

LR = 0.01
MOMENTUM = 0.5
CLASSES = 10
State = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """One federation and how its clients train; every client takes part in every round."""

    net: str
    shape: tuple[int, int, int]
    clients: int
    samples: int
    batch: int
    epochs: int

    @property
    def steps(self) -> int:
        """The number of optimizer steps per round."""
        return self.clients * self.epochs * math.ceil(self.samples / self.batch)


WORKS = {
    work.net: work
    for work in (
        Work("mcmahan-mnist", (1, 28, 28), clients=4, samples=600, batch=10, epochs=1),
        Work("lab-cifar", (3, 32, 32), clients=10, samples=500, batch=50, epochs=1),
        Work("lab-mnist", (1, 28, 28), clients=10, samples=600, batch=50, epochs=1),
        Work("digits-cnn", (1, 8, 8), clients=10, samples=100, batch=10, epochs=5),
    )
}


def _convolution(into: int, out: int, size: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(into, out, size, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _dense(*widths: int) -> list[nn.Module]:
    hidden = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return [nn.Flatten(), *hidden, nn.Linear(widths[-1], CLASSES)]


def make_net(name: str) -> nn.Module:
    """Return the net of the given name, always with the same initial weights."""
    torch.manual_seed(0)
    layers = {
        "mcmahan-mnist": lambda: [*_convolution(1, 32, 5, 2), *_convolution(32, 64, 5, 2), *_dense(3136, 512)],
        "lab-cifar": lambda: [*_convolution(3, 6, 5), *_convolution(6, 16, 5), *_dense(400, 120, 84)],
        "lab-mnist": lambda: [*_convolution(1, 20, 5), *_convolution(20, 50, 5), *_dense(800, 50)],
        "digits-cnn": lambda: [*_convolution(1, 16, 3, 1), *_convolution(16, 32, 3, 1), *_dense(128, 64)],
    }
    return nn.Sequential(*layers[name]())


def make_images(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Return random images [clients, samples, ...] of bytes, and their labels [clients, samples]."""
    rng = np.random.default_rng(0)
    size = (work.clients, work.samples)
    return rng.integers(256, size=(*size, *work.shape), dtype=np.uint8), rng.integers(CLASSES, size=size)


def make_data(work: Work) -> tuple[Tensor, Tensor]:
    """Return the same images as floats from 0 to 1, and their labels."""
    images, labels = make_images(work)
    return torch.from_numpy(images).float() / 255, torch.from_numpy(labels)


def flat(state: State) -> Tensor:
    """Return all values of a state as one row."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in state.values()]).clone()


def slices(x: Tensor, y: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch's batches, sliced by a random permutation."""
    for index in torch.randperm(len(y)).split(batch):
        yield x[index], y[index]


def train(net: nn.Module, batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], epochs: int) -> None:
    """Train a net as one client does, with a new optimizer."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    loss = nn.CrossEntropyLoss()
    net.train()
    for _ in range(epochs):
        for x, y in batches():
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()


class Plain:
    """The usual hand-written loop: clients one after another in one model, then the mean of their states."""

    def __init__(self, work: Work, loader: bool = False) -> None:
        self.work = work
        self.x, self.y = make_data(work)
        self.net = make_net(work.net)
        self.state = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        self.batches = self._loaded if loader else self._sliced

    def load(self, row: Tensor) -> None:
        """Start from a global model, given as one row."""
        parts = row.split([tensor.numel() for tensor in self.state.values()])
        pairs = zip(self.state.items(), parts, strict=True)
        self.state = {name: part.view_as(tensor).clone() for (name, tensor), part in pairs}

    def _sliced(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        return slices(self.x[client], self.y[client], self.work.batch)

    def _loaded(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(DataLoader(TensorDataset(self.x[client], self.y[client]), self.work.batch, shuffle=True))

    def round(self) -> None:
        """Train all clients and average."""
        states, weights = [], []
        for client in range(self.work.clients):
            self.net.load_state_dict(self.state)
            train(self.net, lambda client=client: self.batches(client), self.work.epochs)
            states.append({name: tensor.clone() for name, tensor in self.net.state_dict().items()})
            weights.append(len(self.y[client]))
        total = sum(weights)
        self.state = {
            name: sum(state[name] * (weight / total) for state, weight in zip(states, weights, strict=True))
            for name in self.state
        }


class StepCount:
    """Counts the clients' optimizer steps in this process and its forks."""

    def __init__(self) -> None:
        self.value = multiprocessing.get_context("fork").Value("q", 0)
        self.handle = register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer.defaults.get("momentum") == MOMENTUM:
            with self.value.get_lock():
                self.value.value += 1

    def close(self) -> int:
        """Stop counting and return the count."""
        self.handle.remove()
        return self.value.value


class Turns:
    """Times rounds of a peer and of the plain loop in turns; the first round of both is a warm-up and is checked.

    Parameters
    ----------
    words : Namespace
        The command line: the workload, the rounds to time, the plain loop's threads.
    threads : int
        The peer's threads.
    start : Tensor
        The peer's initial global model, as one row; the plain loop starts from it too.
    """

    def __init__(self, words: argparse.Namespace, threads: int, start: Tensor) -> None:
        self.words, self.threads, self.start = words, threads, start
        self.work = WORKS[words.work]
        self.plain = Plain(self.work)
        self.plain.load(start)
        self.seconds: dict[str, list[float]] = {"peer": [], "plain": []}
        self.steps: int | None = None
        self.movement = 0.0
        self.count = StepCount()
        self.begun = 0.0

    @property
    def total(self) -> int:
        """The number of rounds that the peer must run, including the warm-up."""
        return self.words.rounds + 1

    def begin(self) -> None:
        """Start a round of the peer."""
        torch.set_num_threads(self.threads)
        self.begun = time.perf_counter()

    def end(self, row: Callable[[], Tensor], steps: int | None = None) -> None:
        """End a round of the peer and run one of the plain loop.

        Parameters
        ----------
        row : callable
            Returns the peer's global model as one row; called in the first round only.
        steps : int, optional
            The number of steps that the clients took, if this process cannot count them.
        """
        elapsed = time.perf_counter() - self.begun
        first = self.steps is None
        if first:
            counted = self.count.close()
            self._check(row(), counted if steps is None else steps)
        torch.set_num_threads(self.words.plain_threads)
        begin = time.perf_counter()
        self.plain.round()
        plain = time.perf_counter() - begin
        if not first:
            self.seconds["peer"].append(elapsed)
            self.seconds["plain"].append(plain)

    def _check(self, row: Tensor, steps: int) -> None:
        """Raise an error unless the first round took all steps and moved the model about as far as the plain loop."""
        self.steps = steps
        if steps != self.work.steps:
            raise RuntimeError(f"the peer took {steps} steps instead of {self.work.steps}: nothing to compare")
        torch.set_num_threads(self.words.plain_threads)
        self.plain.round()
        self.movement = float((row - self.start).norm() / (flat(self.plain.state) - self.start).norm())
        if not 0.5 < self.movement < 2:
            raise RuntimeError(
                f"the model moved {self.movement:.2f} times as far as the plain loop's: the work differs"
            )

    def report(self, package: str, release: str, shims: str = "", **more: Any) -> None:
        """Write the measurements."""
        if len(self.seconds["peer"]) != self.words.rounds:
            raise RuntimeError(f"{len(self.seconds['peer'])} rounds were timed instead of {self.words.rounds}")
        found = {
            "work": self.words.work,
            "setting": self.words.setting,
            "threads": self.threads,
            "plain_threads": self.words.plain_threads,
            "seconds": self.seconds,
            "best": ratio(self.seconds, min),
            "median": ratio(self.seconds, statistics.median),
            "steps": self.steps,
            "movement": round(self.movement, 3),
            "shims": shims,
            "versions": {package: release, **versions()},
            **more,
        }
        self.words.out.write_text(json.dumps(found, indent=2) + "\n")


def ratio(seconds: dict[str, list[float]], pick: Callable[[list[float]], float]) -> float:
    """Return the peer's speedup over the plain loop, from the round of each that `pick` selects."""
    return pick(seconds["plain"]) / pick(seconds["peer"])


def versions() -> dict[str, str]:
    """Return the versions of the software in every environment."""
    return {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


def command_line() -> argparse.Namespace:
    """Parse the arguments that run.py passes to every script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=list(WORKS), required=True)
    parser.add_argument("--setting", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain-threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()
