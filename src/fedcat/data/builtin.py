"""The built-in datasets: digits, which ships with the package, and published datasets that are downloaded."""

from __future__ import annotations

import string
from dataclasses import replace
from functools import cache
from importlib import resources

import numpy as np

from fedcat.core.errors import SettingError, unknown_name
from fedcat.core.rng import Purpose, random_stream
from fedcat.data.dataset import DATASETS, NATURAL, Dataset
from fedcat.data.files.cache import DecodedData
from fedcat.data.files.catalog import SOURCES
from fedcat.data.files.formats import LETTERS
from fedcat.data.pool import Normalize, Pool

_CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_COARSE_NAMES = (
    *("aquatic mammals", "fish", "flowers", "food containers", "fruit and vegetables"),
    *("household electrical devices", "household furniture", "insects", "large carnivores"),
    *("large man-made outdoor things", "large natural outdoor scenes", "large omnivores and herbivores"),
    *("medium-sized mammals", "non-insect invertebrates", "people", "reptiles", "small mammals", "trees"),
    *("vehicles 1", "vehicles 2"),
)

_FINE_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""


@DATASETS.register(
    "digits",
    "1,797 handwritten digits of 8 x 8 pixels (UCI), shipped with the package: 1,437 to train, 360 to test; "
    "defaults: 50 clients, min_samples 1, batch_size 10, lr 0.05, 100 rounds",
)
@cache
def digits() -> Dataset:
    """Load the digits that ship with the package."""
    with resources.files("fedcat.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        images, labels = stored["images"], stored["labels"]
    return Dataset.from_arrays(
        images[:, None],
        labels,
        normalize=Normalize(scale=16.0, mean=(0.3047,), std=(0.3761,)),  # of the training images
        name="digits",
        defaults={
            "net": "digits-cnn",
            "clients": 50,
            "min_samples": 1,
            "batch_size": 10,
            "lr": 0.05,
            "rounds": 100,
        },
        class_names=tuple(string.digits),
    )


@DATASETS.register("mnist", "70,000 handwritten digits of 28 x 28 pixels: 60,000 to train, 10,000 to test")
def mnist(*, data_dir: str = "", mean: tuple[float, ...] = (0.1307,), std: tuple[float, ...] = (0.3081,)) -> Dataset:
    """Load MNIST.

    Parameters
    ----------
    data_dir : path
        A directory to search for its files before all others.
    mean, std : tuple of float
        Constants that normalize pixels scaled to 0 .. 1.
    """
    normalize = _normalizer(1, mean, std)
    content = SOURCES["mnist"].content(data_dir)
    return _images("mnist", content, 10, normalize, {"net": "lab-mnist"}, tuple(string.digits))


@DATASETS.register("cifar10", "60,000 color images of 32 x 32 pixels in 10 classes: 50,000 to train, 10,000 to test")
def cifar10(
    *, data_dir: str = "", mean: tuple[float, ...] = (0.5, 0.5, 0.5), std: tuple[float, ...] = (0.5, 0.5, 0.5)
) -> Dataset:
    """Load CIFAR-10; parameters as for `mnist`."""
    normalize = _normalizer(3, mean, std)
    content = SOURCES["cifar10"].content(data_dir)
    return _images("cifar10", content, 10, normalize, {"net": "lab-cifar"}, _CIFAR10_NAMES)


@DATASETS.register(
    "cifar100",
    "60,000 color images of 32 x 32 pixels in 20 coarse classes (labels=fine: 100): 50,000 to train, 10,000 to test",
)
def cifar100(
    *,
    data_dir: str = "",
    labels: str = "coarse",
    mean: tuple[float, ...] = (0.4914, 0.4822, 0.4465),
    std: tuple[float, ...] = (0.2023, 0.1994, 0.2010),
) -> Dataset:
    """Load CIFAR-100.

    Parameters
    ----------
    data_dir, mean, std
        As for `mnist`.
    labels : str
        ``coarse``, the 20 superclasses, or ``fine``, the 100 classes.
    """
    if labels not in ("coarse", "fine"):
        raise unknown_name("cifar100.labels", labels, ("coarse", "fine"))
    normalize = _normalizer(3, mean, std)
    content = SOURCES["cifar100"].content(data_dir)
    coarse = labels == "coarse"
    names = _COARSE_NAMES if coarse else tuple(_FINE_NAMES.split())
    column = 0 if coarse else 1
    return _images("cifar100", content, 20 if coarse else 100, normalize, {"net": "lab-cifar"}, names, column)


@DATASETS.register(
    "femnist",
    "handwritten digits and letters of 28 x 28 pixels in 62 classes; each writer is a client: "
    "180 writers drawn by seed from those with at least 100 samples",
)
def femnist(
    *,
    data_dir: str = "",
    seed: int = 0,
    writers: int = 180,
    keep: int = 100,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[float, ...] = (-0.5,),
) -> Dataset:
    """Load FEMNIST; the test set is the union of the chosen writers' test samples.

    Parameters
    ----------
    data_dir, mean, std
        As for `mnist`. The negative std makes ink positive: the published images are dark on white.
    seed : int
        The seed of the choice of writers.
    writers : int
        The number of writers; 0 for all.
    keep : int
        Writers with fewer samples (training and test) are dropped.
    """
    normalize = _normalizer(1, mean, std)
    arrays, names, owners = _chosen("femnist", SOURCES["femnist"].content(data_dir), writers, keep, seed)
    made = _images(
        "femnist",
        DecodedData(arrays),
        62,
        normalize,
        {"net": "lab-femnist", "partition": NATURAL, "clients": len(names), "min_samples": 1},
        tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    )
    return replace(made, owner=owners["train"], owner_names=names, test_owner=owners["test"])


@DATASETS.register(
    "shakespeare",
    "lines of 80 characters from Shakespeare's plays and the character after each; each role is a client; LEAF's files",
)
def shakespeare(*, data_dir: str = "", seed: int = 0, roles: int = 0, keep: int = 64) -> Dataset:
    """Load LEAF's Shakespeare; the test set is the union of the chosen roles' test samples.

    Parameters
    ----------
    data_dir
        As for `mnist`.
    seed : int
        The seed of the choice of roles.
    roles : int
        The number of roles; 0 for all.
    keep : int
        Roles with fewer samples (training and test) are dropped.
    """
    arrays, names, owners = _chosen("shakespeare", SOURCES["shakespeare"].content(data_dir), roles, keep, seed)
    train, test = (Pool(arrays[f"{part}_x"].astype(np.int16), arrays[f"{part}_y"]) for part in ("train", "test"))
    defaults = {"net": "char-lstm", "partition": NATURAL, "clients": len(names), "min_samples": 1}
    shown = tuple(repr(letter)[1:-1] for letter in LETTERS)
    classes, owner, theirs = len(LETTERS), owners["train"], owners["test"]
    return Dataset("shakespeare", train, test, classes, defaults, owner, names, shown, theirs)


def _chosen(
    name: str, content: DecodedData, wanted: int, keep: int, seed: int
) -> tuple[dict[str, np.ndarray], tuple[str, ...], dict[str, np.ndarray]]:
    """Choose owners with at least `keep` samples by seed; return their arrays, their names and who owns what."""
    sizes = {part: content.arrays[f"{part}_sizes"] for part in ("train", "test")}
    fit = np.flatnonzero((sizes["train"] + sizes["test"] >= keep) & (sizes["train"] > 0))
    option = {"femnist": "writers"}.get(name, "roles")
    if not len(fit):
        most = int((sizes["train"] + sizes["test"]).max())
        raise SettingError(f"{name}.keep must be at most {most}, the size of the largest of the {option}, got {keep}")
    if not 0 <= wanted <= len(fit):
        raise SettingError(
            f"{name}.{option} must be at most {len(fit)}, the number of {option} with at least keep = {keep} samples, "
            f"or 0 for all of them, got {wanted}"
        )
    drawn = random_stream(seed, Purpose.WRITERS).permutation(fit)[: wanted or len(fit)]
    chosen = np.isin(np.arange(len(content.words["writers"])), drawn)
    rows = {part: np.repeat(chosen, sizes[part]) for part in sizes}
    if not rows["test"].any():
        raise SettingError(f"{name} has no test samples of the chosen {option}: use LEAF's option -t sample")
    arrays = {key: content.arrays[key][rows[key.split("_")[0]]] for key in ("train_x", "train_y", "test_x", "test_y")}
    names = tuple(owner for owner, taken in zip(content.words["writers"], chosen, strict=True) if taken)
    return arrays, names, {part: np.repeat(np.arange(len(names)), sizes[part][chosen]) for part in sizes}


def _images(
    name: str,
    content: DecodedData,
    classes: int,
    normalize: Normalize,
    defaults: dict[str, object],
    class_names: tuple[str, ...],
    column: int = 0,
) -> Dataset:
    """Build a dataset from decoded images; `column` selects the label if samples have several."""
    pools = {}
    for part in ("train", "test"):
        labels = content.arrays[f"{part}_y"]
        pools[part] = Pool(content.arrays[f"{part}_x"], labels if labels.ndim == 1 else labels[:, column], normalize)
    return Dataset(name, pools["train"], pools["test"], classes, defaults, class_names=class_names)


def _normalizer(channels: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Normalize:
    """Return a `Normalize` with checked constants, so that errors precede any download."""
    normalize = Normalize(255.0, mean, std)
    normalize.check_channels(channels)
    return normalize
