import pickle

import numpy as np
import pytest
from small_data import cifar_records, idx, leaf_files, pickled_cifar, tff_files, writers

from fedcat.core.errors import DataError
from fedcat.data.files.formats import (
    leaf_writer,
    read_cifar,
    read_idx,
    read_leaf,
    read_pickled_cifar,
    read_tff,
)


def test_idx_by_hand():
    content = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3, 1, 2, 3, 4, 5, 255])
    assert read_idx(content, "a", 3).tolist() == [[[1, 2, 3]], [[4, 5, 255]]]
    assert read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "a", 1).tolist() == [7, 9]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it begins with nothing"),
        (b"PNG!", "it begins with 50 4e 47 21"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]), "not an idx file of bytes with 1 dimensions"),
        (bytes([0, 0, 8, 3, 0, 0, 0, 1]), "not an idx file of bytes with 1 dimensions"),
        (bytes([0, 0, 8, 1, 0, 0]), "not an idx file"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]), "must hold 3 bytes of data by its header, got 2"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 1, 1, 2]), "must hold 1 bytes of data by its header, got 2"),
        (bytes([0, 0, 8, 1, 255, 255, 255, 255, 1]), "must hold 4,294,967,295 bytes"),
    ],
)
def test_what_is_no_idx_file_is_said(content, message):
    with pytest.raises(DataError, match=message):
        read_idx(content, "file", 1)


def test_a_huge_head_does_not_overflow():
    with pytest.raises(DataError, match="must hold 79,228,162,458,924,105,385,300,197,375 bytes"):
        read_idx(bytes([0, 0, 8, 3]) + b"\xff" * 12, "file", 3)


def test_cifar_by_hand():
    planes = [bytes([c]) * 1024 for c in (10, 20, 30)]
    images, labels = read_cifar(bytes([19, 99]) + b"".join(planes) + bytes([3, 4]) + b"".join(planes), "a", (20, 100))
    assert labels.tolist() == [[19, 99], [3, 4]]
    assert images.shape == (2, 3, 32, 32)
    assert images[0, :, 5, 5].tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "records of 3,073 bytes .* got 0 bytes"),
        (b"\0" * 3072, "records of 3,073 bytes .* got 3,072 bytes"),
        (b"\x0a" + b"\0" * 3072, "labels below 10, got 10"),
    ],
)
def test_what_is_no_cifar_file_is_said(content, message):
    with pytest.raises(DataError, match=message):
        read_cifar(content, "file", (10,))


@pytest.mark.parametrize("classes", [(10,), (20, 100)])
def test_the_python_version_gives_what_the_binary_version_gives(classes):
    records = cifar_records(300, classes)
    keys = ("labels",) if len(classes) == 1 else ("coarse_labels", "fine_labels")
    pickled = pickled_cifar(records, classes)
    assert pickled.startswith(b"\x80\x02}q\x00(U\x0bbatch_label")
    for ours, theirs in zip(read_pickled_cifar(pickled, "p", keys), read_cifar(records, "b", classes), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_pickle_is_never_executed(tmp_path):
    trap = tmp_path / "trap"

    class Evil:
        def __reduce__(self):
            return open, (str(trap), "w")

    with pytest.raises(DataError, match="not in CIFAR's Python format"):
        read_pickled_cifar(pickle.dumps({"labels": [1], "data": Evil()}, protocol=2), "file", ("labels",))
    assert not trap.exists()


@pytest.mark.parametrize("cut", [0, 1, 5, 400, -1])
def test_a_cut_or_foreign_pickle_is_said(cut):
    content = pickled_cifar(cifar_records(3, (10,)), (10,))
    with pytest.raises(DataError, match="file is not in CIFAR's Python format"):
        read_pickled_cifar(content[:cut], "file", ("labels",))
    with pytest.raises(DataError, match="lacks images or one of fine_labels"):
        read_pickled_cifar(content, "file", ("fine_labels",))


def test_leaf_gives_back_the_bytes():
    parts = writers()
    files = leaf_files(parts)
    found = read_leaf(files["test/all_data_0_keep_0_test_9.json"], "a", leaf_writer)
    assert [writer.name for writer in found] == list(parts["test"])
    for writer in found:
        x, y = parts["test"][writer.name]
        assert np.array_equal(writer.x.reshape(-1, 784), x)
        assert np.array_equal(writer.y, y)


GOOD = leaf_files(writers(2))["test/all_data_0_keep_0_test_9.json"].decode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[: len(GOOD) // 2], "is truncated or not JSON"),
        ("", "is truncated or not JSON"),
        (b"\xff\xfe\x00".decode("latin-1"), "not JSON"),
        ("[1, 2]", "not a LEAF file"),
        ('{"users": []}', "not a LEAF file"),
        (GOOD.replace('"users": ["f0000_00", ', '"users": ["f0000_0x", '), "user_data for exactly the users it lists"),
        (GOOD.replace('"num_samples": [3, 3]', '"num_samples": [3, 4]'), "as many samples per user as num_samples"),
        (GOOD.replace('"x"', '"z"', 1), "writer f0000_00 must have x"),
        (GOOD.replace('"x": [[', '"x": [[0.5, ', 1), "writer f0000_00 must have x, rows of 784 pixels"),
        (GOOD.replace('"y": [', '"y": [62, ', 1), "writer f0000_00 must have one class label below 62"),
        (GOOD.replace("0.", "1.", 1), "256 gray levels from 0 to 1: the file is damaged"),
        (GOOD.replace("0.", "0.1234", 1), "256 gray levels"),
        (GOOD.replace("0.", "-0.", 1), "256 gray levels"),
        (GOOD.replace('"y": [', '"y": ["a", ', 1), "one class label below 62"),
    ],
)
def test_what_is_no_leaf_file_is_said(content, message):
    with pytest.raises(DataError, match=f"file.*{message}"):
        read_leaf(content.encode("latin-1"), "file", leaf_writer)


def test_tff_gives_back_the_bytes(tmp_path):
    pytest.importorskip("h5py")
    parts = writers(3)
    path = tmp_path / "a.h5"
    path.write_bytes(tff_files(parts)["fed_emnist_train.h5"])
    for writer in read_tff(path):
        x, y = parts["train"][writer.name]
        assert np.array_equal(writer.x.reshape(-1, 784), x)
        assert np.array_equal(writer.y, y)


def test_what_is_no_tff_file_is_said(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5"
    path.write_bytes(tff_files(writers(2))["fed_emnist_train.h5"][:3000])
    with pytest.raises(DataError, match=r"a.h5 is not an HDF5 file of FEMNIST"):
        list(read_tff(path))
    path.write_bytes(b"not at all")
    with pytest.raises(DataError, match=r"a.h5 is not an HDF5 file of FEMNIST"):
        list(read_tff(path))
    with h5py.File(path, "w") as file:
        file["other"] = [1]
    with pytest.raises(DataError, match=r"a.h5 is not an HDF5 file of FEMNIST"):
        list(read_tff(path))
    with h5py.File(path, "w") as file:
        file["examples/w/pixels"] = np.full((2, 28, 28), 3.0)
        file["examples/w/label"] = [1, 2]
    with pytest.raises(DataError, match=r"writer w must have pixels from 0 to 1"):
        list(read_tff(path))


def test_idx_writer_of_the_tests_is_right():
    assert idx(np.array([[1, 2]], dtype=np.uint8)) == bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 2, 1, 2])
