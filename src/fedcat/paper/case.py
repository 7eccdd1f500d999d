"""A case: one method on one federation, which is a cell of a table; it is run with several seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fedcat.config.presets import preset, preset_datasets

AVERAGE = 0.95
"""The decay of the averages over rounds, which the tables show in columns of their own."""

ROUNDS = {("lab", "femnist"): 1008, ("paper", "femnist"): 306, ("paper", ""): 300}
"""Rounds that differ from the preset's; for FEMNIST a multiple of K = 18, so that the last cycle is complete."""

LABELS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fedgen": "FedGen",
    "clusamp": "CluSamp",
    "fedcat-gc": "w/ GC",
    "fedcat-dc": "w/ DC",
    "fedcat": "FedCat",
    "fedcat-plus": "FedCat-Plus",
    "fedcross": "FedCross",
    "fedmr": "FedMR",
    "fedcm": "FedCM",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "femnist": "FEMNIST",
}
"""Names as papers write them."""


def label_of(name: str) -> str:
    """Return a method or dataset as the paper writes it."""
    return LABELS.get(name, name)


@dataclass(frozen=True)
class Case:
    """One method on one federation.

    Attributes
    ----------
    dataset, method : str
        Their names.
    alpha : float or None
        The parameter of the Dirichlet partition; None if the dataset's owners are the clients.
    preset : str
        The preset; it is not used for a dataset that it does not cover.
    rounds : int
        The number of rounds.
    precision, exact : str, bool
        Precision of matrix products; whether a run gives the same bits whatever runs beside it.
    partition : str
        Another partition than the preset's.
    validation : float
        The fraction of each client's data that is held out for choosing.
    options : tuple of (str, number or str)
        Options of the method, or settings of its own such as lr, that differ from the preset's.
    choosing : bool
        Whether the case serves to choose numbers: then its test accuracies are neither shown nor kept.
    """

    dataset: str
    method: str
    alpha: float | None = None
    preset: str = "lab"
    rounds: int = 1000
    precision: str = "fp32"
    partition: str = ""
    validation: float = 0.0
    options: tuple[tuple[str, float | str], ...] = ()
    choosing: bool = False
    exact: bool = False

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Case:
        """Return the case that `as_dict` wrote."""
        return cls(**{**plain, "options": tuple((name, value) for name, value in plain.get("options", ()))})

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, without those that are the defaults."""
        usual = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    @property
    def kind(self) -> tuple[str, str, str]:
        """The preset, dataset and precision: what cases have in common whose runs stand in one table."""
        return self.preset, self.dataset, self.precision

    @property
    def label(self) -> str:
        """The method as the paper writes it, with the options that differ."""
        words = [f"{name} {_text(value)}" for name, value in self.options]
        return label_of(self.method) + (f" ({', '.join(words)})" if words else "")

    @property
    def file_parts(self) -> list[str]:
        """The options that differ, as parts of a file's name."""
        return [re.sub(r"[^\w.]+", "-", f"{self.method} {name} {_text(value)}") for name, value in self.options]

    @property
    def row(self) -> str:
        """The dataset as the paper writes it, and alpha."""
        name = label_of(self.dataset)
        return name if self.alpha is None else f"{name}, alpha {self.alpha}"

    def given(self) -> dict[str, Any]:
        """Return the settings of its runs, but for the seed and the machine's."""
        found: dict[str, Any] = {"method": self.method, "dataset": self.dataset, "rounds": self.rounds}
        if self.dataset in preset_datasets(self.preset):
            found["preset"] = self.preset
        if self.alpha is not None:
            found["alpha"] = self.alpha
        for name in ("partition", "validation"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        if self.precision != "fp32":
            found["precision"] = self.precision
        if self.exact:
            found["exact"] = True
        if not self.choosing:
            found["average"] = AVERAGE
        if self.options:
            found["options"] = {self.method: dict(self.options)}
        return found

    def commands(self, seeds: Sequence[int]) -> list[str]:
        """Return the commands that run the case again, one for each block of consecutive seeds."""
        starts = [seed for seed in sorted(seeds) if seed - 1 not in seeds]
        ends = [seed for seed in sorted(seeds) if seed + 1 not in seeds]
        return [self._command(first, last - first + 1) for first, last in zip(starts, ends, strict=True)]

    def _command(self, first: int, count: int) -> str:
        words = ["fedcat compare", f"--methods {self.method}", f"--seed {first} --seeds {count}"]
        for name, value in self.given().items():
            if value is True:
                words.append(f"--{name}")
            elif name not in ("method", "options"):
                words.append(f"--{name.replace('_', '-')} {value}")
        words += [f"-o {self.method}.{name}={_text(value)}" for name, value in self.options]
        return " ".join(words)


def _text(value: float | str) -> str:
    """Return an option as one types it."""
    return value if isinstance(value, str) else repr(value).lower().removesuffix(".0")


def has_alpha(dataset: str, name: str) -> bool:
    """Tell whether a dataset is divided by a Dirichlet partition; otherwise its owners are the clients."""
    return dataset not in preset_datasets(name) or str(preset(name, dataset)["partition"]).startswith("dirichlet")


def default_rounds(dataset: str, name: str) -> int:
    """Return the rounds of a dataset's runs under a preset."""
    found = ROUNDS.get((name, dataset), ROUNDS.get((name, "")))
    return found or int(preset("lab", "cifar10")["rounds"])
