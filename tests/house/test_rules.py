"""Every rule of the house is shown a snippet that breaks it and one that does not: a rule that cannot fail is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house import rules

GEM = "platform/gem/"


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        (GEM + "data/x.py", "import ray", "gem knows no Ray"),
        (GEM + "data/x.py", "def f():\n    from ray.data import Dataset", "gem knows no Ray"),
        (GEM + "lineage/bundle.py", "def f():\n    import mlflow", "only lineage/registry.py"),
        (GEM + "lineage/registry.py", "import mlflow", "only inside functions"),
        (GEM + "model/wukong.py", "from torchrec import KeyedJaggedTensor", "only the modules that make"),
        (GEM + "data/x.py", "from gem.model.gem import Gem", "data may import only"),
        (GEM + "data/x.py", "from gem import training", "data may import only"),
        (GEM + "data/x.py", "from ..transfer import y", "data may import only"),
        (GEM + "data/__init__.py", "from .. import model", "data may import only"),
        (GEM + "metrics/ne.py", "import gem.data.batch", "metrics may import only"),
        (GEM + "model/x.py", "from gem.transfer import distill", "model may import only"),
        (GEM + "transfer/x.py", "from gem.training.loop import train", "transfer may import only"),
        (GEM + "training/x.py", "from gem.lineage import bundle", "training may import only"),
        (GEM + "config.py", "from gem.data import spec", "base may import only"),
        (GEM + "data/x.py", "from pipelines.stage import run_stage", "gem may import only"),
        ("pipelines/x.py", "import serving.app", "pipelines may import only"),
        ("pipelines/x.py", "from tuning import sweep", "pipelines may import only"),
        ("serving/x.py", "from pipelines import run", "serving may import only"),
        ("tuning/x.py", "import serving", "tuning may import only"),
        ("serving/x.py", "from tests.conftest import ROOT", "never imports tests"),
    ],
)
def test_arrows_complain(path: str, source: str, said: str) -> None:
    complaints = rules.arrow_complaints(Path(path), source)
    assert len(complaints) == 1
    assert said in complaints[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (GEM + "lineage/registry.py", "def f():\n    import mlflow"),
        (GEM + "training/x.py", "from gem.transfer import y\nfrom torchrec import z\nfrom gem.errors import E"),
        (GEM + "model/embeddings.py", "import torchrec\nfrom gem.data.schema import Schema"),
        (GEM + "data/x.py", "from . import batch\nfrom .schema import Schema\nimport gem\nfrom gem import __version__"),
        (GEM + "data/x.py", "import rayleigh"),
        ("pipelines/x.py", "import ray\nfrom gem.training import loop"),
        ("tuning/x.py", "import pipelines.run"),
        ("tests/unit/x.py", "import serving, tuning, pipelines"),
    ],
)
def test_arrows_let_pass(path: str, source: str) -> None:
    assert rules.arrow_complaints(Path(path), source) == []


def body(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("x = 1\n" * 401, "x = 1\n" * 400),
        (body(61), body(60)),
        ("async " + body(61), "async " + body(60)),
        ("class A:\n    def __init__(self, a, b, c, d, *, e, f, g): ...", "def g(a, b, c, d, e, f, g, h): ..."),
        (
            "class A:\n    def __init__(self, a, b, c, d, *, e, f, g=1): ...",
            "class A:\n  def __init__(self, a, b, c, d, e, f): ...",
        ),
    ],
)
def test_budgets(bad: str, good: str) -> None:
    assert len(rules.budget_complaints(Path("pipelines/x.py"), bad)) == 1
    assert rules.budget_complaints(Path("pipelines/x.py"), good) == []


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (rules.docstring_complaints, '"""m."""\ndef f(): ...', '"""m."""\ndef _f(): ...'),
        (rules.docstring_complaints, '"""m."""\nclass A: ...', '"""m."""\nclass A:\n    """a."""'),
        (rules.docstring_complaints, "x = 1", '"""m."""\nx = 1'),
        (
            rules.docstring_complaints,
            '"""m."""\nclass A:\n    """a."""\n    def f(self):\n' + "        x = 1\n" * 8,
            '"""m."""\nclass A:\n    """a."""\n    def f(self):\n        return 1',
        ),
        (rules.text_complaints, "# TO" + "DO later", "# nothing left todo"),
        (rules.text_complaints, "raise NotImplemented" + "Error", "return NotImplemented"),
        (rules.text_complaints, 'p = "/ho' + 'me/me/data"', 'p = "framework/home/x"'),
        (rules.text_complaints, "cd /wo" + "rk/main", "see https://a.example/work/main"),
    ],
)
def test_text_rules(rule: Callable[[Path, str], list[str]], bad: str, good: str) -> None:
    assert len(rule(Path("pipelines/x.py"), bad)) == 1
    assert rule(Path("pipelines/x.py"), good) == []


def test_makefile_reader() -> None:
    text = ".PHONY: a b\nA := 1\na: b  ## Does a\n\t@x: y\nb:\n\ttrue\nsub-c: a  ## \n"
    assert rules.makefile_targets(text) == ({"a", "b", "sub-c"}, {"a", "b"}, {"a"})


def test_readme_reader() -> None:
    text = "We make things. Run `make one`.\n```bash\nmake two X=1 && make three\npython -m a.b run\n```\nmake four\n"
    assert rules.readme_commands(text) == ({"one", "two", "three"}, {"a.b"})
