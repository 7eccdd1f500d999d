"""Puts simulations together out of settings and a user's own parts; what several of them need is made once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedcat import engines
from fedcat.chance import Purpose, chance, torch_seed
from fedcat.engines.engine import Engine
from fedcat.errors import SettingError
from fedcat.experiment import Settings, make
from fedcat.federation.datasets import DATASETS, Dataset
from fedcat.federation.federation import Federation
from fedcat.federation.pool import Pool
from fedcat.local import Task
from fedcat.methods import METHODS, Context, Method, arguments
from fedcat.models.layout import Layout
from fedcat.models.nets import NETS, check_outputs
from fedcat.models.traits import traits
from fedcat.registry import name_of
from fedcat.schedules import schedule
from fedcat.selection import SELECTORS, Selector, from_part
from fedcat.simulation import Simulation


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
    net : callable
        Makes a net of the kind that is trained.
    engine_why : str
        Why the engine was picked.
    notes : tuple of str
        Lines that the user should read.
    """

    settings: Settings
    simulation: Simulation
    federation: Federation
    net: Callable[[], nn.Module]
    engine_why: str
    notes: tuple[str, ...]


class Workshop:
    """Makes simulations that share their data, their nets' layouts and their engines."""

    def __init__(self) -> None:
        self._datasets: dict[object, Dataset | Federation] = {}
        self._federations: dict[object, Federation] = {}
        self._layouts: dict[object, Layout] = {}
        self._engines: dict[object, Engine] = {}

    def prepare(self, given: Mapping[str, Any]) -> Prepared:
        """Make a simulation.

        Parameters
        ----------
        given : mapping
            Settings by name; `method`, `dataset`, `net` and `selector` may be a user's own objects. What is not
            given comes from the dataset's defaults, then from the general ones.
        """
        plain, parts = _split(given)
        data = self._data(parts.get("dataset", plain.get("dataset", Settings.dataset)))
        settings = _resolved(plain, data)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = find_device(settings.device)
        exact = device.type == "cpu" if settings.exact is None else settings.exact
        settings = replace(settings, exact=exact)
        federation = self._federation(data, settings)
        net = parts.get("net") or NETS.get(_net_name(settings))
        builder = net_builder(net, federation.train.shape, federation.classes)
        layout, start = self._layout(net, builder, federation, settings, device)
        pool = federation.train.to(device)
        name, why = engines.pick(settings.engine, layout, pool, settings.batch_size, exact)
        method = _method(parts, settings, federation, layout, start)
        simulation = Simulation(
            method,
            _task(settings, federation, layout, pool, method),
            self._engine(name, exact),
            federation.test.to(device),
            settings.rounds,
            settings.evaluate_every,
            settings.evaluate,
            settings.bound,
        )
        notes = method.advice(settings.rounds)
        if why.startswith("the net"):
            notes.append(f"engine {name}: {why}")
        return Prepared(settings, simulation, federation, builder, why, tuple(notes))

    def _data(self, named: object) -> Dataset | Federation:
        if isinstance(named, (Dataset, Federation)):
            return named
        if named not in self._datasets:
            factory = DATASETS.get(named) if isinstance(named, str) else named
            if not callable(factory):
                raise SettingError(f"dataset must be a name, a Dataset, a Federation or a function, got {named!r}")
            found = factory()
            if not isinstance(found, (Dataset, Federation)):
                raise SettingError(f"dataset {named!r} must give a Dataset or a Federation, got {type(found).__name__}")
            self._datasets[named] = found
        return self._datasets[named]

    def _federation(self, data: Dataset | Federation, settings: Settings) -> Federation:
        if isinstance(data, Federation):
            return data
        seed = settings.seed if settings.data_seed is None else settings.data_seed
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
        """Return the net's layout, shared by all simulations of that net, and the first row under the seed."""
        dtype = getattr(torch, settings.dtype)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(torch_seed(chance(settings.seed, Purpose.INITIAL)))
            net = builder().to(device=device, dtype=dtype)
        key = (part, federation.train.shape, federation.classes, device, dtype)
        if key not in self._layouts:
            sample = federation.test.to(device).inputs(slice(0, 2), dtype)
            check_outputs(net, sample, federation.classes)
            self._layouts[key] = Layout(net)
        layout = self._layouts[key]
        return layout, layout.pack(net)

    def _engine(self, name: str, exact: bool) -> Engine:
        if (name, exact) not in self._engines:
            self._engines[name, exact] = engines.make(name, exact)
        return self._engines[name, exact]


def find_device(name: str) -> torch.device:
    """Return the device called `name`; ``auto`` is the first GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise SettingError(f"device {name!r} needs CUDA, which this machine or this PyTorch lacks: use cpu or auto")
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise SettingError(f"device {name!r} cannot be used ({first}): use auto, cpu, cuda or cuda:0") from error


def net_builder(part: object, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """Return what makes a net: of a net itself, or of a class or function that takes nothing or (shape, classes)."""
    if isinstance(part, nn.Module):
        module = part
        return lambda: deepcopy(module)
    if not callable(part):
        raise SettingError(f"net must be a name, a torch.nn.Module or a function that makes one, got {part!r}")
    factory = part
    arguments: tuple[object, ...] = ()
    try:
        inspect.signature(factory).bind()
    except TypeError:
        arguments = (shape, classes)

    def build() -> nn.Module:
        net = factory(*arguments)
        if not isinstance(net, nn.Module):
            raise SettingError(f"net must be a torch.nn.Module, got {type(net).__name__} from {factory!r}")
        return net

    return build


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide what was given into plain settings and a user's own objects, each named in the settings as well."""
    plain, parts = dict(given), {}
    for name in ("method", "dataset", "net", "selector"):
        part = plain.get(name)
        if part is not None and not isinstance(part, str):
            parts[name] = part
            plain[name] = name_of(part) or getattr(part, "name", None) or getattr(part, "__name__", type(part).__name__)
    return plain, parts


def _resolved(plain: Mapping[str, Any], data: Dataset | Federation) -> Settings:
    if isinstance(data, Dataset):
        return make(plain, data.defaults)
    given = {"min_samples": int(data.sizes.min()), **plain}
    if given.get("devices", data.devices) != data.devices:
        raise SettingError(f"devices must be {data.devices} as in the federation, got {given['devices']}")
    return make({**given, "devices": data.devices, "partition": "given"})


def _net_name(settings: Settings) -> str:
    if not settings.net:
        raise SettingError(f"net must be named: dataset {settings.dataset!r} has none of its own")
    return settings.net


def _method(
    parts: Mapping[str, Any], settings: Settings, federation: Federation, layout: Layout, start: Tensor
) -> Method:
    factory = parts.get("method") or METHODS.get(settings.method)
    options = arguments(settings.method, factory, settings.options.get(settings.method, {}))
    context = Context(
        seed=settings.seed,
        layout=layout,
        start=start,
        samples=federation.sizes,
        per_round=settings.k,
        epochs=settings.epochs,
        lr=schedule(settings.lr_schedule, settings.lr, settings.rounds, settings.lr_decay, settings.lr_every),
        selector=_selector(parts.get("selector"), settings, federation),
    )
    return factory(context, **options)


def _task(settings: Settings, federation: Federation, layout: Layout, pool: Pool, method: Method) -> Task:
    refuses_one = traits(layout, pool).refuses_one
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


def _selector(part: object | None, settings: Settings, federation: Federation) -> Selector | None:
    if part is None and not settings.selector:
        return None
    found = part if part is not None else SELECTORS.get(settings.selector)
    return from_part(found, settings.seed, federation.sizes, settings.k)


def pinned(settings: Settings) -> Settings:
    """Return settings that name the number of threads, on which the last bits can depend."""
    return replace(settings, threads=torch.get_num_threads())
