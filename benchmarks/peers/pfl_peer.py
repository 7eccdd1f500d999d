"""pfl: FederatedAveraging on the simulated backend, timed by a callback."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import LR, MOMENTUM, WORKS, Turns, Work, command_line, flat, make_data, make_net

THREADS = {"one process, one thread": 1, "one process, two threads": 2, "two processes": 1}


class Judged(nn.Module):
    """A net with the loss and the metrics that pfl requires."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss to minimize."""
        return nn.functional.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return the loss as a metric; only the warm-up round is evaluated."""
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Timer(TrainingProcessCallback):
    """Ends a round of pfl after its central iteration and begins the next one."""

    def __init__(self, turns: Turns, workers: int) -> None:
        self.turns, self.workers, self.round = turns, workers, 0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Begin the first round."""
        self.turns.begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Run the plain loop while the other process, if any, waits."""
        if leads():
            steps = self.total_steps() if central_iteration == 0 else None
            self.turns.end(lambda: flat(model.pytorch_model.state_dict()), steps)
        elif central_iteration == 0:
            self.total_steps()
        if self.workers > 1:
            torch.distributed.barrier()
        self.turns.begin()
        return False, Metrics()

    def total_steps(self) -> int:
        """Return the total steps of all processes."""
        steps = torch.tensor(self.turns.count.value.value)
        if self.workers > 1:
            torch.distributed.all_reduce(steps)
        return int(steps)


def leads() -> bool:
    """Return whether this process is the one that measures."""
    return os.environ.get("RANK", "0") == "0"


def users(work: Work) -> FederatedDataset:
    """Return the workload's data, one pfl dataset per client; every client is sampled once per round."""
    x, y = make_data(work)
    held = [Dataset((x[client], y[client]), user_id=str(client)) for client in range(work.clients)]
    return FederatedDataset(held.__getitem__, get_user_sampler("minimize_reuse", list(range(work.clients))))


def main() -> None:
    """Time pfl."""
    words = command_line()
    workers = 2 if words.setting == "two processes" else 1
    if workers > 1 and "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        raise SystemExit(subprocess.run([*launch, *sys.argv], check=False).returncode)
    work = WORKS[words.work]
    torch.set_num_threads(THREADS[words.setting])
    net = Judged(make_net(work.net))
    model = PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    turns = Turns(words, THREADS[words.setting], flat(net.state_dict()))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=turns.total,
            evaluation_frequency=10**6,
            train_cohort_size=work.clients,
            val_cohort_size=0,
        ),
        SimulatedBackend(users(work), users(work), postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=work.epochs, local_learning_rate=LR),
        NNEvalHyperParams(local_batch_size=None),
        [Timer(turns, workers)],
        send_metrics_to_platform=False,
    )
    if leads():
        turns.report("pfl", version("pfl"))
    if workers > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
