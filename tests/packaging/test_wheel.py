"""The wheel has all that the package is, works from outside of the repository, and says that it is typed.

It is built without isolation (no network), installed apart, and put before the checkout on the path of a new process.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COPIED = ("pyproject.toml", "README.md", "purecache")
SELECTED = (
    "test_black_box.py::test_bigrams_need_one_token_more_than_pages",
    "test_observers.py",
    "stores/test_keys.py",
    "stores/test_memory_store.py",
    "stores/test_staging.py",
)
"""Tests that run from outside: requests on a whole cache with their bytes, and files of what compiles little."""
HELPERS = ("conftest.py", "support.py", "scheduling.py")
pytestmark = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel, built from the source distribution as an index would get it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)], cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def outside(wheel, tmp_path_factory):
    """(folder that is no checkout, environment whose Python finds the installed wheel first)."""
    place, site = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("site")
    run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)],
        cwd=place,
    )
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]  # of the tests: see conftest.py
    path = os.pathsep.join([str(site / "bin"), os.environ["PATH"]])
    return place, os.environ | {"PYTHONPATH": str(site), "PATH": path, "JAX_COMPILATION_CACHE_DIR": cache}


def run(command, cwd, env=None):
    """Standard output of a command that ends well."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_file_of_the_package_is_in_the_wheel_and_nothing_else(wheel):
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "purecache").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert "purecache/py.typed" in files
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == files


def test_extras_and_the_command_are_declared(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
        (entries,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt"))
    declared = {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    assert declared == set(project["optional-dependencies"])
    assert "purecache = purecache.cli:main" in entries
    table = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert [extra for extra in declared if f"`{extra}`" not in table] == []


def test_the_command_runs_from_outside(outside):
    place, environment = outside
    assert "replay" in run(["purecache", "--help"], place, environment)
    assert "load beats computing" in run(["purecache", "capacity", "--help"], place, environment).replace(
        "loading", "load"
    )


def test_it_is_the_installed_package_that_is_found(outside):
    place, environment = outside
    file = run([sys.executable, "-c", "import purecache; print(purecache.__file__)"], place, environment)
    assert not Path(file).is_relative_to(ROOT)


def test_tests_pass_from_outside(outside):
    place, environment = outside
    for name in (*HELPERS, *(each.split("::")[0] for each in SELECTED)):
        (place / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, place / "tests" / name)
    chosen = [f"tests/{name}" for name in SELECTED]
    told = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen], place, environment)
    assert "100%" in told
