"""The history of a run: one record per round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedcat.protocol.ledger import HopRecord


@dataclass
class Record:
    """One round in a run's history.

    Attributes
    ----------
    round : int
        The number of rounds completed.
    metrics : mapping of str to float
        The metrics of the global model on the test data; empty if this round was not evaluated.
    up, down : int
        Bytes sent by the clients and by the server for training, in all rounds so far.
    evaluation : int
        Bytes that evaluation on clients took, in both directions, in all rounds so far.
    seconds : float
        Seconds since the start. Of runs side by side, this one's share: an estimate. The time of each launch is shared
        by local steps, server work in equal parts, evaluation by samples.
    simulated_seconds : float
        What the simulated clock shows: how long the clients would have taken, see `fedcat.protocol.faults`.
    hops : list of HopRecord
        What became of the round's hops, by copy and attempt.
    others : mapping
        The metrics of the other models that are evaluated, by model.
    validation, client_test : mapping
        How the global model's metrics on the clients' own held-out data spread over clients, by metric: mean,
        weighted_mean, worst_decile and std; empty if there is no such data.
    """

    round: int
    metrics: dict[str, float] = field(default_factory=dict)
    up: int = 0
    down: int = 0
    evaluation: int = 0
    seconds: float = 0.0
    simulated_seconds: float = 0.0
    hops: list[HopRecord] = field(default_factory=list)
    others: dict[str, dict[str, float]] = field(default_factory=dict)
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    client_test: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def evaluated(self) -> bool:
        """Whether the round was evaluated."""
        return bool(self.metrics)

    @property
    def accuracy(self) -> float | None:
        """The accuracy on the test data; None if this round was not evaluated or there are no classes."""
        return self.metrics.get("accuracy")

    @property
    def loss(self) -> float | None:
        """The mean loss on the test data; None if this round was not evaluated."""
        return self.metrics.get("loss")

    @property
    def clients(self) -> list[int]:
        """The clients of the hops."""
        return [hop.client for hop in self.hops]

    @property
    def lost(self) -> list[HopRecord]:
        """The hops whose reply did not arrive."""
        return [hop for hop in self.hops if not hop.arrived]

    @property
    def train_loss(self) -> float | None:
        """The mean training loss over the hops that arrived."""
        losses = [hop.loss for hop in self.hops if hop.loss is not None]
        return sum(losses) / len(losses) if losses else None

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values, without what is empty."""
        plain = {**asdict(self), "hops": [hop.as_dict() for hop in self.hops], "train_loss": self.train_loss}
        return {k: v for k, v in plain.items() if k == "hops" or v not in (None, {})}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Record:
        """Return the record that `as_dict` gave, or that came back from its JSON."""
        given: dict[str, Any] = {k: v for k, v in plain.items() if k not in ("hops", "train_loss")}
        for name in ("round", "up", "down", "evaluation", "seconds", "simulated_seconds"):
            if not isinstance(given.get(name, 0), (int, float)):
                raise TypeError(f"{name} must be a number, got {given[name]!r}")
        usual = {"round": plain["round"] - 1, "attempt": 0, "status": "arrived"}
        hops = [HopRecord(**{**usual, **hop}) for hop in plain["hops"]]
        return cls(hops=hops, **_numbers(given))


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables with NaN for None, which stands for it in JSON."""
    return {k: _numbers(v) if isinstance(v, dict) else math.nan if v is None else v for k, v in values.items()}
