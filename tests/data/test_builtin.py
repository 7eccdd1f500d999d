import json
import time

import numpy as np
import pytest
import torch
from helpers import philox
from small_data import (
    cifar_files,
    cifar_source,
    femnist_source,
    leaf_files,
    mnist_files,
    mnist_source,
    write,
    writers,
)

import fedcat
from fedcat.core.errors import DataError, SettingError
from fedcat.data.builtin import cifar10, cifar100, digits, femnist, mnist, shakespeare
from fedcat.data.dataset import DATASETS, dataset_options
from fedcat.data.files.catalog import SOURCES
from fedcat.data.files.formats import LETTERS


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Return a folder with small official-format files that stand for all four datasets."""
    files = {"mnist": mnist_files(), "cifar10": cifar_files("cifar10"), "cifar100": cifar_files("cifar100")}
    for name in files:
        source = mnist_source(files[name]) if name == "mnist" else cifar_source(name, files[name])
        monkeypatch.setitem(SOURCES, name, source)
        write(
            tmp_path / {"mnist": "mnist", "cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}[name],
            files[name],
        )
    monkeypatch.setitem(SOURCES, "femnist", femnist_source(b""))
    write(tmp_path / "femnist", leaf_files(writers(8)))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("load", "classes", "shape", "black", "white"),
    [
        (mnist, 10, (1, 28, 28), [(0 - 0.1307) / 0.3081], [(1 - 0.1307) / 0.3081]),
        (cifar10, 10, (3, 32, 32), [-1.0] * 3, [1.0] * 3),
        (
            cifar100,
            20,
            (3, 32, 32),
            [-0.4914 / 0.2023, -0.4822 / 0.1994, -0.4465 / 0.2010],
            [(1 - 0.4914) / 0.2023, (1 - 0.4822) / 0.1994, (1 - 0.4465) / 0.2010],
        ),
    ],
)
def test_images_stay_bytes_and_are_normalised_by_the_papers_constants(small, load, classes, shape, black, white):
    data = load(data_dir=small)
    assert (data.classes, data.train.shape, data.test.shape) == (classes, shape, shape)
    assert data.train.x.dtype == data.test.x.dtype == torch.uint8
    for level, wanted in ((0, black), (255, white)):
        stored = torch.full((1, *shape), level, dtype=torch.uint8)
        found = data.train.normalize(stored, torch.float64)[0, :, 3, 4]
        assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64))


def test_femnist_is_inked_positive(small):
    data = femnist(data_dir=small, writers=3, keep=1)
    levels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    assert data.train.normalize(levels, torch.float64).flatten().tolist() == [1.0, -1.0]


def test_the_fine_labels_are_an_option(small):
    coarse, fine = cifar100(data_dir=small), cifar100(data_dir=small, labels="fine")
    assert (coarse.classes, fine.classes) == (20, 100)
    assert coarse.train.y.tolist() == [i % 20 for i in range(120)]
    assert fine.train.y.tolist() == [i % 100 for i in range(120)]
    assert torch.equal(coarse.train.x, fine.train.x)
    assert (len(coarse.class_names), len(fine.class_names)) == (20, 100)


def test_the_normalisation_is_an_option(small):
    data = mnist(data_dir=small, mean=(0.5,), std=(0.25,))
    assert float(data.train.normalize(torch.zeros(1, 1, 1, 1), torch.float32)) == -2.0
    for given in ({"std": (0.0,)}, {"mean": ("a",)}, {"mean": ()}, {"mean": (float("nan"),)}, {"std": (True,)}):
        with pytest.raises(SettingError, match=r"(mean|std) must be a list of numbers"):
            mnist(data_dir="nowhere", **given)  # before anything is looked for
    with pytest.raises(SettingError, match=r"mean must be one number for inputs of 1 channels, got \[1.0, 2.0\]"):
        mnist(data_dir="nowhere", mean=(1.0, 2.0))
    with pytest.raises(SettingError, match=r"std must be one number or 3 for inputs of 3 channels"):
        cifar10(data_dir="nowhere", std=(1.0, 2.0))


def test_writers_are_chosen_by_the_seed_and_are_the_clients(small):
    every = femnist(data_dir=small, writers=0, keep=1)
    assert every.owner_names == tuple(f"f{i:04}_00" for i in range(8))
    five = femnist(data_dir=small, writers=5, keep=1, seed=1)
    assert len(five.owner_names) == 5
    assert five.owner_names == femnist(data_dir=small, writers=5, keep=1, seed=1).owner_names
    others = {femnist(data_dir=small, writers=5, keep=1, seed=s).owner_names for s in range(6)}
    assert len(others) > 1
    fed = five.divide()
    assert fed.clients == 5
    assert fed.client_names == five.owner_names
    for client, name in enumerate(five.owner_names):
        place = every.owner_names.index(name)
        assert torch.equal(fed.train.x[fed.indices(client)], every.train.x[every.owner == place])
    assert len(five.test) == 5 * 3


def test_writers_are_the_first_in_the_order_of_their_own_stream(small):
    """Purpose 10, among those with enough samples, and in the order of the file."""
    for seed in range(4):
        drawn = philox(seed, 10).permutation(np.arange(2, 8))[:3]
        data = femnist(data_dir=small, writers=3, keep=17, seed=seed)
        assert data.owner_names == tuple(f"f{i:04}_00" for i in sorted(drawn))


def test_options_and_their_defaults():
    cifar = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
    found = {
        name: dataset_options(DATASETS.get(name)) for name in ("digits", "mnist", "cifar10", "cifar100", "femnist")
    }
    assert found == {
        "digits": {},
        "mnist": {"mean": (0.1307,), "std": (0.3081,)},
        "cifar10": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
        "cifar100": {"labels": "coarse", **cifar},
        "femnist": {"writers": 180, "keep": 100, "mean": (0.5,), "std": (-0.5,)},
    }


def test_settings_that_datasets_bring_along(small):
    assert digits().defaults == {
        "net": "digits-cnn",
        "clients": 50,
        "min_samples": 1,
        "batch_size": 10,
        "lr": 0.05,
        "rounds": 100,
    }
    for load, net in ((mnist, "lab-mnist"), (cifar10, "lab-cifar"), (cifar100, "lab-cifar")):
        assert load(data_dir=small).defaults == {"net": net}
    written = femnist(data_dir=small, writers=3, keep=1)
    assert written.defaults == {"net": "lab-femnist", "partition": "natural", "clients": 3, "min_samples": 1}


def test_names_of_the_classes(small):
    assert mnist(data_dir=small).class_names == digits().class_names == tuple("0123456789")
    ten = cifar10(data_dir=small).class_names
    assert (len(ten), ten[0], ten[3], ten[9]) == (10, "airplane", "cat", "truck")
    letters = femnist(data_dir=small, writers=3, keep=1).class_names
    assert (len(letters), letters[9], letters[10], letters[35], letters[36], letters[61]) == (62, *"9AZaz")
    coarse, fine = cifar100(data_dir=small).class_names, cifar100(data_dir=small, labels="fine").class_names
    assert (coarse[0], coarse[19], fine[0], fine[99]) == ("aquatic mammals", "vehicles 2", "apple", "worm")
    with pytest.raises(SettingError, match=r"unknown cifar100.labels 'rough'"):
        cifar100(data_dir=small, labels="rough")


def test_the_digits_are_normalized_by_their_training_images():
    train = digits().train
    pixels = train.x.double() / 16
    wanted = (16.0, (round(float(pixels.mean()), 4),), (round(float(pixels.std(unbiased=False)), 4),))
    assert (train.normalize.scale, train.normalize.mean, train.normalize.std) == wanted == (16.0, (0.3047,), (0.3761,))


def test_writers_with_few_samples_are_left_out(small):
    """Writer i has 12 + i training and 3 test samples, which count together."""
    data = femnist(data_dir=small, writers=0, keep=18)
    assert data.owner_names == tuple(f"f{i:04}_00" for i in range(3, 8))
    with pytest.raises(
        SettingError, match=r"femnist.writers must be at most 5, .* keep = 18 samples, or 0 for all of them, got 6"
    ):
        femnist(data_dir=small, writers=6, keep=18)
    with pytest.raises(
        SettingError, match=r"femnist.keep must be at most 22, the size of the largest of the writers, got 100"
    ):
        femnist(data_dir=small)
    with pytest.raises(SettingError, match=r"femnist.writers must be at most"):
        femnist(data_dir=small, writers=-1, keep=1)


def test_runs_take_the_dataset_with_its_options(small, tmp_path):
    words = {"data_dir": small, "rounds": 2, "epochs": 1, "min_samples": 1}
    options = {"writers": 4, "keep": 1}
    result = fedcat.run(dataset="femnist", dataset_options=options, fraction=0.5, out=tmp_path / "run", **words)
    assert (result.settings.clients, result.settings.k, result.settings.partition) == (4, 2, "natural")
    assert result.settings.net == "lab-femnist"
    text = (tmp_path / "run" / "settings.toml").read_text()
    assert "[dataset_options]\nwriters = 4\nkeep = 1\nmean = [0.5]\nstd = [-0.5]\n" in text
    again = fedcat.run(settings=tmp_path / "run" / "settings.toml")
    assert again.federation.hash == result.federation.hash
    assert again.accuracies == result.accuracies
    free = fedcat.run(dataset="femnist", dataset_options=options, partition="dirichlet", clients=3, **words)
    assert (free.settings.clients, free.settings.partition) == (3, "dirichlet")


def test_what_has_no_effect_on_writers_is_refused(small):
    words = {"dataset": "femnist", "data_dir": small, "dataset_options": {"writers": 4, "keep": 1}}
    for given in ({"alpha": 0.1}, {"alpha": 0.1, "preset": "lab"}):
        with pytest.raises(SettingError, match="alpha has no effect on 'femnist', whose clients are the owners"):
            fedcat.run(**words, **given)
    with pytest.raises(SettingError, match=r"clients must be 4, the number of owners in 'femnist'.* got 9"):
        fedcat.run(**words, clients=9)
    with pytest.raises(SettingError, match=r"min_samples must be at most 19, the samples of the largest owner"):
        fedcat.run(**words, min_samples=100)


def test_seeds_of_a_comparison_choose_writers_of_their_own_unless_data_seed_is_given(small):
    words = {"dataset": "femnist", "data_dir": small, "rounds": 1, "epochs": 1, "fraction": 0.5}
    words["dataset_options"] = {"writers": 4, "keep": 1}
    [line] = fedcat.compare(["fedavg"], seeds=4, **words)
    assert len({result.federation.hash for result in line.results}) > 1
    [line] = fedcat.compare(["fedavg"], seeds=4, data_seed=5, **words)
    assert len({result.federation.hash for result in line.results}) == 1


def test_load_dataset(small):
    data = fedcat.load_dataset("cifar100", data_dir=small, labels="fine")
    assert data.classes == 100
    assert data.divide(6, "iid").sizes.tolist() == [20] * 6
    with pytest.raises(SettingError, match="unknown option of cifar100 'label': did you mean 'labels'"):
        fedcat.load_dataset("cifar100", data_dir=small, label="fine")


# the official files

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def counts(pool):
    return np.bincount(pool.y.numpy()).tolist()


@pytest.mark.parametrize(
    ("name", "options", "train", "test"),
    [
        ("mnist", {}, MNIST_TRAIN, MNIST_TEST),
        ("cifar10", {}, [5000] * 10, [1000] * 10),
        ("cifar100", {}, [2500] * 20, [500] * 20),
        ("cifar100", {"labels": "fine"}, [500] * 100, [100] * 100),
    ],
)
def test_official_files_have_the_published_counts(real_data, name, options, train, test, monkeypatch, record_property):
    folder = real_data(name)
    data = fedcat.load_dataset(name, data_dir=folder, **options)
    assert counts(data.train) == train
    assert counts(data.test) == test
    began = time.perf_counter()
    again = fedcat.load_dataset(name, data_dir=folder, **options)
    record_property("second_load_seconds", time.perf_counter() - began)
    assert torch.equal(again.train.x, data.train.x)


def test_official_femnist(real_data):
    data = fedcat.load_dataset("femnist", data_dir=real_data("femnist"))
    assert (len(data.owner_names), len(data.train), len(data.test)) == (180, 26_193, 3_003)
    fed = data.divide()
    assert fed.clients == 180
    assert (np.array(fed.sizes) >= 80).all()
    assert data.train.x.float().mean() > 200  # white paper
    digits = float((data.train.y < 10).float().mean())
    assert 0.70 < digits < 0.72


def test_the_coarse_label_of_a_fine_class_is_the_published_one(real_data):
    folder = real_data("cifar100")
    coarse = fedcat.load_dataset("cifar100", data_dir=folder)
    fine = fedcat.load_dataset("cifar100", data_dir=folder, labels="fine")
    pairs = set(zip(fine.test.y.tolist(), coarse.test.y.tolist(), strict=True))
    assert len(pairs) == 100
    named = {(fine.class_names[f], coarse.class_names[c]) for f, c in pairs}
    assert {
        ("apple", "fruit and vegetables"),
        ("aquarium_fish", "fish"),
        ("beaver", "aquatic mammals"),
        ("bee", "insects"),
        ("bus", "vehicles 1"),
        ("oak_tree", "trees"),
        ("rocket", "vehicles 2"),
        ("woman", "people"),
        ("worm", "non-insect invertebrates"),
    } <= named


def shakespeare_files(tmp_path, **changes):
    """Write LEAF's files of Shakespeare for three roles with 6, 7 and 8 training and 2 test samples."""
    rng = np.random.default_rng(0)
    letters = np.array(list(LETTERS))

    def samples(count):
        return {"x": ["".join(rng.choice(letters, 80)) for _ in range(count)], "y": list(rng.choice(letters, count))}

    users = ["HAMLET", "OPHELIA", "YORICK"]
    made = {"train": {u: samples(6 + n) for n, u in enumerate(users)}, "test": {u: samples(2) for u in users}}
    made["train"].update(changes)
    for part, data in made.items():
        (tmp_path / "shakespeare" / part).mkdir(parents=True, exist_ok=True)
        content = {"users": users, "num_samples": [len(data[u]["y"]) for u in users], "user_data": data}
        (tmp_path / "shakespeare" / part / "all_data.json").write_text(json.dumps(content))
    return made


def test_shakespeare_is_lines_of_characters_and_each_role_is_a_client(tmp_path):
    made = shakespeare_files(tmp_path)
    data = shakespeare(data_dir=str(tmp_path), keep=1)
    assert (data.classes, data.train.shape, len(data.train), len(data.test)) == (80, (80,), 21, 6)
    assert data.owner_names == ("HAMLET", "OPHELIA", "YORICK")
    first = data.train.inputs(torch.tensor([0]), torch.float32)
    assert first.dtype == torch.int64
    assert "".join(LETTERS[i] for i in first[0]) == made["train"]["HAMLET"]["x"][0]
    assert LETTERS[int(data.train.y[0])] == made["train"]["HAMLET"]["y"][0]
    assert data.test_owner.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.class_names[0] == "\\n"
    few = shakespeare(data_dir=str(tmp_path), keep=1, roles=2, seed=1)
    assert len(few.owner_names) == 2
    words = {"dataset": "shakespeare", "dataset_options": {"keep": 1}, "data_dir": str(tmp_path)}
    result = fedcat.run(method="fedavg", rounds=1, epochs=1, per_round=2, **words)
    assert result.settings.net == "char-lstm"
    assert set(result.summary.client_test["accuracy"]) == {"mean", "weighted_mean", "worst_decile", "std"}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"x": ["a" * 79], "y": ["b"]}, "HAMLET must have one character in y for each line of 80 characters"),
        ({"x": ["a" * 80], "y": ["é"]}, "HAMLET must have x, lines of 80 of LEAF's 80 characters"),
        ({"x": ["a" * 80, "b"], "y": ["b", "c"]}, "HAMLET must have x, lines of 80"),
        ({"y": ["b"]}, "HAMLET must have x"),
        ({"x": ["a" * 80], "y": []}, "HAMLET must have one character in y"),
    ],
)
def test_lines_that_are_not_leafs_are_refused(tmp_path, samples, message):
    shakespeare_files(tmp_path, HAMLET={"y": [], **samples})
    with pytest.raises(DataError, match=message):
        shakespeare(data_dir=str(tmp_path), keep=1)


def test_shakespeare_without_files_says_how_to_make_them(tmp_path):
    with pytest.raises(DataError, match=r"LEAF publishes the scripts .*preprocess.sh makes into"):
        shakespeare(data_dir=str(tmp_path))


def test_femnists_test_samples_have_owners(small):
    data = femnist(data_dir=small, writers=3, keep=1)
    assert data.test_owner.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.divide().client_test.owner.tolist() == data.test_owner.tolist()
