"""Puts simulations together out of settings and a user's own parts; what several of them need is made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from fedcat import engines
from fedcat.config.presets import over_preset
from fedcat.config.settings import Settings, make
from fedcat.core.errors import DataError, SettingError
from fedcat.core.options import arguments, plain_options, plain_values
from fedcat.core.precision import find_device
from fedcat.core.registry import Registry, name_of, part_label
from fedcat.core.rng import Purpose, chance, torch_seed
from fedcat.data.dataset import DATASETS, GIVEN, NATURAL, Dataset, made_by, make_dataset
from fedcat.data.federation import Federation
from fedcat.data.files.locations import expanded
from fedcat.data.partitions import PARTITIONS
from fedcat.data.pool import Pool
from fedcat.engines.base import Engine
from fedcat.methods import METHODS, Method
from fedcat.methods.selection.base import SELECTORS
from fedcat.methods.server_optimizer import SERVER_STEPS
from fedcat.models.layout import Layout
from fedcat.models.nets import NETS, check_outputs, net_builder
from fedcat.models.traits import traits
from fedcat.protocol.local_rule import Task
from fedcat.runs.server_side import make_server_side, method_options
from fedcat.runs.simulation import Simulation

ONE_AT_A_TIME = RLock()
"""Held while a run is prepared and while it is carried out: PyTorch's generators and threads are the process's."""


@dataclass(frozen=True)
class Prepared:
    """A simulation that is ready to run, and what is to be known about it.

    Attributes
    ----------
    settings : Settings
        With every default filled in.
    simulation : Simulation
        Not yet started.
    federation : Federation
        Who holds what.
    engine_why : str
        Why the engine was picked.
    notes : tuple of str
        Lines that the user should read.
    threads_before : int
        How many threads PyTorch had before this simulation's settings were looked at.
    """

    settings: Settings
    simulation: Simulation
    federation: Federation
    engine_why: str
    notes: tuple[str, ...]
    threads_before: int


class Workshop:
    """Makes simulations that share their data, their nets' layouts and their engines."""

    def __init__(self) -> None:
        self._datasets: dict[object, Dataset | Federation] = {}
        self._federations: dict[object, Federation] = {}
        self._layouts: dict[object, list[Layout]] = {}
        self._engines: dict[object, Engine] = {}

    def prepare(self, given: Mapping[str, Any]) -> Prepared:
        """Make a simulation.

        Parameters
        ----------
        given : mapping
            Settings by name; `method`, `dataset`, `net`, `selector` and `server` may be a user's own objects. What is
            not given comes from the dataset's defaults, then from the general ones.
        """
        with ONE_AT_A_TIME:
            settings, federation, parts = self._divided(given)
            threads_before = torch.get_num_threads()
            if settings.threads is not None:
                torch.set_num_threads(settings.threads)
            try:
                return self._prepare(settings, federation, parts, threads_before)
            except BaseException:
                torch.set_num_threads(threads_before)
                raise

    def _prepare(
        self, settings: Settings, federation: Federation, parts: dict[str, Any], threads_before: int
    ) -> Prepared:
        device = find_device(settings.device)
        exact = device.type == "cpu" if settings.exact is None else settings.exact
        _check_machine(settings, device)
        asked = settings.workers
        settings = replace(settings, exact=exact, workers=_workers(settings, device))
        net = parts.get("net") or NETS.get(_net_name(settings))
        builder = net_builder(net, federation.train.shape, federation.classes)
        layout, start = self._layout(net, builder, federation, settings, device)
        pool = federation.train.to(device)
        settings, method = make_server_side(parts, settings, federation, layout, start)
        task = _task(settings, federation, layout, pool, method)
        by_hand = settings.precision == "fp32" and not task.rule.own_loss
        name, why = engines.pick(settings.engine, layout, pool, task.padding, exact, by_hand)
        simulation = Simulation(
            method,
            task,
            self._engine(name, settings),
            federation.test.to(device),
            settings.rounds,
            settings.evaluate_every,
            settings.evaluate,
            settings.bound,
        )
        notes = method.advice(settings.rounds)
        if asked and settings.workers != asked:
            notes.append(f"workers {settings.workers} instead of {asked}: {_fewer(settings, device)}")
        if why.startswith("the net"):
            notes.append(f"engine {name}: {why}")
        return Prepared(settings, simulation, federation, why, tuple(notes), threads_before)

    def divide(self, given: Mapping[str, Any]) -> tuple[Settings, Federation]:
        """Return the settings and the federation that they describe; only what concerns the data is looked at."""
        return self._divided(given)[:2]

    def _divided(self, given: Mapping[str, Any]) -> tuple[Settings, Federation, dict[str, Any]]:
        plain, parts = _split(over_preset(plain_values(given), Settings.dataset))
        _check_early(plain, parts)
        data, dataset_options = self._data(parts.get("dataset", plain.get("dataset", Settings.dataset)), plain)
        settings = _resolved(plain, data, "partition" in given)
        settings = replace(settings, dataset_options=dataset_options, data_dir=_absolute(settings.data_dir))
        return settings, self._federation(data, settings), parts

    def _data(self, named: object, plain: Mapping[str, Any]) -> tuple[Dataset | Federation, dict[str, Any]]:
        """Return the data and all options that it was made with."""
        given = plain.get("dataset_options", {})
        if isinstance(named, (Dataset, Federation)):
            if given:
                raise SettingError(f"dataset_options cannot be set: {named.name!r} is a dataset already, got {given!r}")
            return named, {}
        if not isinstance(named, str) and not callable(named):
            raise SettingError(f"dataset must be a name, a Dataset, a Federation or a function, got {named!r}")
        factory = DATASETS.get(named) if isinstance(named, str) else named
        name = named if isinstance(named, str) else part_label(named)
        checked = make({key: plain[key] for key in ("data_dir", "seed", "data_seed") if key in plain})
        ready = made_by(factory, name, data_dir=_absolute(checked.data_dir), seed=data_seed(checked), given=given)
        defaults = {key: value for key, value in plain_options(factory).items() if key not in GIVEN}
        full = {**defaults, **{key: ready.get(key, value) for key, value in given.items()}}
        if any(not isinstance(value, (bool, int, float, str, tuple, list)) for value in ready.values()):
            return make_dataset(factory, name, ready), full
        key = (named, repr(sorted(ready.items())))
        if key not in self._datasets:
            self._datasets[key] = make_dataset(factory, name, ready)
        return self._datasets[key], full

    def _federation(self, data: Dataset | Federation, settings: Settings) -> Federation:
        if isinstance(data, Federation):
            return data
        seed = data_seed(settings)
        words = (settings.partition, settings.devices, settings.alpha, settings.shards)
        key = (data, seed, *words, settings.min_samples, settings.partition_tries)
        if key not in self._federations:
            self._federations[key] = data.divide(
                settings.devices,
                settings.partition,
                seed=seed,
                alpha=settings.alpha,
                shards=settings.shards,
                min_samples=settings.min_samples,
                tries=settings.partition_tries,
            )
        return self._federations[key]

    def _layout(
        self,
        part: object,
        builder: Callable[[], nn.Module],
        federation: Federation,
        settings: Settings,
        device: torch.device,
    ) -> tuple[Layout, Tensor]:
        """Return the net's layout and the first row under the seed.

        The layout is shared by all simulations of that net whose tensors beside the row are equal.
        """
        dtype = getattr(torch, settings.dtype)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(torch_seed(chance(settings.seed, Purpose.INITIAL)))
            net = builder().to(device=device, dtype=dtype)
            check_outputs(net, federation.test.to(device).inputs(slice(0, 2), dtype), federation.classes)
        fresh = Layout(net)
        key = (part, federation.train.shape, federation.classes, device, dtype)
        for known in self._layouts.setdefault(key, []):
            if _equal(known.beside(known.net), fresh.beside(net)):
                return known, known.pack(net)
        self._layouts[key].append(fresh)
        return fresh, fresh.pack(net)

    def _engine(self, name: str, settings: Settings) -> Engine:
        memory = None if settings.memory is None else settings.memory * 1e9
        key = (name, settings.exact, settings.precision, memory, settings.workers)
        if key not in self._engines:
            self._engines[key] = engines.make(
                name, bool(settings.exact), settings.precision, memory, settings.workers or 1
            )
        return self._engines[key]


_NAMED: dict[str, Registry[Any]] = {
    "method": METHODS,
    "net": NETS,
    "selector": SELECTORS,
    "server": SERVER_STEPS,
    "partition": PARTITIONS,
}


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide what was given into plain settings and a user's own objects, each named in the settings as well."""
    plain, parts = dict(given), {}
    for name in ("method", "dataset", "net", "selector", "server"):
        part = plain.get(name)
        if part is not None and not isinstance(part, str):
            parts[name] = part
            plain[name] = name_of(part) or f"<{part_label(part)}>"
    return plain, parts


def _check_early(plain: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raise for what is wrong whatever the data is, before any of it is loaded or downloaded."""
    general = make({n: v for n, v in plain.items() if n != "per_round" or "devices" in plain})
    find_device(general.device)
    if general.data_dir and not expanded(general.data_dir).is_dir():
        raise DataError(f"data_dir must name a folder that is there, got {general.data_dir!r}")
    for name, registry in _NAMED.items():
        value = getattr(general, name)
        if name not in parts and value not in ("", "given"):
            registry.get(value)
    factory = parts.get("method") or METHODS.get(general.method)
    arguments("method", general.method, factory, method_options(general, factory))


def _check_machine(settings: Settings, device: torch.device) -> None:
    """Raise for settings that only a GPU takes."""
    if device.type != "cuda" and settings.precision == "tf32":
        raise SettingError("precision must be fp32 or bf16 on a CPU: TF32 is a GPU's, got 'tf32'")
    if device.type != "cuda" and settings.memory is not None:
        raise SettingError(f"memory caps what is taken of a GPU, and device is {device}: leave it out")


def _workers(settings: Settings, device: torch.device) -> int:
    """Return how many processes train: one a thread on a CPU where they can be forked, never more than devices."""
    if device.type != "cpu" or not engines.can_fork():
        return 1
    return min(settings.k, settings.workers or torch.get_num_threads())


def _fewer(settings: Settings, device: torch.device) -> str:
    if device.type != "cpu":
        return "on a GPU one process trains"
    if not engines.can_fork():
        return "processes that train need Linux, a PyTorch that sees no GPU, and a process that may have its own"
    return f"a round has {settings.k} devices"


def _absolute(folder: str) -> str:
    return str(expanded(folder).absolute()) if folder else ""


def data_seed(settings: Settings) -> int:
    """Return the seed of the partition and of the dataset's own draws."""
    return settings.seed if settings.data_seed is None else settings.data_seed


def _resolved(plain: Mapping[str, Any], data: Dataset | Federation, partition_given: bool) -> Settings:
    """Return the settings with the dataset's defaults; what would have no effect on data with owners is refused."""
    if isinstance(data, Dataset):
        defaults = dict(data.defaults)
        if defaults.get("partition") == NATURAL and plain.get("partition", NATURAL) != NATURAL:
            defaults = {n: v for n, v in defaults.items() if n not in ("partition", "devices", "min_samples")}
        settings = make(plain, defaults)
        vain = [name for name in ("alpha", "shards") if name in plain]
        if vain and settings.partition == NATURAL and not partition_given:
            raise SettingError(
                f"{vain[0]} has no effect on {data.name!r}, whose devices are the owners of its samples: "
                "name a partition that takes it, such as dirichlet, or leave it out"
            )
        return settings
    divided = [name for name in ("partition", "alpha", "shards", "min_samples", "data_seed") if name in plain]
    if divided and plain.get("partition") != "given":
        raise SettingError(f"{divided[0]} cannot be set: the federation {data.name!r} is divided over devices already")
    given = {"min_samples": int(data.sizes.min()), **plain}
    if given.get("devices", data.devices) != data.devices:
        raise SettingError(f"devices must be {data.devices} as in the federation, got {given['devices']}")
    return make({**given, "devices": data.devices, "partition": "given"})


def _net_name(settings: Settings) -> str:
    if not settings.net:
        raise SettingError(f"net must be named, see `fedcat nets`: dataset {settings.dataset!r} has none of its own")
    return settings.net


def _task(settings: Settings, federation: Federation, layout: Layout, pool: Pool, method: Method) -> Task:
    refuses_one = traits(layout, pool).refuses_one
    if refuses_one and settings.batch_size == 1:
        raise SettingError("batch_size must be at least 2: the net cannot train on a batch of one sample, got 1")
    if refuses_one and federation.sizes.min() == 1:
        raise SettingError("min_samples must be at least 2: the net cannot train on a batch of one sample, got 1")
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
        join_lone=refuses_one,
    )


def pinned(settings: Settings) -> Settings:
    """Return settings that name the number of threads, on which the last bits can depend."""
    return replace(settings, threads=torch.get_num_threads())
