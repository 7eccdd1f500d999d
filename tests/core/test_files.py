"""Files that are whole or not there, and directories that one process has."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedcat.core.errors import SettingError
from fedcat.core.files import LOCK, is_locked, locked, remove_temporary, replacing, save_tensors

SOURCE = Path(__file__).parents[2] / "src"
HOLD = """
import sys, time, os
from pathlib import Path
from fedcat.core.files import locked
with locked(Path(sys.argv[1])):
    if os.fork() == 0:  # as a worker process, which outlives a killed parent for a moment
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_file_keeps_its_content_if_writing_fails(tmp_path):
    (tmp_path / "a").write_text("old")

    def write():
        with replacing(tmp_path / "a", keep=tmp_path / "b") as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_the_file_before_is_kept(tmp_path):
    for text in ("1", "2", "3"):
        with replacing(tmp_path / "a", keep=tmp_path / "b") as temporary:
            temporary.write_text(text)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "3", "b": "2"}


def test_tensors_may_share_memory(tmp_path):
    row = torch.arange(6.0)
    save_tensors(tmp_path / "t", {"a": row, "b": row[2:4], "c": row.view(2, 3).T})
    found = load_file(tmp_path / "t")
    assert torch.equal(found["b"], torch.tensor([2.0, 3.0]))
    assert torch.equal(found["c"], row.view(2, 3).T)


def test_tensors_may_be_read_by_whom_other_files_may(tmp_path):
    (tmp_path / "text").touch()
    save_tensors(tmp_path / "tensors", {"a": torch.ones(1)})
    assert (tmp_path / "tensors").stat().st_mode == (tmp_path / "text").stat().st_mode


def test_a_disk_that_cannot_be_written_is_an_error_of_the_operating_system(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        save_tensors(tmp_path / "no" / "t", {"a": torch.zeros(2)})


def test_a_directory_is_held_once(tmp_path):
    with locked(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(SettingError, match="is in use by this process"), locked(tmp_path / "." / "x" / ".."):
            pass
    assert not is_locked(tmp_path)
    assert not (tmp_path / LOCK).exists()
    with locked(tmp_path):
        pass


def test_another_process_is_named_and_a_dead_one_holds_nothing(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as other:
        assert other.stdout.readline() == "held\n"
        assert is_locked(tmp_path)
        with pytest.raises(SettingError, match=f"is in use by process {other.pid} on "), locked(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        begin = time.monotonic()
        with locked(tmp_path):
            assert time.monotonic() - begin < 5
        os.killpg(other.pid, signal.SIGKILL)
    assert not (tmp_path / LOCK).exists()


def test_a_directory_that_is_not_there_cannot_be_held(tmp_path):
    with pytest.raises(SettingError, match="cannot be written: No such file"), locked(tmp_path / "no"):
        pass
    assert not is_locked(tmp_path / "no")


def test_what_killed_processes_left_is_removed(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    for name in (
        ".run.json.0123abcd",
        "checkpoint/.last.safetensors.deadbeef",
        "checkpoint/.tmpn60quA",
        ".mine",
        "run.json",
        ".a.0123ABCD",
    ):
        (tmp_path / name).write_text("x")
    remove_temporary(tmp_path)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {
        ".mine",
        "run.json",
        ".a.0123ABCD",
    }
