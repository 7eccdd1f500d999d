import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

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
    assert "downloading file.bin, 0.3 MB" in capsys.readouterr().err
    fetched(served, tmp_path / "new" / "file.bin")
    assert len(served.asked) == 1


def test_a_connection_that_breaks_off_is_taken_up_where_it_broke(served, tmp_path):
    served.cuts = [100_000, 50_000]
    fetched(served, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert [asked for _, asked in served.asked] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_later_process_takes_up_what_an_earlier_one_left(served, tmp_path, monkeypatch):
    served.cuts = [100_000, 0, 0, 0, 0]
    with pytest.raises(DownloadError, match="the connection was lost after 100,000 of 300,000 bytes"):
        fetched(served, tmp_path / "file.bin")
    assert names(tmp_path) == ["file.bin.part"]
    served.cuts, served.asked = [], []
    fetched(served, tmp_path / "file.bin")
    assert served.asked == [("file.bin", "bytes=100000-")]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_a_server_without_ranges_is_asked_for_everything(served, tmp_path):
    served.ranges = False
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    fetched(served, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_that_tells_no_length_is_judged_by_the_checksum(served, tmp_path):
    served.length = False
    fetched(served, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("left", [CONTENT, CONTENT + b"more", b"x" * 1000])
def test_a_part_that_is_whole_too_long_or_wrong_ends_well(served, tmp_path, left):
    (tmp_path / "file.bin.part").write_bytes(left)
    fetched(served, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_a_wrong_checksum_leaves_nothing(served, tmp_path):
    wrong = Checksum("md5", "0" * 32)
    with pytest.raises(
        DownloadError, match=r"the file from http://.*/file.bin has md5 \w+, but the published file has 0000"
    ):
        fetched(served, tmp_path / "file.bin", wrong)
    assert names(tmp_path) == []
    assert len(served.asked) == 1


def test_a_wrong_length_is_said_as_such(served, tmp_path):
    with pytest.raises(DownloadError, match=r"has 300,000 bytes, but the published file has 300,001: it is truncated"):
        fetched(served, tmp_path / "file.bin", Checksum("md5", "0" * 32, 300_001))


def test_a_servers_error_is_tried_again(served, tmp_path):
    served.statuses = [500, 503, 429]
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
    with pytest.raises(DownloadError, match=r"http://127.0.0.1:9/file.bin: .*refused"):
        fetch(["http://127.0.0.1:9/file.bin"], tmp_path / "file.bin", md5(CONTENT))
    assert names(tmp_path) == []


def test_a_server_that_always_cuts_without_ranges_is_given_up(served, tmp_path):
    served.ranges = False
    served.cuts = [400, 600] * 50
    with pytest.raises(DownloadError, match=r"the connection was lost after \d00 of 300,000 bytes"):
        fetched(served, tmp_path / "file.bin")
    assert len(served.asked) <= 2 * download.ATTEMPTS


def test_a_file_that_cannot_be_written_is_said_at_once(served, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_writable", lambda part, mode: real(part / "below", mode))
    with pytest.raises(DownloadError, match=r"cannot be written: No such file or directory"):
        fetched(served, tmp_path / "file.bin")
    assert len(served.asked) == 1


real = download._writable


def test_what_an_ended_process_left_is_taken_up_at_once_and_cleared_away(served, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f"file.bin.{download._host()}-{ended.pid}-0a1b2c3d.part").write_bytes(CONTENT[:1000])
    (tmp_path / f"file.bin.{download._host()}-{ended.pid}-00000000.part").write_bytes(CONTENT[:10])
    fetched(served, tmp_path / "file.bin")
    assert served.asked == [("file.bin", "bytes=1000-")]
    assert names(tmp_path) == ["file.bin"]


def test_what_a_process_writes_to_is_left_to_it_until_it_is_old(served, tmp_path):
    for name in (f"file.bin.{download._host()}-{os.getpid()}-0a1b2c3d.part", "file.bin.elsewhere-1-0a1b2c3d.part"):
        busy = tmp_path / name
        busy.write_bytes(CONTENT[:1000])
        served.asked.clear()
        fetched(served, tmp_path / "file.bin")
        assert served.asked == [("file.bin", None)]
        assert names(tmp_path) == sorted(["file.bin", name])
        (tmp_path / "file.bin").unlink()
        os.utime(busy, (1, 1))
        served.asked.clear()
        with busy.open("ab") as sleeper:
            fetched(served, tmp_path / "file.bin")
            assert served.asked == [("file.bin", "bytes=1000-")]
            sleeper.write(b"its owner wakes up")
        assert (tmp_path / "file.bin").read_bytes() == CONTENT
        assert names(tmp_path) == ["file.bin"]
        (tmp_path / "file.bin").unlink()


def test_of_two_that_break_off_the_larger_part_is_kept(served, tmp_path):
    served.cuts = [100, 0, 0, 0]
    with download._own_part(tmp_path / "file.bin") as longer:
        longer.write_bytes(CONTENT[:5000])
        with pytest.raises(DownloadError):
            fetched(served, tmp_path / "file.bin")
        assert (tmp_path / "file.bin.part").stat().st_size == 100
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:5000]
    served.cuts = [0, 0, 0, 0]
    with download._own_part(tmp_path / "file.bin") as shorter:
        shorter.unlink()
        shorter.write_bytes(CONTENT[:100])
        (tmp_path / "file.bin.part").write_bytes(CONTENT[:200])
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:200]
    assert names(tmp_path) == ["file.bin.part"]


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(tmp_path):
    order = []
    with download._locked(tmp_path / "f"):
        threads = [threading.Thread(target=_take_turn, args=(tmp_path / "f", order)) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert order == []
    for thread in threads:
        thread.join(30)
    assert order == ["in", "out"] * 4
    assert names(tmp_path) == []


def _take_turn(target, order):
    with download._locked(target):
        order.append("in")
        time.sleep(0.05)
        order.append("out")


def test_processes_that_cannot_lock_still_give_a_whole_file(served, tmp_path, monkeypatch):
    """Two transfers at once, each in a file of its own, as on two machines that share a folder."""
    monkeypatch.setattr(download, "_locked", lambda target: nullcontext())
    threads = [threading.Thread(target=fetched, args=(served, tmp_path / "file.bin")) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_a_bar_is_shown_on_a_terminal(served, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    fetched(served, tmp_path / "file.bin")
    told = capsys.readouterr().err
    assert "300.0/300.0 kB" in told
    assert "━" in told


def _fetch_in_a_process(address, target):
    fetch([address + "file.bin"], target, md5(CONTENT))


def test_processes_wait_for_each_other(served, tmp_path):
    context = multiprocessing.get_context("fork")
    words = (served.address, tmp_path / "file.bin")
    workers = [context.Process(target=_fetch_in_a_process, args=words) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(served.asked) == 1
