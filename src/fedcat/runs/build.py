"""Builds runs from settings; what several runs need is made once and shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcat import engines
from fedcat.config.layers import SettingsFile
from fedcat.config.resolve import Resolved, resolve
from fedcat.config.resolve_data import GIVEN
from fedcat.config.schedules import schedule
from fedcat.config.settings import Settings
from fedcat.core.device import find_device
from fedcat.core.errors import SettingError, unknown_name
from fedcat.core.rng import Purpose, random_stream, torch_seed
from fedcat.data.augment import make_augment
from fedcat.data.dataset import Dataset, make_dataset
from fedcat.data.federation import EvaluationSet, Federation
from fedcat.data.partitions import PARTITIONS
from fedcat.data.pool import Pool
from fedcat.engines.base import Engine
from fedcat.engines.evaluation import outputs_of
from fedcat.methods import Context, Method, make_method
from fedcat.methods.aggregation import make_aggregator
from fedcat.methods.selection import make_selector
from fedcat.methods.server_optimizer import ServerOptimizerChoice
from fedcat.models.layout import Layout
from fedcat.models.losses import LossFunction, cross_entropy
from fedcat.models.metrics import try_metrics
from fedcat.models.nets import check_outputs, net_builder
from fedcat.models.traits import traits
from fedcat.protocol.local_optimizer import make_optimizer
from fedcat.protocol.task import Task
from fedcat.runs.run import Run
from fedcat.runs.summary import Decisions

TRIED = 100
"""Test samples on which metrics are tried."""

ONE_AT_A_TIME = RLock()
"""Held while a run is built and while it is executed: PyTorch's random generators and threads belong to the process."""


class Builder:
    """Builds runs that share their data, their nets' layouts and their engines."""

    def __init__(self) -> None:
        self._datasets: dict[object, Dataset | Federation] = {}
        self._federations: dict[object, Federation] = {}
        self._layouts: dict[object, list[Layout]] = {}
        self._engines: dict[object, Engine] = {}
        self._names: Counter[str] = Counter()

    def build(self, given: Mapping[str, Any], file: SettingsFile | str | Path | None = None, name: str = "") -> Run:
        """Build a run.

        Parameters
        ----------
        given : mapping
            Settings by name, see `fedcat.config.resolve.resolve`.
        file : path, optional
            A settings file, which lies below what is given.
        name : str
            The run's name; by default its method and seed.
        """
        with ONE_AT_A_TIME:
            resolved, federation = self._divided(given, file)
            with pytorch_threads(resolved.settings.threads):
                return self._build(resolved, federation, name)

    def _name(self, name: str) -> str:
        """Return a name that no other run of this builder has."""
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name} #{self._names[name]}"

    def divide(
        self, given: Mapping[str, Any], file: SettingsFile | str | Path | None = None
    ) -> tuple[Settings, Federation, tuple[str, ...]]:
        """Return the settings, the federation that they describe, and notes; no net and no method is made."""
        resolved, federation = self._divided(given, file)
        return resolved.settings, federation, resolved.notes

    def _divided(self, given: Mapping[str, Any], file: SettingsFile | str | Path | None) -> tuple[Resolved, Federation]:
        below = file if isinstance(file, SettingsFile) else SettingsFile.read(file, given=given)
        resolved = resolve(given, below, self._load)
        return resolved, self._federation(resolved)

    def _build(self, resolved: Resolved, federation: Federation, name: str) -> Run:
        settings, parts = resolved.settings, resolved.parts
        device = find_device(settings.device)
        _check_gpu_settings(settings, device)
        if not settings.net:
            raise SettingError(
                f"net must be given: dataset {settings.dataset!r} has no default net; mlp fits any data, cnn images, "
                "see `fedcat nets`"
            )
        exact = device.type == "cpu" if settings.exact is None else settings.exact
        net = net_builder(parts["net"], federation.train.shape, federation.outputs)
        loss = _loss(parts["loss"], federation)
        optimizer = make_optimizer(settings.optimizer, parts["optimizer"], settings.optimizer_options)
        layout, start = self._layout(parts["net"], net, federation, settings, device, loss)
        pool = federation.train.to(device)
        method = _method(resolved, federation, layout, start, exact)
        name = self._name(name or f"{settings.method}-seed{settings.seed}")
        augment = make_augment(parts["augment"], pool.inputs(slice(0, 4), layout.dtype).clone())
        task = _task(settings, federation, layout, pool, method, name)
        task = replace(task, loss=loss, optimizer=optimizer, augment=augment)
        workers = _workers(settings, device)
        given = (task.padding, exact, task.plain_loss, optimizer.stackable)
        choice = engines.pick(settings.engine, layout, pool, *given)
        engine = self._engine(choice.name, settings, exact, workers)
        threads = torch.get_num_threads()
        decisions = Decisions(str(device), choice.name, choice.reason, exact, workers, threads)
        notes = [*resolved.notes, *method.advice(settings.rounds, settings.evaluation_interval)]
        if settings.workers and workers != settings.workers:
            notes.append(f"workers {workers} instead of {settings.workers}: {_why_fewer(settings, device)}")
        if choice.forced:
            notes.append(f"engine {choice.name}: {choice.reason}")
        run = Run(name, settings, decisions, federation, method, task, engine, parts["metrics"], notes)
        run.check_row()
        few = EvaluationSet(federation.test, np.arange(min(TRIED, len(federation.test)))).to(device)
        outputs = outputs_of(layout, method.models()["global"], few)
        try_metrics(run.metrics.values(), outputs, few.targets(layout.dtype))
        return run

    def _load(self, factory: Any, name: str, arguments: Mapping[str, Any]) -> Dataset | Federation:
        """Make a dataset, once for equal arguments."""
        if any(not isinstance(value, (bool, int, float, str, tuple, list)) for value in arguments.values()):
            return make_dataset(factory, name, arguments)
        key = (factory, repr(sorted(arguments.items())))
        if key not in self._datasets:
            self._datasets[key] = make_dataset(factory, name, arguments)
        return self._datasets[key]

    def _federation(self, resolved: Resolved) -> Federation:
        settings, data = resolved.settings, resolved.data
        whole = data if isinstance(data, Federation) else self._partition(data, settings, resolved.parts["partition"])
        if not settings.client_test and not settings.validation:
            return whole
        key = (whole, settings.client_test, settings.validation, settings.partition_seed)
        if key not in self._federations:
            self._federations[key] = whole.hold_out(*key[1:])
        return self._federations[key]

    def _partition(self, data: Dataset, settings: Settings, partition: Any) -> Federation:
        how = settings.partition if settings.partition in PARTITIONS else partition
        words = (how, settings.clients, repr(sorted(settings.partition_options.items())))
        key = (data, settings.partition_seed, *words, settings.min_samples, settings.partition_tries)
        if key not in self._federations:
            self._federations[key] = data.divide(
                settings.clients,
                how,
                seed=settings.partition_seed,
                min_samples=settings.min_samples,
                tries=settings.partition_tries,
                **settings.partition_options,
            )
        return self._federations[key]

    def _layout(
        self,
        part: object,
        make_net: Callable[[], nn.Module],
        federation: Federation,
        settings: Settings,
        device: torch.device,
        loss: LossFunction,
    ) -> tuple[Layout, Tensor]:
        """Return the net's layout and the initial row under the seed.

        Runs share the layout if their nets also agree in the tensors that are not part of the row.
        """
        dtype = getattr(torch, settings.dtype)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(torch_seed(random_stream(settings.seed, Purpose.INITIAL)))
            net = make_net().to(device=device, dtype=dtype)
            test, few = federation.test.to(device), slice(0, 2)
            check_outputs(net, test.inputs(few, dtype), test.targets(few, dtype), federation.classes, loss)
        fresh = Layout(net)
        key = (part, federation.train.shape, federation.outputs, device, dtype)
        for known in self._layouts.setdefault(key, []):
            if _equal(known.outside(known.net), fresh.outside(net)):
                return known, known.pack(net)
        self._layouts[key].append(fresh)
        return fresh, fresh.pack(net)

    def _engine(self, name: str, settings: Settings, exact: bool, workers: int) -> Engine:
        memory = None if settings.memory is None else settings.memory * 1e9
        key = (name, exact, settings.precision, memory, workers)
        if key not in self._engines:
            self._engines[key] = engines.make(name, exact, settings.precision, memory, workers)
        return self._engines[key]


@contextmanager
def pytorch_threads(count: int | None) -> Iterator[None]:
    """Let PyTorch use `count` threads, or as many as it does, and restore its number afterwards."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def _method(resolved: Resolved, federation: Federation, layout: Layout, start: Tensor, exact: bool) -> Method:
    """Make the method, with the selector and the server optimizer that the settings name."""
    settings, parts = resolved.settings, resolved.parts
    selector = parts["selector"]
    context = Context(
        seed=settings.seed,
        layout=layout,
        start=start,
        samples=federation.sizes,
        per_round=settings.k,
        epochs=settings.epochs,
        lr=schedule(settings.lr_schedule, settings.lr, settings.rounds, settings.lr_decay, settings.lr_every),
        selector=None if selector is None else make_selector(selector, settings.seed, federation.sizes, settings.k),
        aggregator=None
        if parts["aggregator"] is None
        else make_aggregator(settings.aggregator, parts["aggregator"], settings.aggregator_options),
        server_optimizer=ServerOptimizerChoice(
            settings.server_optimizer, settings.server_options, parts["server_optimizer"]
        ),
        average=settings.average,
        ban_after=settings.ban_after,
        blank=torch.zeros_like(federation.test.inputs(slice(0, 1), layout.dtype), device=layout.device),
        classes=federation.classes,
        exact=exact,
    )
    name = settings.method
    method = make_method(name, parts["method"], context, settings.options.get(name, {}))
    if settings.average is not None and "average" not in method.models():
        raise SettingError(f"average cannot be set: the method {name!r} keeps no average over rounds")
    if settings.ban_after is not None and not hasattr(getattr(method, "selector", None), "exclude"):
        raise SettingError(f"ban_after cannot be set: the selection of method {name!r} cannot leave clients out")
    if settings.on_collapse == "restore" and type(method).rewind is Method.rewind:
        raise SettingError(f"on_collapse cannot be 'restore': the method {name!r} cannot take its model back")
    for model in settings.evaluate:
        if model not in method.extra_models:
            raise unknown_name(f"model of method {name!r} to evaluate", model, method.extra_models)
    return method


def _loss(chosen: Any, federation: Federation) -> LossFunction:
    """Return the loss that the user chose, by default the cross entropy."""
    if chosen is None and not federation.classes:
        raise SettingError(
            f"loss must be given: the targets of {federation.name!r} are values, not class labels (integers): mse, "
            "huber and bce are built in, or pass a function of (outputs, targets) that returns one loss per sample"
        )
    loss: LossFunction = cross_entropy if chosen is None else chosen
    if not callable(loss) or not isinstance(loss, Hashable):
        raise SettingError(f"loss must be a name or a function of (outputs, targets), got {loss!r}")
    return loss


def _task(settings: Settings, federation: Federation, layout: Layout, pool: Pool, method: Method, name: str) -> Task:
    if method.rule.needs_sgd and settings.optimizer != "sgd":
        raise SettingError(
            f"optimizer must be sgd for the method {settings.method!r}, whose clients correct steps of SGD, "
            f"got {settings.optimizer!r}"
        )
    refuses_one = traits(layout, pool).refuses_one
    if refuses_one and settings.batch_size == 1:
        raise SettingError("batch_size must be at least 2: the net cannot train on a batch of one sample, got 1")
    if refuses_one and federation.sizes.min() == 1:
        lone = int((federation.sizes == 1).sum())
        what = f"{lone} clients hold a single sample" if lone > 1 else "a client holds a single sample"
        given = settings.partition == GIVEN
        remedy = "leave such clients out of the federation" if given else "set min_samples to 2 or more"
        if settings.client_test or settings.validation:
            remedy = "hold out less of their data, or set min_samples higher"
        raise SettingError(f"{what}, and the net cannot train on a batch of one: {remedy}")
    return Task(
        seed=settings.seed,
        layout=layout,
        federation=federation,
        pool=pool,
        rule=method.rule,
        batch_size=settings.batch_size,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        clip=settings.clip,
        lr_decay=settings.lr_decay if settings.lr_schedule == "inverse-step" else 0.0,
        replacement=settings.sampling == "replacement",
        join_lone=refuses_one,
        run=name,
    )


def _check_gpu_settings(settings: Settings, device: torch.device) -> None:
    """Raise an error for settings that only a GPU takes."""
    if device.type != "cuda" and settings.precision == "tf32":
        raise SettingError("precision must be fp32 or bf16 on a CPU: TF32 needs a GPU, got 'tf32'")
    if device.type != "cuda" and settings.memory is not None:
        raise SettingError(f"memory limits GPU memory, but the device is {device}: leave it out")


def _workers(settings: Settings, device: torch.device) -> int:
    """Return the number of training processes: on a CPU that can fork one per thread, at most one per client."""
    if device.type != "cpu" or not engines.can_fork():
        return 1
    return min(settings.k, settings.workers or torch.get_num_threads())


def _why_fewer(settings: Settings, device: torch.device) -> str:
    if device.type != "cpu":
        return "on a GPU one process trains"
    if not engines.can_fork():
        return "several processes need Linux, a PyTorch that sees no GPU, and a process that may start others"
    return f"a round has {settings.k} clients"
