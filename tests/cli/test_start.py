"""How the program starts: quickly where nothing is to be computed, and without a traceback if it is interrupted."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fedcat

SOURCE = Path(__file__).parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}


def test_the_version_needs_no_pytorch():
    words = [sys.executable, "-X", "importtime", "-m", "fedcat", "--version"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == f"fedcat {fedcat.__version__}\n"
    assert "fedcat.version" in done.stderr
    assert "| torch" not in done.stderr.replace("  ", " ")


def test_an_interrupt_during_the_import_gives_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}
    with subprocess.Popen(
        [sys.executable, "-m", "fedcat", "run"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "importing\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "interrupted\n"


def test_every_public_name_is_found_where_the_type_checker_finds_it():
    assert set(fedcat.__all__) == {*fedcat._HOME, "__version__"}
    for name in fedcat.__all__:
        assert getattr(fedcat, name) is not None
    assert set(fedcat.__all__) <= set(dir(fedcat))
    tree = ast.parse((SOURCE / "fedcat" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {(node.module.removeprefix("fedcat."), alias.name) for node in block.body for alias in node.names}
    assert typed == {(home, name) for name, home in fedcat._HOME.items()}


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(fedcat, "no_such_name")


def test_parts_of_the_package_are_attributes():
    words = [sys.executable, "-c", "import fedcat; print(fedcat.data.partitions.__name__, fedcat.api.__name__)"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "fedcat.data.partitions fedcat.api\n"


def test_flags_are_listed_without_a_type():
    from typer.testing import CliRunner

    from fedcat.cli.app import app

    for words in ([], ["run"], ["compare"], ["data"], ["data", "show"], ["bench"], ["nets"]):
        shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).output
        assert "--help" in shown
        assert "bool" not in shown.lower().replace("boolean", "")
