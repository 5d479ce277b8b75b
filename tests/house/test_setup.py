"""Set-up: the lock is complete, a stamp stops a second install, a broken environment is made anew."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.rules import ROOT

BOOTSTRAP = ROOT / "infra" / "bootstrap.py"
LOCKS = ROOT / "infra" / "requirements"


def load_bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gem_bootstrap", BOOTSTRAP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = load_bootstrap()


def unmet(pins: dict[str, str], requirements: dict[str, list[str]]) -> set[tuple[str, str]]:
    """(package, requirement) pairs of a lock that the lock itself does not satisfy: an independent `pip check`."""
    out = set()
    for name, wanted in requirements.items():
        for text in wanted:
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            got = pins.get(canonicalize_name(need.name))
            if got is None or not need.specifier.contains(got, prereleases=True):
                out.add((name, canonicalize_name(need.name)))
    return out


def test_lock_is_closed_but_for_the_cuda_build() -> None:
    """--no-deps asks nobody: what a package of the lock needs must be in the lock, in a version it accepts."""
    pins = bootstrap.read_lock(LOCKS / "cpu.txt")
    requirements = {n: importlib.metadata.distribution(n).requires or [] for n in pins}
    assert unmet(pins, requirements) == {("torchrec", "fbgemm-gpu")}
    assert unmet({"a": "1.0"}, {"a": ["b>=2", "c; extra == 'x'"]}) == {("a", "b")}
    assert unmet({"a": "1.0", "b": "1.9"}, {"a": ["b>=2"]}) == {("a", "b")}


def test_locks_differ_only_in_the_build_of_fbgemm() -> None:
    cpu, cuda = bootstrap.read_lock(LOCKS / "cpu.txt"), bootstrap.read_lock(LOCKS / "cuda.txt")
    assert set(cpu.items()) ^ set(cuda.items()) == {("fbgemm-gpu-cpu", "1.8.0"), ("fbgemm-gpu", "1.8.0")}
    assert (cpu["torch"], cpu["torchrec"]) == ("2.13.0", "1.8.0")


def test_what_we_ask_for_is_locked() -> None:
    pins = bootstrap.read_lock(LOCKS / "cpu.txt")
    for line in (LOCKS / "in.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            need = Requirement(line)
            assert need.specifier.contains(pins[canonicalize_name(need.name)], prereleases=True), line


def test_running_environment_is_the_lock() -> None:
    assert bootstrap.inventory(Path(sys.prefix)) == bootstrap.read_lock(LOCKS / "cpu.txt")


@pytest.mark.parametrize("line", ["torch>=2", "torch", "-r other.txt", "git+https://a.example/b==1", "a==1 --hash=x"])
def test_unpinned_line_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(f"# heading\nnumpy==2.0\n{line}\n")
    with pytest.raises(bootstrap.SetupError, match=r"x\.txt:3: .* is not name==version"):
        bootstrap.read_lock(tmp_path / "x.txt")


def test_old_python_gets_a_sentence_and_not_a_syntax_error() -> None:
    """The file parses as Python 3.7, and the version check stands before everything that 3.7 lacks."""
    tree = ast.parse(BOOTSTRAP.read_text(), feature_version=(3, 7))
    first = [type(node).__name__ for node in tree.body[:4]]
    assert first == ["Expr", "Import", "Assign", "If"]
    head = BOOTSTRAP.read_text().split("import argparse")[0]
    fake = head.replace("import sys\n", "import sys\nsys.version_info = (3, 9, 1)\n", 1)
    done = subprocess.run([sys.executable, "-c", fake], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "python3 is 3.9, at least 3.11 is needed" in done.stderr
    assert "make setup PYTHON=python3.11" in done.stderr


def run_setup(venv: Path, lock: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BOOTSTRAP), "--venv", str(venv), "--lock", str(lock)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """No pip and no index: environments are bare, and what would be installed is written down."""
    seen: list[Path] = []

    def make_bare(venv: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(venv)], check=True, timeout=60)

    monkeypatch.setattr(bootstrap, "make_venv", make_bare)
    monkeypatch.setattr(bootstrap, "install", lambda venv, lock, pins: seen.append(lock))
    return seen


def site_packages(venv: Path) -> Path:
    return next(venv.glob("lib/python3.*/site-packages"))


def test_nothing_is_done_while_the_lock_is_unchanged(tmp_path: Path, installs: list[Path]) -> None:
    venv, lock = tmp_path / "venv", tmp_path / "lock.txt"
    lock.write_text("# nothing\n")
    assert bootstrap.ensure(venv, lock) == "installed"
    assert bootstrap.stamp_path(venv, lock).exists()
    marker = venv / "still-the-same"
    marker.touch()
    assert bootstrap.ensure(venv, lock) == "current"
    assert marker.exists()
    assert len(installs) == 1


def test_changed_lock_is_installed_and_the_old_stamp_goes(tmp_path: Path, installs: list[Path]) -> None:
    venv, lock = tmp_path / "venv", tmp_path / "lock.txt"
    lock.write_text("# nothing\n")
    bootstrap.ensure(venv, lock)
    lock.write_text("numpy==1.0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "try_imports", lambda venv, pins: None)
        assert bootstrap.ensure(venv, lock) == "installed"
    assert [p.name for p in venv.glob(".lock-*")] == [bootstrap.stamp_path(venv, lock).name]
    assert len(installs) == 2


def test_half_made_environment_is_made_anew(tmp_path: Path, installs: list[Path]) -> None:
    """Killed in the middle: pip would take a package without its files as installed, we do not."""
    venv, lock = tmp_path / "venv", tmp_path / "lock.txt"
    lock.write_text("half==1.0\n")
    bootstrap.make_venv(venv)
    half = site_packages(venv) / "half-1.0.dist-info"
    half.mkdir()
    (half / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
    (half / "RECORD").write_text("half/__init__.py,,\n")
    assert bootstrap.inventory(venv) == {"half": "incomplete"}
    assert bootstrap.ensure(venv, lock) == "installed"
    assert not half.exists()


def test_whole_environment_without_a_stamp_is_adopted(tmp_path: Path, installs: list[Path]) -> None:
    venv, lock = tmp_path / "venv", tmp_path / "lock.txt"
    lock.write_text("whole==1.0\n")
    bootstrap.make_venv(venv)
    whole = site_packages(venv) / "whole-1.0+cpu.dist-info"
    whole.mkdir()
    (whole / "METADATA").write_text("Metadata-Version: 2.1\nName: whole\nVersion: 1.0+cpu\n")
    (whole / "RECORD").write_text("whole-1.0+cpu.dist-info/METADATA,,\n")
    assert bootstrap.ensure(venv, lock) == "adopted"
    assert installs == []
    assert bootstrap.ensure(venv, lock) == "current"


def test_vanished_base_python_is_noticed(tmp_path: Path, installs: list[Path]) -> None:
    venv, lock = tmp_path / "venv", tmp_path / "lock.txt"
    lock.write_text("# nothing\n")
    bootstrap.ensure(venv, lock)
    (venv / "bin" / "python").unlink()
    assert bootstrap.ensure(venv, lock) == "installed"
    assert bootstrap.runs(venv)


def test_own_code_is_found_from_anywhere_and_after_a_move(tmp_path: Path, installs: list[Path]) -> None:
    """By a .pth file, without PYTHONPATH; the standard library keeps the name `platform`."""
    venv, lock = tmp_path / "venv", tmp_path / "lock.txt"
    lock.write_text("# nothing\n")
    bootstrap.ensure(venv, lock)
    (site_packages(venv) / "gem-source.pth").write_text("moved\n")
    bootstrap.ensure(venv, lock)
    code = "import gem, pipelines, platform, uuid; print(gem.__file__, platform.python_version_tuple()[0])"
    command = [venv / "bin" / "python", "-I", "-c", code]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert said.stdout.split() == [str(ROOT / "platform" / "gem" / "__init__.py"), "3"], said.stderr


@pytest.mark.parametrize(
    ("line", "is_cuda"),
    [("cuda: Optional[str] = None", False), ("cuda: Optional[str] = '13.0'", True), ('cuda = "12.8"', True)],
)
def test_build_of_torch_is_read_without_importing_it(line: str, is_cuda: bool, tmp_path: Path) -> None:
    version = tmp_path / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    version.parent.mkdir(parents=True)
    version.write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    assert bootstrap.torch_is_cuda(tmp_path) is is_cuda


def test_packages_that_do_not_import_are_no_success(tmp_path: Path, installs: list[Path]) -> None:
    venv, lock = tmp_path / "venv", tmp_path / "lock.txt"
    lock.write_text("torch==2.13.0\n")
    with pytest.raises(bootstrap.SetupError, match=r"installed but do not import: ModuleNotFoundError.*torch"):
        bootstrap.ensure(venv, lock)
    assert not bootstrap.stamp_path(venv, lock).exists()


def test_missing_lock_names_those_there_are(tmp_path: Path) -> None:
    done = run_setup(tmp_path / "venv", LOCKS / "tpu.txt")
    assert done.returncode == 1
    assert "Allowed: LOCK=cpu or LOCK=cuda" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_failed_install_says_what_pip_said_and_leaves_no_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    lock = tmp_path / "lock.txt"
    lock.write_text("gem-no-such-package==1.0\n")
    done = run_setup(tmp_path / "venv", lock)
    assert done.returncode == 1
    assert "pip failed" in done.stderr
    assert "gem-no-such-package" in done.stderr
    assert list((tmp_path / "venv").glob(".lock-*")) == []
