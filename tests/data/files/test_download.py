import multiprocessing
import os
import random
import stat
import sys

import pytest
from http_server import serve
from small_data import md5

from fedcat.data.files import download
from fedcat.data.files.checksum import Checksum
from fedcat.data.files.download import DownloadError, fetch

CONTENT = random.Random(1).randbytes(300_000)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)


@pytest.fixture
def served():
    with serve({"file.bin": CONTENT}) as served:
        yield served


def fetched(served, target, checksum=None):
    fetch([served.address + "file.bin"], target, checksum or md5(CONTENT))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_arrives_whole_under_its_name(served, tmp_path, capsys):
    fetched(served, tmp_path / "new" / "file.bin")
    assert (tmp_path / "new" / "file.bin").read_bytes() == CONTENT
    assert names(tmp_path / "new") == ["file.bin"]
    assert capsys.readouterr() == ("", "downloading file.bin, 0.3 MB\n")
    fetched(served, tmp_path / "new" / "file.bin")
    [(_, agent)] = served.asked
    assert agent.startswith("fedcat/")


def test_others_may_read_what_was_downloaded(served, tmp_path):
    before = os.umask(0o022)
    try:
        fetched(served, tmp_path / "file.bin")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.bin").stat().st_mode) == 0o644


def test_a_transfer_that_breaks_off_or_stalls_is_tried_again(served, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.1)
    served.cuts, served.stalls = [100_000, 50_000], [0.0, 0.3]
    fetched(served, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(served.asked) == 3


def test_a_transfer_that_always_breaks_off_is_given_up(served, tmp_path):
    served.cuts = [400, 600] * 50
    with pytest.raises(DownloadError, match=r"file.bin: IncompleteRead\(400 bytes read, 299600 more expected\)"):
        fetched(served, tmp_path / "file.bin")
    assert len(served.asked) == download.ATTEMPTS
    assert names(tmp_path) == []


def test_a_server_that_tells_no_length_is_judged_by_the_checksum(served, tmp_path):
    served.length = False
    served.cuts = [100_000]
    with pytest.raises(DownloadError, match=r"has 100,000 bytes, but the published file has 300,000: it is truncated"):
        fetched(served, tmp_path / "file.bin")
    fetched(served, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(served, tmp_path):
    wrong = Checksum("md5", "0" * 32)
    with pytest.raises(
        DownloadError, match=r"the file from http://.*/file.bin has md5 \w+, but the published file has 0000"
    ):
        fetched(served, tmp_path / "file.bin", wrong)
    assert names(tmp_path) == []
    assert len(served.asked) == 1


def test_a_servers_error_is_tried_again(served, tmp_path):
    served.statuses = [503, 429]
    fetched(served, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_servers_error_that_stays_is_said(served, tmp_path):
    served.statuses = [500] * 10
    with pytest.raises(DownloadError, match=r"file.bin: the server returned 500 Internal Server Error"):
        fetched(served, tmp_path / "file.bin")
    assert len(served.asked) == download.ATTEMPTS
    assert names(tmp_path) == []


def test_a_missing_file_is_not_asked_for_again(served, tmp_path):
    with pytest.raises(DownloadError, match="the server returned 404 Not Found"):
        fetch([served.address + "other.bin"], tmp_path / "other.bin", md5(CONTENT))
    assert len(served.asked) == 1
    assert names(tmp_path) == []


def test_the_next_address_is_tried(served, tmp_path):
    with serve({"file.bin": b"something else"}) as other:
        addresses = ["http://127.0.0.1:9/file.bin", other.address + "file.bin", served.address + "file.bin"]
        fetch(addresses, tmp_path / "file.bin", md5(CONTENT))
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_no_network_says_why(tmp_path):
    with pytest.raises(DownloadError, match=r"^http://127.0.0.1:9/file.bin: \[Errno \d+\] Connection refused$"):
        fetch(["http://127.0.0.1:9/file.bin"], tmp_path / "file.bin", md5(CONTENT))
    assert names(tmp_path) == []


def test_a_file_that_cannot_be_written_is_said_at_once(served, tmp_path):
    target = tmp_path / ("a" * 250)  # the temporary name is longer than a file system allows
    with pytest.raises(DownloadError, match=r"aaa cannot be written: File name too long"):
        fetched(served, target)


def test_without_pooch_the_error_says_what_to_install(served, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DownloadError, match=r"^downloads need pooch: pip install pooch$"):
        fetched(served, tmp_path / "file.bin")


def test_a_bar_is_shown_on_a_terminal(served, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    fetched(served, tmp_path / "file.bin")
    told = capsys.readouterr().err
    assert "300.0/300.0 kB" in told
    assert "━" in told


def test_processes_that_download_at_once_all_end_with_the_file(served, tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fetched, args=(served, tmp_path / "file.bin")) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]
