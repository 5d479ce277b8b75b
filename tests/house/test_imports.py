"""Importing any of our modules does nothing but define things, and importing gem loads no heavy rim library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.rules import ROOT, module_name, python_files

# Prints one JSON line; everything that the imports print goes to the other stream and is complained about.
PROBE = """
import importlib, json, logging, os, signal, sys, threading
names = json.loads(sys.argv[1])
out, sys.stdout = sys.stdout, sys.stderr
before = (os.getcwd(), signal.getsignal(signal.SIGINT), len(logging.getLogger().handlers))
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = repr(error)
after = (os.getcwd(), signal.getsignal(signal.SIGINT), len(logging.getLogger().handlers))
ray = sys.modules.get("ray")
print(json.dumps({
    "failed": failed,
    "loaded": sorted({m.split(".")[0] for m in sys.modules}),
    "same": before == after,
    "threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
    "ray": bool(ray and ray.is_initialized()),
    "files": sorted(os.listdir(".")),
}), file=out)
"""


def probe(names: list[str], folder: Path, path: str = "") -> tuple[dict[str, object], str]:
    env = os.environ | {
        "PYTHONPATH": path or f"{ROOT / 'platform'}:{ROOT}",
        "HOME": str(folder),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-B", "-c", PROBE, json.dumps(names)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def modules(*folders: str) -> list[str]:
    return sorted(module_name(p) for p in python_files(*folders) if p.stem != "__main__")


def assert_no_effects(said: dict[str, object], noise: str) -> None:
    assert said["failed"] == {}
    assert noise == ""
    assert (said["same"], said["threads"], said["ray"], said["files"]) == (True, [], False, [])


def test_gem_imports_without_effects_and_without_the_rim(tmp_path: Path) -> None:
    """No Ray, MLflow, matplotlib or TorchRec is loaded, so `import gem.…` is cheap and works without them."""
    said, noise = probe(modules("platform/gem"), tmp_path)
    assert_no_effects(said, noise)
    loaded = said["loaded"]
    assert isinstance(loaded, list)
    assert {"ray", "mlflow", "matplotlib", "torchrec", "fbgemm_gpu"} & set(loaded) == set()
    assert {"pipelines", "serving", "tuning"} & set(loaded) == set()


def test_rim_imports_without_effects(tmp_path: Path) -> None:
    """The rim may use Ray, but importing it starts nothing and loads neither MLflow nor matplotlib (seconds each)."""
    said, noise = probe(modules("pipelines", "serving", "tuning"), tmp_path)
    assert_no_effects(said, noise)
    loaded = said["loaded"]
    assert isinstance(loaded, list)
    assert {"mlflow", "matplotlib"} & set(loaded) == set()


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("open('left-behind', 'w')", "files"),
        (
            "import threading; threading.Thread(target=__import__('time').sleep, args=(1,), daemon=True).start()",
            "threads",
        ),
        ("import logging; logging.basicConfig()", "same"),
        ("print('hello')", "noise"),
        ("1 / 0", "failed"),
    ],
)
def test_the_probe_can_fail(source: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "lib" / "badly_behaved.py").write_text(source)
    said, noise = probe(["badly_behaved"], tmp_path / "here", str(tmp_path / "lib"))
    clean = {"files": [], "threads": [], "same": True, "noise": "", "failed": {}}
    assert (said | {"noise": noise})[key] != clean[key]
