import io
import math
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

import fedcat
from fedcat.core.errors import DataError, SettingError
from fedcat.data.files import formats

RNG = np.random.default_rng(3)
X = RNG.normal(size=(60, 5)).astype(np.float32)
Y = np.arange(60) % 3
OWNERS = np.array(["ann", "bob", "cid"])[np.arange(60) % 7 % 3]


class Listed(TorchDataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


# arrays


def test_owners_become_the_clients():
    data = fedcat.Dataset.from_arrays(X, Y, (X[:6], Y[:6]), owner=OWNERS)
    fed = data.divide()
    assert (fed.clients, fed.client_names) == (3, ("ann", "bob", "cid"))
    for client, name in enumerate(fed.client_names):
        assert np.array_equal(fed.train.x[fed.indices(client)], X[name == OWNERS])
    assert data.divide(5, "iid").clients == 5
    numbered = fedcat.Dataset.from_arrays(X, Y, (X, Y), owner=torch.from_numpy(np.arange(60) % 4 * 10))
    assert numbered.owner_names == ("0", "10", "20", "30")


def test_a_drawn_test_set_takes_its_share_of_every_owner_and_leaves_each_a_sample():
    owner = np.repeat([0, 1, 2, 3], [40, 10, 9, 1])
    marks = np.arange(60, dtype=np.float64)[:, None]
    data = fedcat.Dataset.from_arrays(marks, Y, owner=owner, test_fraction=0.2, seed=5)
    assert np.bincount(data.owner).tolist() == [32, 8, 7, 1]
    train, test = data.train.x.flatten().tolist(), data.test.x.flatten().tolist()
    assert sorted(train + test) == list(range(60))
    assert np.array_equal(owner[np.array(train, dtype=int)], data.owner)
    again = fedcat.Dataset.from_arrays(marks, Y, owner=owner, seed=5)
    other = fedcat.Dataset.from_arrays(marks, Y, owner=owner, seed=6)
    assert torch.equal(data.test.x, again.test.x)
    assert not torch.equal(data.test.x, other.test.x)


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        ([1, 2], r"owner must hold one integer or string for each of the 60 samples, got shape \(2,\)"),
        (np.arange(60) / 2, "owner must hold one integer or string for each .* of float64"),
        ([None] * 60, "owner must hold one integer or string for each .* of object"),
    ],
)
def test_owners_that_are_none_are_refused(owner, message):
    with pytest.raises(SettingError, match=message):
        fedcat.Dataset.from_arrays(X, Y, owner=owner)


def test_owners_who_all_have_one_sample_leave_no_test_set():
    with pytest.raises(SettingError, match="leaves an empty training or test set"):
        fedcat.Dataset.from_arrays(X, Y, owner=np.arange(60))


def test_a_run_on_owners_needs_no_partition():
    net = torch.nn.Linear(5, 3)
    data = fedcat.Dataset.from_arrays(X, Y, owner=OWNERS, name="mine")
    result = fedcat.run(dataset=data, net=net, rounds=3, per_round=2, epochs=1)
    assert (result.settings.partition, result.settings.clients) == ("natural", 3)


# PyTorch datasets


def test_torch_datasets_of_tensors_arrays_and_images():
    by_tensor = fedcat.Dataset.from_torch(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)))
    by_item = fedcat.Dataset.from_torch(Listed([(torch.from_numpy(x), int(y)) for x, y in zip(X, Y, strict=True)]))
    assert torch.equal(by_tensor.train.x, by_item.train.x)
    assert torch.equal(by_tensor.train.y, by_item.train.y)
    assert (len(by_item.train), len(by_item.test)) == (48, 12)
    pixels = RNG.integers(256, size=(8, 4, 6, 3), dtype=np.uint8)
    pictures = Listed([(Image.fromarray(p), i % 2) for i, p in enumerate(pixels)])
    data = fedcat.Dataset.from_torch(pictures, pictures)
    assert data.train.x.dtype == torch.uint8
    assert np.array_equal(data.train.x.numpy(), np.moveaxis(pixels, -1, 1))
    grey = Listed([(Image.fromarray(p[..., 0]), i % 2) for i, p in enumerate(pixels)])
    assert fedcat.Dataset.from_torch(grey).train.shape == (1, 4, 6)


def test_a_column_of_a_torch_dataset_names_the_owners():
    triples = Listed([(x, y, owner) for x, y, owner in zip(X, Y, OWNERS.tolist(), strict=True)])
    for data in (
        fedcat.Dataset.from_torch(triples, owner=2),
        fedcat.Dataset.from_torch(triples, owner=-1),
        fedcat.Dataset.from_torch(triples, owner=OWNERS),
    ):
        assert data.owner_names == ("ann", "bob", "cid")
        assert data.divide().clients == 3
    tensors = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y), torch.arange(60) % 2)
    assert fedcat.Dataset.from_torch(tensors, owner=2).owner_names == ("0", "1")


@pytest.mark.parametrize(
    ("dataset", "words", "message"),
    [
        (5, {}, "train must be a torch Dataset that has a length"),
        (Listed([1, 2]), {}, r"and items \(input, target\)"),
        (Listed([(np.zeros(2), 1)] * 3), {"owner": 2}, "with the owner at position 2"),
        (Listed([(np.zeros(2), 0), (np.zeros(3), 1)]), {}, r"inputs of one shape, got \(2,\) and \(3,\)"),
        (Listed([]), {}, "train must hold at least one sample, got none"),
        (Listed([(np.zeros(2), "cat"), (np.zeros(2), "dog")]), {}, "y must hold numbers, got an array of <U3"),
    ],
)
def test_what_is_no_torch_dataset_is_said(dataset, words, message):
    with pytest.raises(SettingError, match=message):
        fedcat.Dataset.from_torch(dataset, **words)


def test_what_a_subclass_does_to_its_items_counts():
    class Sevens(TensorDataset):
        def __getitem__(self, index):
            return torch.full((5,), 7.0), self.tensors[1][index]

    data = fedcat.Dataset.from_torch(Sevens(torch.from_numpy(X), torch.from_numpy(Y)))
    assert data.train.x.unique().tolist() == [7.0]


# files of arrays


def test_npz_with_and_without_a_test_set_and_owners(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=X, y=Y)
    data = fedcat.load_dataset("npz", path=str(path))
    assert (data.name, len(data.train), len(data.test)) == ("mine", 48, 12)
    np.savez(path, x=X, y=Y, x_test=X[:7], y_test=Y[:7], owner=OWNERS)
    data = fedcat.load_dataset("npz", path=str(path))
    assert (len(data.train), len(data.test), data.owner_names) == (60, 7, ("ann", "bob", "cid"))
    np.savez(path, x=np.full((4, 1, 2, 2), 255, dtype=np.uint8), y=[0, 1, 0, 1])
    data = fedcat.load_dataset("npz", path=str(path), mean=(0.5,), std=(0.5,))
    assert data.train.inputs(slice(None), torch.float32).unique().tolist() == [1.0]


@pytest.mark.parametrize("kind", ["text", "keys", "half", "objects", "missing", "npy"])
def test_what_is_no_npz_is_said(tmp_path, kind):
    path = tmp_path / "mine.npz"
    if kind == "text":
        path.write_text("x,y\n1,2\n")
    elif kind == "keys":
        np.savez(path, a=X)
    elif kind == "half":
        np.savez(path, x=X, y=Y, x_test=X)
    elif kind == "objects":
        np.savez(path, x=np.array([{}, {}]), y=[0, 1])
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, X)
    with pytest.raises(
        DataError,
        match=r"mine\.npz (must hold x and y|cannot be read as an \.npz file|does not exist|is not an \.npz file)",
    ):
        fedcat.load_dataset("npz", path=str(path))


def npz_of_zeros(path, shape, method=zipfile.ZIP_DEFLATED):
    """Write an .npz file whose x holds zeros, without having them in memory."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", method, compresslevel=9) as archive:
        with archive.open("x.npy", "w") as member:
            member.write(header.getvalue())
            for _ in range(math.prod(shape) >> 20):
                member.write(bytes(1 << 20))
        labels = io.BytesIO()
        np.save(labels, np.arange(shape[0]) % 2)
        archive.writestr("y.npy", labels.getvalue())


def test_a_small_npz_that_would_fill_the_memory_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "SMALL", 1 << 23)
    path = tmp_path / "mine.npz"
    npz_of_zeros(path, (32, 1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=r"mine.npz has [\d,]+ bytes and would take 33,\d+,\d+ in memory, .*: store it uncompressed"
        ):
            fedcat.load_dataset("npz", path=path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    npz_of_zeros(path, (32, 1 << 20), zipfile.ZIP_STORED)
    assert len(fedcat.load_dataset("npz", path=path).train) == 25
    npz_of_zeros(path, (4, 1 << 20))
    assert len(fedcat.load_dataset("npz", path=path).train) == 3


def test_an_npz_of_other_compression_or_with_a_false_header_is_refused(tmp_path):
    path = tmp_path / "mine.npz"
    npz_of_zeros(path, (4, 1 << 20), zipfile.ZIP_BZIP2)
    with pytest.raises(DataError, match=r"mine.npz must be written by numpy.savez or .*, got another compression"):
        fedcat.load_dataset("npz", path=path)
    for rows in (1 << 34, 1 << 60):  # only the second is more than any machine would promise
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (rows,)})
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", header.getvalue() + bytes(100))
            archive.writestr("y.npy", header.getvalue() + bytes(100))
        with pytest.raises(DataError, match=r"mine.npz cannot be read as an .npz file") as told:
            fedcat.load_dataset("npz", path=path)
        assert "\n" not in str(told.value)


def test_names_from_files_cannot_steer_a_terminal(tmp_path):
    red, escaped = "\x1b[31m", r"\x1b[31m"
    for name in (f"{red}cat", "dog\u202e", "été \N{CAT FACE}"):
        for i in range(3):
            picture(tmp_path / f"{red}photos" / name / f"{i}.png", i)
    data = fedcat.Dataset.from_folder(tmp_path / f"{red}photos")
    assert data.name == f"{escaped}photos"
    assert data.class_names == (f"{escaped}cat", r"dog\u202e", "été \N{CAT FACE}")
    path = tmp_path / f"{red}.npz"
    np.savez(path, x=X, y=Y, owner=np.array([red, escaped, "a\x9b\n"])[np.arange(60) % 3])
    data = fedcat.load_dataset("npz", path=path)
    assert (data.name, data.owner_names) == (escaped, (escaped, escaped, r"a\x9b\n"))
    items = Listed([(x, y, red) for x, y in zip(X, Y, strict=True)])
    assert fedcat.Dataset.from_torch(items, owner=2).owner_names == (escaped,)
    np.savez(path, x=X, y=Y, **{red: X})
    for file in (path, path.with_name(f"{red}text")):
        with pytest.raises(DataError) as told:
            fedcat.load_dataset("npz", path=file)
        assert str(told.value).isprintable()
    (tmp_path / f"{red}photos" / f"{red}cat" / f"{red}.png").write_bytes(b"PNG?")
    with pytest.raises(DataError, match=r"cat/\\x1b\[31m.png cannot be read as an image") as told:
        fedcat.Dataset.from_folder(tmp_path / f"{red}photos")
    assert str(told.value).isprintable()


def test_small_images_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "SMALL", 1 << 20)
    for name in ("a", "b"):
        for i in range(3):
            picture(tmp_path / name / f"{i}.png", 7, size=(512, 512))
    with pytest.raises(DataError, match=r"has [\d,]+ bytes and would take [1-4],\d+,\d+ in memory"):
        fedcat.Dataset.from_folder(tmp_path)
    assert fedcat.Dataset.from_folder(tmp_path, size=8).train.shape == (3, 8, 8)


def test_keys_and_labels_that_are_probably_mistakes_are_said(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=X, y=Y, owners=OWNERS)
    with pytest.raises(DataError, match=r"mine.npz must hold x and y, .* got owners, x, y"):
        fedcat.load_dataset("npz", path=path)
    np.savez(path, x=X, y=Y + 1)
    with pytest.raises(DataError, match=r"mine.npz: y must hold class labels from 0, got none below 1: count from 0"):
        fedcat.load_dataset("npz", path=path)
    assert fedcat.load_dataset("npz", path=path, classes=4).classes == 4
    np.savez(path, x=X, y=Y, x_test=X, y_test=Y + 3)
    with pytest.raises(DataError, match=r"test labels must be among the training classes 0 to 2, got 5"):
        fedcat.load_dataset("npz", path=path)
    assert fedcat.load_dataset("npz", path=path, classes=6).classes == 6


def test_a_class_that_the_split_puts_into_the_test_set_alone_still_counts():
    for seed in range(6):
        assert fedcat.Dataset.from_arrays(X[:6], np.arange(6), seed=seed).classes == 6


def test_a_dataset_tells_what_it_is_in_a_line():
    data = fedcat.Dataset.from_arrays(X, Y, owner=OWNERS, name="mine")
    assert repr(data) == "<Dataset mine: 49 training and 11 test samples of shape (5,), 3 classes, 3 owners>"


# folders of images


def picture(path, value, size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), value, dtype=np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path):
    base = tmp_path / "photos"
    for number, name in enumerate(("cat", "dog")):
        for i in range(10):
            picture(base / name / f"{i}.png", 100 * number + i)
    (base / "cat" / "notes.txt").write_text("no image")
    return base


def test_a_folder_is_split_by_seed(photos):
    data = fedcat.Dataset.from_folder(photos, test_fraction=0.25)
    assert (data.name, data.class_names, data.classes) == ("photos", ("cat", "dog"), 2)
    assert data.train.x.dtype == torch.uint8
    assert (data.train.shape, len(data.train), len(data.test)) == ((3, 4, 6), 15, 5)
    levels = torch.cat([data.train.x, data.test.x])[:, 0, 0, 0].tolist()
    assert sorted(levels) == [*range(10), *range(100, 110)]
    assert all((level >= 100) == label for level, label in zip(data.train.x[:, 0, 0, 0], data.train.y, strict=True))
    assert not torch.equal(data.test.x, fedcat.Dataset.from_folder(photos, test_fraction=0.25, split_seed=1).test.x)


def test_a_folder_may_state_its_split(photos, tmp_path):
    base = tmp_path / "stated"
    for part, count in (("train", 4), ("test", 2)):
        for name in ("a", "b"):
            for i in range(count):
                picture(base / part / name / "deeper" / f"{i}.jpg", i)
    data = fedcat.Dataset.from_folder(base, color=False, size=8)
    assert (len(data.train), len(data.test), data.train.shape) == (8, 4, (1, 8, 8))
    picture(base / "test" / "c" / "0.png", 1)
    with pytest.raises(DataError, match="must hold only classes that occur in training, got 'c'"):
        fedcat.Dataset.from_folder(base)


def test_a_table_names_the_owners_of_images(photos):
    table = photos.parent / "owners.csv"
    rows = [f"{name}/{i}.png,{'ann' if i < 5 else 'bob'}" for name in ("cat", "dog") for i in range(10)]
    table.write_text("file,owner\n" + "\n".join(rows) + "\n")
    fed = fedcat.Dataset.from_folder(photos, owners=table).divide()
    assert fed.client_names == ("ann", "bob")
    assert fed.sizes.tolist() == [8, 8]
    assert (fed.train.x[fed.indices(0)][:, 0, 0, 0] % 100 < 5).all()
    table.write_text("file,owner\n" + "\n".join(rows[1:]) + "\n")
    with pytest.raises(DataError, match=r"owners.csv must list the owner of every training image, got none for cat.0"):
        fedcat.Dataset.from_folder(photos, owners=table)
    table.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="must be a CSV file with columns file and owner"):
        fedcat.Dataset.from_folder(photos, owners=table)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        fedcat.Dataset.from_folder(photos, owners="nowhere.csv")
    table.write_text("\ufefffile,owner\n" + "\n".join(rows) + "\n", encoding="utf-8")  # as spreadsheets write it
    assert fedcat.Dataset.from_folder(photos, owners=table).owner_names == ("ann", "bob")
    table.write_text("file,owner\n" + "\n".join([*rows, "cat/./0.png,eve"]) + "\n")
    with pytest.raises(DataError, match=r"must list each file once, got cat.0.png twice"):
        fedcat.Dataset.from_folder(photos, owners=table)


def test_links_to_one_image_keep_their_own_owners(tmp_path):
    picture(tmp_path / "store" / "blob.png", 9)
    lines = ["file,owner"]
    for number, name in enumerate(("a", "b", "a", "b", "a", "b")):
        link = tmp_path / "photos" / name / f"{number}.png"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tmp_path / "store" / "blob.png")
        lines.append(f"{name}/{number}.png,u{number % 3}")
    (tmp_path / "owners.csv").write_text("\n".join(lines))
    fed = fedcat.Dataset.from_folder(tmp_path / "photos", owners=tmp_path / "owners.csv", test_fraction=0.5).divide()
    assert fed.sizes.tolist() == [1, 1, 1]


def test_pixels_that_would_be_clipped_are_refused(photos):
    Image.fromarray(np.full((4, 6), 3000, dtype=np.uint16)).save(photos / "cat" / "deep.png")
    with pytest.raises(DataError, match=r"deep.png has pixel mode I(;16)?: convert it to 8 bits per channel first"):
        fedcat.Dataset.from_folder(photos)
    with pytest.raises(SettingError, match=r"folder.size must be at least 0, got -5"):
        fedcat.Dataset.from_folder(photos, size=-5)


def test_bytes_to_train_and_fractions_to_test_are_refused():
    data = fedcat.Dataset.from_arrays(np.zeros((6, 2), dtype=np.uint8), [0, 1] * 3, (np.zeros((2, 2)), [0, 1]))
    with pytest.raises(SettingError, match="test inputs must be bytes, as in training, got floating-point numbers"):
        data.divide(2, "iid")


def test_what_is_no_folder_of_images_is_said(photos, tmp_path):
    with pytest.raises(DataError, match=r"folder\.path must be a directory"):
        fedcat.Dataset.from_folder(tmp_path / "nowhere")
    picture(photos / "dog" / "large.png", 1, size=(9, 9))
    with pytest.raises(DataError, match=r"large.png has 9 x 9 pixels, .*0.png has 6 x 4: scale them .* -d size=32"):
        fedcat.Dataset.from_folder(photos)
    (photos / "dog" / "broken.png").write_bytes(b"PNG?")
    with pytest.raises(DataError, match=r"broken.png cannot be read as an image"):
        fedcat.Dataset.from_folder(photos, size=8)
    (photos / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty must hold images \(.png"):
        fedcat.Dataset.from_folder(photos, size=8)
    (photos / "train").mkdir()
    with pytest.raises(DataError, match="holds train but not test: provide both or neither"):
        fedcat.Dataset.from_folder(photos)
    (tmp_path / "one" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="one directory per class for at least two classes, got 1"):
        fedcat.Dataset.from_folder(tmp_path / "one")


def test_a_folder_runs_by_its_name(photos):
    options = {"path": str(photos), "size": 32}
    words = {"clients": 3, "min_samples": 1, "rounds": 2, "epochs": 1, "alpha": 5.0}
    result = fedcat.run(dataset="folder", dataset_options=options, net="lab-cifar", **words)
    assert result.federation.name == "photos"
    assert result.settings.dataset_options["size"] == 32
