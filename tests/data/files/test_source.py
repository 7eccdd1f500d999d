import gzip
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from http_server import serve
from small_data import (
    cifar_files,
    cifar_source,
    femnist_source,
    leaf_files,
    mnist_files,
    mnist_source,
    pickled_cifar,
    tar,
    tff_files,
    write,
    writers,
)

from fedcat.core.errors import DataError
from fedcat.data.files import cache, download, formats, locations


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)


def copies(cache):
    return sorted(path.name for path in (cache / "prepared").glob("*")) if (cache / "prepared").exists() else []


def state(folder):
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


# where files are found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", ""])
def test_mnist_is_found_packed_or_not_under_its_names(tmp_path, folder, packed):
    files = mnist_files()
    write(tmp_path / folder, files, packed=packed)
    arrays = mnist_source(files).content(tmp_path).arrays
    assert arrays["train_x"].shape == (120, 1, 28, 28)
    assert arrays["test_y"].tolist() == [i % 10 for i in range(30)]
    assert arrays["train_x"].tobytes() == files["train-images-idx3-ubyte"][16:]


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-bin"), ("cifar100", "cifar-100-binary")])
def test_cifar_is_found_in_every_form_with_the_same_content(tmp_path, name, folder):
    files = cifar_files(name)
    source = cifar_source(name, files)
    classes = (10,) if name == "cifar10" else (20, 100)
    python = {file.removesuffix(".bin"): pickled_cifar(content, classes) for file, content in files.items()}
    layouts = {
        folder: files,
        f"{name}/{folder}": files,
        "": {f"{'cifar-10' if name == 'cifar10' else 'cifar-100'}-binary.tar.gz": tar(files, folder)},
        "cifar-10-batches-py" if name == "cifar10" else "cifar-100-python": python,
    }
    found = []
    for number, (under, content) in enumerate(layouts.items()):
        write(tmp_path / str(number) / under, content)
        found.append(source.content(tmp_path / str(number)).arrays)
    assert found[0]["train_x"].shape == (120, 3, 32, 32)
    assert found[0]["train_y"].shape == (120, len(classes))
    for arrays in found[1:]:
        assert arrays.keys() == found[0].keys()
        assert all(np.array_equal(arrays[key], found[0][key]) for key in arrays)


def test_femnist_is_found_in_every_form_with_the_same_content(tmp_path):
    pytest.importorskip("h5py")
    parts = writers()
    archive = tar(tff_files(parts), "", "bz2")
    source = femnist_source(archive)
    layouts = [
        ("femnist/data", leaf_files(parts)),
        ("fed_emnist", tff_files(parts)),
        ("", {"fed_emnist.tar.bz2": archive}),
    ]
    found = []
    for number, (under, content) in enumerate(layouts):
        write(tmp_path / str(number) / under, content)
        found.append(source.content(tmp_path / str(number)))
    assert found[0].words["writers"] == sorted(parts["train"])
    assert found[0].arrays["train_sizes"].tolist() == [12, 13, 14, 15, 16, 17]
    assert found[0].arrays["train_x"].shape == (87, 1, 28, 28)
    first = parts["train"]["f0000_00"]
    assert np.array_equal(found[0].arrays["train_x"][:12].reshape(12, 784), first[0])
    for content in found[1:]:
        assert content.words == found[0].words
        assert all(np.array_equal(content.arrays[key], found[0].arrays[key]) for key in content.arrays)


def test_places_are_looked_at_in_their_order(tmp_path, own_cache, monkeypatch):
    named, variable = tmp_path / "named", tmp_path / "variable"
    for folder in (named, variable):
        folder.mkdir()
    monkeypatch.setenv("FEDCAT_DATA", str(variable))
    assert locations.search_paths(named) == [named, variable, own_cache]
    assert locations.search_paths() == [variable, own_cache]
    files = mnist_files()
    source = mnist_source(files)
    for place in (own_cache, variable, named):
        write(place / "mnist", files)
        assert all(path.is_relative_to(place) for path in source.find(named)[1].values())
    monkeypatch.delenv("FEDCAT_DATA")
    assert all(path.is_relative_to(own_cache) for path in source.find()[1].values())


def test_a_place_that_is_named_must_be_there(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"data_dir must be an existing directory, got '.*nowhere'"):
        locations.search_paths(tmp_path / "nowhere")
    monkeypatch.setenv("FEDCAT_DATA", str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"FEDCAT_DATA must be an existing directory, got '.*nothing'"):
        locations.search_paths()


def test_the_cache_folder_is_the_systems(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert locations.cache_dir() == tmp_path / ".cache" / "fedcat"
    monkeypatch.setattr("sys.platform", "darwin")
    assert locations.cache_dir() == tmp_path / "Library" / "Caches" / "fedcat"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert locations.cache_dir() == tmp_path / "Local" / "fedcat"


# downloads


def test_what_is_absent_is_downloaded_to_the_cache(own_cache):
    files = mnist_files()
    packed = {path.name: path.read_bytes() for path in write(own_cache / "made", files, packed=True).iterdir()}
    shutil.rmtree(own_cache)
    with serve(packed) as served:
        source = mnist_source(files, served.address)
        first = source.content().arrays
        assert sorted(path.name for path in (own_cache / "mnist").iterdir()) == sorted(packed)
        assert len(served.asked) == 4
        (own_cache / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
        again = source.content().arrays
        assert len(served.asked) == 5
    assert all(np.array_equal(first[key], again[key]) for key in first)


def test_a_download_goes_to_the_folder_that_was_named(tmp_path, own_cache):
    files = cifar_files("cifar10")
    with serve({"cifar-10-binary.tar.gz": tar(files, "cifar-10-batches-bin")}) as served:
        assert len(cifar_source("cifar10", files, served.address).content(tmp_path).arrays["train_y"]) == 120
    assert (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").exists()
    assert not (own_cache / "cifar10").exists()


@pytest.mark.parametrize("fault", ["wrong", "cut", "error", "missing"])
def test_a_failed_download_leaves_no_file_and_says_what_to_do(own_cache, fault):
    files = cifar_files("cifar100")
    archive = tar(files, "cifar-100-binary")
    served_files = {"cifar-100-binary.tar.gz": archive[:-1] + b"x"} if fault == "wrong" else {}
    if fault in ("cut", "error"):
        served_files = {"cifar-100-binary.tar.gz": archive}
    with serve(served_files) as served:
        served.cuts = [1000, 0, 0, 0, 0] if fault == "cut" else []
        served.statuses = [502] * 9 if fault == "error" else []
        with pytest.raises(DataError) as told:
            cifar_source("cifar100", files, served.address).content()
    message = str(told.value)
    assert "\n" not in message
    assert message.startswith(f"dataset 'cifar100' is not in {own_cache} and cannot be downloaded (")
    assert "put cifar-100-binary.tar.gz (the binary version, packed or unpacked)" in message
    assert f" into {own_cache / 'cifar100'}" in message
    assert "--data-dir or FEDCAT_DATA" in message
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_what_is_there_in_part_is_said(tmp_path, own_cache, capsys):
    files = mnist_files()
    write(tmp_path / "mnist", files)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        DataError, match=r"dataset 'mnist' is incomplete \(.*mnist lacks t10k-labels-idx1-ubyte\) and cannot"
    ):
        mnist_source(files).content(tmp_path)
    assert "mnist lacks t10k-labels-idx1-ubyte" in capsys.readouterr().err
    leaf = leaf_files(writers(2))
    write(tmp_path / "femnist", {name: content for name, content in leaf.items() if "train" in name})
    with pytest.raises(DataError, match=r"is incomplete \(.*femnist lacks test/\*.json\)"):
        femnist_source(b"").content(tmp_path)
    assert not (own_cache / "femnist").exists()


def test_without_h5py_femnist_is_not_downloaded(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"requires h5py: pip install 'fedcat\[hub\]'"):
        femnist_source(b"").content()


# the prepared copy


def test_the_second_time_the_prepared_copy_is_read(tmp_path, own_cache, monkeypatch, capsys):
    files = mnist_files()
    write(tmp_path, files)
    source = mnist_source(files)
    first = source.content(tmp_path).arrays
    assert capsys.readouterr().err.startswith("decoded mnist in ")
    assert len(copies(own_cache)) == 2
    monkeypatch.setattr(cache, "file_digest", None)  # nothing is hashed again
    monkeypatch.setattr(type(source.layouts[0]), "decode", None)  # nor decoded
    again = source.content(tmp_path).arrays
    assert capsys.readouterr().err == ""
    assert all(np.array_equal(first[key], again[key]) and first[key].dtype == again[key].dtype for key in first)


def test_a_copy_of_the_files_elsewhere_shares_the_prepared_copy(tmp_path, own_cache, monkeypatch):
    files = mnist_files()
    source = mnist_source(files)
    source.content(write(tmp_path / "a", files))
    monkeypatch.setattr(type(source.layouts[0]), "decode", None)
    source.content(write(tmp_path / "b", files))
    assert len(copies(own_cache)) == 2


def test_a_damaged_prepared_copy_is_made_again(tmp_path, own_cache):
    files = mnist_files()
    source = mnist_source(files)
    first = source.content(write(tmp_path, files)).arrays
    [copy] = (own_cache / "prepared").glob("*.safetensors")
    whole = copy.read_bytes()
    for damaged in (whole[:-100], whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:], b"", b"junk" * 100):
        copy.write_bytes(damaged)
        again = source.content(tmp_path).arrays
        assert all(np.array_equal(first[key], again[key]) for key in first)
        assert copy.read_bytes() == whole


def test_a_prepared_copy_with_other_content_or_of_other_files_is_made_again(tmp_path, own_cache):
    source = femnist_source(b"")
    made = {}
    for count in (2, 3):
        folder = write(tmp_path / str(count), leaf_files(writers(count)))
        before = set(copies(own_cache))
        content = source.content(folder)
        [name] = [name for name in set(copies(own_cache)) - before if name.endswith(".safetensors")]
        made[count] = folder, content, own_cache / "prepared" / name
    folder, content, copy = made[2]
    renamed = copy.read_bytes().replace(b"f0000_00", b"f0009_00")
    for planted in (renamed, made[3][2].read_bytes()):
        copy.write_bytes(planted)
        again = source.content(folder)
        assert again.words == content.words
        assert all(np.array_equal(again.arrays[key], content.arrays[key]) for key in content.arrays)


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path, own_cache, monkeypatch, capsys):
    files = mnist_files()
    write(tmp_path, files)
    source = mnist_source(files)
    source.content(tmp_path)
    folder = own_cache / "prepared"
    assert folder.stat().st_mode & 0o777 == 0o700
    before = state(folder)
    capsys.readouterr()
    folder.chmod(0o777)
    monkeypatch.setattr(cache, "_read", None)
    source.content(tmp_path)
    assert capsys.readouterr().err == f"note: mnist is not cached: others can write to {folder}\n"
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    source.content(tmp_path)
    assert f"others can write to {folder}" in capsys.readouterr().err
    assert state(folder) == before


def test_a_damaged_index_is_no_harm(tmp_path, own_cache):
    files = mnist_files()
    source = mnist_source(files)
    source.content(write(tmp_path, files))
    for text in ("", "[]", '{"x": 1}', "\xff"):
        (own_cache / "prepared" / "checksums.json").write_text(text)
        assert len(source.content(tmp_path).arrays) == 4


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, own_cache, capsys):
    files = mnist_files()
    own_cache.parent.mkdir(exist_ok=True)
    own_cache.write_text("a file where the folder would be")
    for _ in range(2):
        assert len(mnist_source(files).content(write(tmp_path, files)).arrays) == 4
        assert "note: mnist is not cached" in capsys.readouterr().err


# damaged files


def damaged(content: bytes, how: str) -> bytes:
    if how == "truncated":
        return content[: len(content) * 2 // 3]
    if how == "flipped":
        middle = len(content) // 2
        if content.startswith(
            b"{"
        ):  # a pixel's second decimal: a flip that makes another level or label goes unnoticed
            middle = content.index(b"0.", middle) + 3
        return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
    return b"<html><body>Not the file you were looking for</body></html>"


def cases(tmp_path):
    """Yield a source, a folder with its files in each form, and one file of them to damage."""
    mnist = mnist_files()
    yield mnist_source(mnist), write(tmp_path / "idx", mnist), "train-images-idx3-ubyte"
    yield mnist_source(mnist), write(tmp_path / "gz", mnist, packed=True), "t10k-labels-idx1-ubyte.gz"
    for name, folder, one in (
        ("cifar10", "cifar-10-batches-bin", "data_batch_3.bin"),
        ("cifar100", "cifar-100-binary", "train.bin"),
    ):
        files = cifar_files(name)
        classes = (10,) if name == "cifar10" else (20, 100)
        source = cifar_source(name, files)
        yield source, write(tmp_path / f"{name}-bin", {f"{folder}/{n}": c for n, c in files.items()}), f"{folder}/{one}"
        packed = f"{'cifar-10' if name == 'cifar10' else 'cifar-100'}-binary.tar.gz"
        yield source, write(tmp_path / f"{name}-tar", {packed: tar(files, folder)}), packed
        python = "cifar-10-batches-py" if name == "cifar10" else "cifar-100-python"
        pickles = {f"{python}/{n.removesuffix('.bin')}": pickled_cifar(c, classes) for n, c in files.items()}
        yield source, write(tmp_path / f"{name}-py", pickles), f"{python}/{one.removesuffix('.bin')}"
    parts = writers()
    leaf = leaf_files(parts)
    yield femnist_source(b""), write(tmp_path / "leaf", leaf), next(iter(leaf))
    archive = tar(tff_files(parts), "", "bz2")
    yield femnist_source(archive), write(tmp_path / "tff", {"fed_emnist.tar.bz2": archive}), "fed_emnist.tar.bz2"


@pytest.mark.parametrize("how", ["truncated", "flipped", "foreign"])
@pytest.mark.parametrize("number", range(10))
def test_a_damaged_file_of_each_kind_is_one_line_and_leaves_the_cache(tmp_path, own_cache, number, how):
    pytest.importorskip("h5py")
    source, folder, name = list(cases(tmp_path))[number]
    source.content(folder)
    before = state(own_cache)
    path = folder / name
    path.write_bytes(damaged(path.read_bytes(), how))
    with pytest.raises(DataError) as told:
        source.content(folder)
    assert "\n" not in str(told.value)
    assert str(path) in str(told.value)
    assert state(own_cache) == before


@pytest.mark.parametrize("packed", [True, False])
def test_no_more_is_read_than_the_published_file_has(tmp_path, packed):
    files = mnist_files()
    source = mnist_source(files)
    write(tmp_path, files, packed=packed)
    images = tmp_path / ("train-images-idx3-ubyte" + ".gz" * packed)
    with (gzip.open if packed else open)(images, "wb", **({"compresslevel": 1} if packed else {})) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"is larger than the published file, which has 94,096 bytes"):
            source.content(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_small_hdf5_file_that_declares_a_large_array_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "SMALL", 1 << 20)
    h5py = pytest.importorskip("h5py")
    write(tmp_path, tff_files(writers(2)))
    with h5py.File(tmp_path / "fed_emnist_test.h5", "w") as file:
        file.create_dataset("examples/a/pixels", (5000, 28, 28), "f4", chunks=True, compression="gzip")
        file.create_dataset("examples/a/label", (5000,), "i4", chunks=True, compression="gzip")
    with pytest.raises(DataError, match=r"test.h5 has [\d,]+ bytes and would take 15,700,000 in memory"):
        femnist_source(b"").content(tmp_path)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    files = mnist_files()
    write(tmp_path, files)
    (tmp_path / "train-images-idx3-ubyte").chmod(0)
    if os.geteuid() == 0:  # who can read everything
        monkeypatch.setattr(cache, "file_digest", _refuse)
    with pytest.raises(DataError, match="train-images-idx3-ubyte cannot be read: Permission denied"):
        mnist_source(files).content(tmp_path)


def _refuse(path):
    if path.stat().st_mode & 0o777 == 0:
        raise PermissionError(13, "Permission denied", str(path))
    return "0"


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path, own_cache, monkeypatch):
    write(tmp_path, leaf_files(writers(2)))
    source = femnist_source(b"")
    decode = type(source.layouts[0]).decode

    def and_change(form, files):
        content = decode(form, files)
        write(tmp_path, leaf_files(writers(3)))
        return content

    monkeypatch.setattr(type(source.layouts[0]), "decode", and_change)
    with pytest.raises(DataError, match="changed while it was read"):
        source.content(tmp_path)
    assert copies(own_cache) == []


def test_hidden_files_are_no_shards(tmp_path):
    files = leaf_files(writers(2))
    write(tmp_path, {**files, "train/._all_data_0_keep_0_train_9.json": b"junk"})
    assert femnist_source(b"").content(tmp_path).words["writers"] == ["f0000_00", "f0001_00"]


def test_without_a_home_nothing_is_cached_and_a_download_needs_a_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", _no_home)
    assert locations.cache_dir() is None
    assert locations.search_paths(tmp_path) == [tmp_path]
    files = mnist_files()
    assert mnist_source(files).find() is None
    with pytest.raises(
        DataError, match=r"dataset 'mnist' cannot be downloaded: .* no home directory; set --data-dir or"
    ):
        mnist_source(files).content()
    assert len(mnist_source(files).content(write(tmp_path, files)).arrays) == 4
    assert capsys.readouterr().err == "note: mnist is not cached: there is no home directory; set XDG_CACHE_HOME\n"
    with pytest.raises(DataError, match="data_dir must be an existing directory, got '~nosuchuser/x'"):
        locations.search_paths("~nosuchuser/x")


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_names_of_writers_and_files_cannot_steer_a_terminal(tmp_path):
    parts = {part: {f"\x1b[31m{name}\u202e": found for name, found in w.items()} for part, w in writers(2).items()}
    escaped = [r"\x1b[31mf0000_00\u202e", r"\x1b[31mf0001_00\u202e"]
    assert femnist_source(b"").content(write(tmp_path / "leaf", leaf_files(parts))).words["writers"] == escaped
    if pytest.importorskip("h5py"):
        assert femnist_source(b"").content(write(tmp_path / "h5", tff_files(parts))).words["writers"] == escaped
    write(tmp_path / "leaf", {"train/\x1b.json": json.dumps({"users": []}).encode()})
    with pytest.raises(DataError, match=r"train/\\x1b.json is not a LEAF file"):
        femnist_source(b"").content(tmp_path / "leaf")


def test_a_writer_twice_is_said(tmp_path):
    files = leaf_files(writers(2))
    files["train/all_data_2_keep_0_train_9.json"] = files["train/all_data_0_keep_0_train_9.json"]
    with pytest.raises(DataError, match="the training files of FEMNIST must hold each owner once, got f0000_00 twice"):
        femnist_source(b"").content(write(tmp_path, files))
