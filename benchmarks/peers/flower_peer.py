"""Flower: a ServerApp and a ClientApp on its simulation engine (Ray), timed in the server's evaluate function."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

from flower_client import client
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import WORKS, Turns, command_line, flat, make_net

CORES = 2
CPUS = {"two actors of one core": 1, "one actor of two cores": 2}


def total(replies: list[RecordDict], weight: str) -> MetricRecord:
    """Add the steps of all clients."""
    return MetricRecord({"steps": sum(reply["metrics"]["steps"] for reply in replies)})


class Counted(FedAvg):
    """Flower's FedAvg; it stores the number of steps of the last round."""

    steps = 0

    def aggregate_train(
        self, server_round: int, replies: list[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average as Flower does."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.steps = int(metrics["steps"]) if metrics else 0
        return arrays, metrics


def timed(turns: Turns, strategy: Counted) -> Callable[[int, ArrayRecord], None]:
    """Return the evaluate function, which ends a round and begins the next one."""

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        if number:
            turns.end(lambda: flat(arrays.to_torch_state_dict()), strategy.steps)
        turns.begin()

    return evaluate


def main() -> None:
    """Time Flower."""
    words = command_line()
    work, cpus = WORKS[words.work], CPUS[words.setting]
    start = make_net(work.net).state_dict()
    turns = Turns(words, cpus, flat(start))
    strategy = Counted(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=work.clients,
        min_available_nodes=work.clients,
        train_metrics_aggr_fn=total,
    )
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy.start(
            grid,
            ArrayRecord(start),
            num_rounds=turns.total,
            train_config=ConfigRecord({"work": work.net, "threads": cpus}),
            evaluate_fn=timed(turns, strategy),
        )

    run_simulation(
        server,
        client,
        num_supernodes=work.clients,
        backend_config={
            "client_resources": {"num_cpus": cpus, "num_gpus": 0.0},
            "init_args": {"num_cpus": CORES, "object_store_memory": 512 * 2**20, "include_dashboard": False},
        },
    )
    turns.report("flwr", version("flwr"), ray=version("ray"))


if __name__ == "__main__":
    main()
