"""How fast is your net: the nets of federated-learning papers against a plain PyTorch loop.

    python benchmarks/user_nets.py [--nets resnet8-gn vit ...] [--precisions fp32] [--engine stacked] [--json FILE]

FedAvg rounds on random data, K = 10 of 100 clients, one local epoch, batches of 50, measured as `fedcat bench` does.
The nets are written as users write them: residual blocks, GroupNorm or BatchNorm, stride 2, average pooling, GELU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcat.bench.measure import Bench, Case
from fedcat.bench.tables import machine
from fedcat.bench.workload import CIFAR, IMAGES, MNIST, Images, Workload
from fedcat.core.device import find_device
from fedcat.data.dataset import Dataset
from fedcat.data.pool import Pool
from fedcat.models.nets import NETS
from fedcat.runs.driver import Driver


def norm(kind: str, channels: int) -> nn.Module:
    """Return a normalization of images."""
    return nn.GroupNorm(8, channels) if kind == "gn" else nn.BatchNorm2d(channels)


class Block(nn.Module):
    """A residual block of two 3 x 3 convolutions; a shortcut that changes the shape is a 1 x 1 convolution."""

    def __init__(self, into: int, out: int, stride: int, kind: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = norm(kind, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = norm(kind, out)
        same = stride == 1 and into == out
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(into, out, 1, stride), norm(kind, out))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet(blocks: int, kind: str) -> Any:
    """Return a ResNet for CIFAR with three stages of 16, 32 and 64 channels (He et al. 2016)."""

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(shape[0], 16, 3, 1, 1, bias=False), norm(kind, 16), nn.ReLU()]
        into = 16
        for out, stride in ((16, 1), (32, 2), (64, 2)):
            layers += [Block(into if i == 0 else out, out, stride if i == 0 else 1, kind) for i in range(blocks)]
            into = out
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))

    return build


def vgg(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return six 3 x 3 convolutions (32 to 128 channels), pooled after every second, and two linear layers."""
    layers: list[nn.Module] = []
    into = shape[0]
    for out in (32, 64, 128):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
        into = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 128), nn.ReLU(), nn.Linear(128, classes))


def strided(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a CNN with stride 2, GELU and average pooling."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, padding=1), nn.GELU()),
        *(nn.AvgPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, classes),
    )


class Vit(nn.Module):
    """A small vision transformer: 4 x 4 patches, width 96, three layers of four heads."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(shape[0], 96, 4, 4)
        self.places = nn.Parameter(torch.zeros(1, (shape[1] // 4) * (shape[2] // 4), 96))
        layer = nn.TransformerEncoderLayer(
            96, 4, 192, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(96, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.layers(tokens).mean(1))
        return out


@dataclass(frozen=True)
class Texts(Workload):
    """Random sequences of 80 of 10 characters."""

    def dataset(self) -> Dataset:
        """Return random sequences with random next characters."""
        rng, count = np.random.default_rng(0), self.samples or self.images.samples
        x, y = rng.integers(10, size=(count, 80)), rng.integers(10, size=count)
        return Dataset("random texts", Pool(x, y), Pool(x[:1000], y[:1000]), 10)


USERS: dict[str, tuple[Any, Images]] = {
    "resnet8-gn": (resnet(1, "gn"), CIFAR),
    "resnet8-bn": (resnet(1, "bn"), CIFAR),
    "resnet20-gn": (resnet(3, "gn"), CIFAR),
    "resnet20-bn": (resnet(3, "bn"), CIFAR),
    "vgg-small": (vgg, CIFAR),
    "cnn-stride2-gelu": (strided, CIFAR),
    "vit": (Vit, CIFAR),
}
BUILT_IN = ("mlp", "cnn", "char-lstm")


def row_bytes(bench: Bench, precision: str, engine: str) -> float:
    """Return the GPU memory that a row takes while it trains, as the stacked engine measures it; 0 elsewhere."""
    (run,) = bench.work.runs(1, bench.data, device=str(bench.device), precision=precision, engine=engine)
    Driver([run]).step()
    captured = getattr(run.engine, "_captured", None)
    found = max(captured._row_bytes.values(), default=0.0) if captured else 0.0
    run.engine.release()
    return found


def main() -> None:
    """Measure and print."""
    for name, (build, images) in USERS.items():
        NETS.register(name, "a user's net")(build)
        IMAGES[name] = images
    IMAGES.update({"mlp": MNIST, "cnn": CIFAR, "char-lstm": Images((80,), 50_000, 50)})  # type: ignore[arg-type]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=[*USERS, *BUILT_IN])
    parser.add_argument("--precisions", nargs="+", default=["fp32"])
    parser.add_argument("--runs", nargs="+", type=int, default=[1])
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--device", default="auto", type=find_device)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {**machine(words.device), "commit": git.stdout.strip()}
    rows: list[dict[str, Any]] = []
    print(
        f"{'net':18} {'precision':9} {'runs':>4} {'ms/round':>9} {'x plain':>8} {'MB/row':>7} {'first, s':>8}  kernels"
    )
    for net in words.nets:
        kind = Texts if net == "char-lstm" else Workload
        bench = Bench(kind(net, epochs=1, samples=words.samples), words.device, words.turns)
        for precision in words.precisions:
            for runs in words.runs:
                found = bench.time(Case(words.engine, precision, runs)).as_dict()
                rows.append(found)
                row = found["row_mb"] = row_bytes(bench, precision, words.engine) / 1e6
                line = (
                    f"{net:18} {precision:9} {runs:4} {1000 * found['seconds']:9.1f} {found['ratio']:8.1f} {row:7.1f}"
                )
                print(f"{line} {found['start']:8.1f}  {found['engine']}, {found['kernels'][:70]}", flush=True)
                if words.json:
                    words.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
