"""FLGo: FedAvg on a generated benchmark, timed in the server's iteration."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import flgo
import flgo.benchmark.toolkits.cv.classification as toolkit
from flgo.algorithm import fedbase
from flgo.benchmark.toolkits.partition import IIDPartitioner
from work import LR, MOMENTUM, WORKS, Turns, command_line, flat

CONFIG = """
import os

from torch.utils.data import TensorDataset
from work import WORKS, make_data, make_net

work = WORKS[os.environ["PEERS_WORK"]]
x, y = make_data(work)
train_data = TensorDataset(x.flatten(0, 1), y.flatten())


def get_model():
    return make_net(work.net)
"""
SHIM = "TaskDataset.__getitems__, which this PyTorch requires of a Subset that overrides __getitem__"
SETTINGS = {
    "serial, load_mode mem, one thread": {"load_mode": "mem", "torch_num_threads": 1},
    "serial, load_mode mem, two threads": {"load_mode": "mem", "torch_num_threads": 2},
    "serial, default load_mode, one thread": {"torch_num_threads": 1},
    "num_parallels 2, parallel_type t": {"load_mode": "mem", "num_parallels": 2, "parallel_type": "t"},
    "num_parallels 2, parallel_type p": {"load_mode": "mem", "num_parallels": 2, "parallel_type": "p"},
}
timing: list[Turns] = []


class Server(fedbase.BasicServer):
    """FLGo's server; a round ends with an iteration, and the next one begins."""

    def iterate(self) -> bool:
        """Run one round."""
        updated = super().iterate()
        for turns in timing:
            turns.end(lambda: flat(self.model.state_dict()))
            turns.begin()
        return updated


class FedAvg:
    """FLGo's FedAvg with the timed server."""

    Server = Server
    Client = fedbase.BasicClient


def fetch(dataset: toolkit.FromDatasetPipe.TaskDataset, index: list[int]) -> list[tuple]:
    """Return several samples of a client."""
    return [dataset[i] for i in index]


def make_task(work: str, folder: Path) -> str:
    """Generate FLGo's benchmark and task for the workload and return the task's directory."""
    os.environ["PEERS_WORK"] = work
    sys.path.insert(0, str(folder))
    (folder / "peers_config.py").write_text(CONFIG)
    name = flgo.gen_benchmark_from_file("peers_benchmark", str(folder / "peers_config.py"), str(folder))
    benchmark = importlib.import_module(name)
    benchmark.visualize = lambda *_: None
    return flgo.gen_task_by_(benchmark, IIDPartitioner(num_clients=WORKS[work].clients), str(folder / "task"))


def main() -> None:
    """Time FLGo."""
    words = command_line()
    words.out = words.out.absolute()
    work, setting = WORKS[words.work], SETTINGS[words.setting]
    toolkit.FromDatasetPipe.TaskDataset.__getitems__ = fetch
    option = {"num_rounds": words.rounds + 1, "sample": "full", "proportion": 1.0, "aggregate": "other"}
    option |= {"num_epochs": work.epochs, "batch_size": work.batch, "learning_rate": LR, "momentum": MOMENTUM}
    option |= {"train_holdout": 0.0, "eval_interval": 0, "no_tqdm": True, "no_log_console": True}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        runner = flgo.init(make_task(words.work, Path(folder)), FedAvg, {**option, **setting})
        turns = Turns(words, setting.get("torch_num_threads", 1), flat(runner.model.state_dict()))
        timing.append(turns)
        turns.begin()
        runner.run()
        os.chdir("/")
    turns.report("flgo", version("flgo"), SHIM)


if __name__ == "__main__":
    main()
