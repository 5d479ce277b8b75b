"""The rules of the house as pure functions from source text to complaints; the tests apply them to the tree.

Each is shown able to fail in test_rules.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_ARGUMENTS = 6

RIM = ("pipelines", "serving", "tuning")
# Who may import whom, among our own packages (DESIGN: gem <- pipelines <- tuning; gem <- serving).
ALLOWED_PACKAGES = {
    "gem": {"gem"},
    "pipelines": {"gem", "pipelines"},
    "serving": {"gem", "serving"},
    "tuning": {"gem", "pipelines", "tuning"},
}
# Inside gem: metrics, data <- model <- transfer <- training; lineage beside them. The plain modules lie below all.
BASE = {"", "config", "errors", "recipes"}
ALLOWED_ROOMS = {
    "base": BASE,
    "metrics": BASE | {"metrics"},
    "data": BASE | {"data"},
    "model": BASE | {"data", "metrics", "model"},
    "transfer": BASE | {"data", "metrics", "model", "transfer"},
    "training": BASE | {"data", "metrics", "model", "transfer", "training"},
    "lineage": BASE | {"data", "metrics", "lineage"},
}
# The networks take embeddings as tensors: TorchRec stays where tables are made and where training shards them.
TORCHREC_AT = re.compile(r"platform/gem/(model/(embedding|tables|sharded)\w*\.py|training/\w+\.py)$")
FORBIDDEN_WORDS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"]) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}{/~:-])(/(?:home|root|work|mnt|Users)/[\w.-]+|[A-Z]:\\\\?Users)")


def tracked_files() -> list[Path]:
    """Every file that is or would be committed, relative to the root."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if listed.returncode == 0:
        names = [Path(n) for n in listed.stdout.split("\0") if n]
        return sorted(p for p in set(names) if (ROOT / p).is_file())
    skip = {".git", ".venv", "runs", "mlruns", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
    return sorted(p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file() and not skip & set(p.parts))


def python_files(*folders: str) -> list[Path]:
    """Our Python files, all or those under the named folders."""
    found = [p for p in tracked_files() if p.suffix == ".py"]
    return [p for p in found if not folders or str(p).startswith(tuple(f"{f}/" for f in folders))]


def module_name(path: Path) -> str:
    """`platform/gem/data/spec.py` -> `gem.data.spec`."""
    parts = list(path.with_suffix("").parts)
    if parts[0] == "platform":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str = "", is_package: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute module or module.name, at module level) of every import, also those inside functions."""
    tree = ast.parse(source)
    inner = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(outer)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        top = id(node) not in inner
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, top
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                kept = parents[: len(parents) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", top


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _is(target: str, *packages: str) -> bool:
    return target.split(".")[0] in packages


def arrow_complaints(path: Path, source: str) -> list[str]:
    """Imports that run against the arrows."""
    module = module_name(path)
    package = module.split(".")[0]
    out: list[str] = []
    if package not in ALLOWED_PACKAGES:
        return out
    for line, target, top in imports(source, module, path.name == "__init__.py"):
        where = f"{path}:{line}: imports {target}"
        if _is(target, *ALLOWED_PACKAGES) and target.split(".")[0] not in ALLOWED_PACKAGES[package]:
            out.append(f"{where}, but {package} may import only {sorted(ALLOWED_PACKAGES[package])}")
        if _is(target, "tests"):
            out.append(f"{where}: code never imports tests")
        if package == "gem":
            out += _inside_gem(path, module, target, top, where)
    return out


def _inside_gem(path: Path, module: str, target: str, top: bool, where: str) -> list[str]:
    out: list[str] = []
    if _is(target, "ray"):
        out.append(f"{where}: gem knows no Ray")
    if _is(target, "matplotlib", "rich", "fastapi"):
        out.append(f"{where}: pictures, tables and HTTP belong to the rim")
    if _is(target, "mlflow") and (top or str(path) != "platform/gem/lineage/registry.py"):
        out.append(f"{where}: only lineage/registry.py, and only inside functions")
    if _is(target, "torchrec", "fbgemm_gpu") and not TORCHREC_AT.search(str(path)):
        out.append(f"{where}: only the modules that make or shard tables")
    if _is(target, "gem"):
        parts = module.split(".")
        room = parts[1] if len(parts) > 1 and parts[1] in ALLOWED_ROOMS else "base"
        other = (*target.split("."), "")[1]
        other = other if other in set(ALLOWED_ROOMS) | BASE else ""
        if other not in ALLOWED_ROOMS[room]:
            out.append(f"{where}, but {room} may import only {sorted(ALLOWED_ROOMS[room] - {''})}")
    return out


def budget_complaints(path: Path, source: str) -> list[str]:
    """Files, functions and constructors that are too long."""
    out: list[str] = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        out.append(f"{path}: {lines} lines, at most {MAX_FILE_LINES}")
    if path.suffix != ".py":
        return out
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                out.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if node.name == "__init__" and len(arguments) - 1 > MAX_CONSTRUCTOR_ARGUMENTS:
                count = len(arguments) - 1
                out.append(f"{path}:{node.lineno}: {count} constructor arguments, at most {MAX_CONSTRUCTOR_ARGUMENTS}")
    return out


def docstring_complaints(path: Path, source: str) -> list[str]:
    """Public classes, functions and longer methods without a docstring."""
    tree = ast.parse(source)
    out = [] if ast.get_docstring(tree) or not source.strip() else [f"{path}:1: module without a docstring"]
    for node in tree.body:
        out += _undocumented(path, node, "", -1)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                out += _undocumented(path, method, f"{node.name}.", 5)
    return out


def _undocumented(path: Path, node: ast.stmt, prefix: str, short: int) -> list[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return []
    length = (node.end_lineno or node.lineno) - node.lineno
    if ast.get_docstring(node) or length <= short or (prefix and node.name == "forward"):
        return []
    return [f"{path}:{node.lineno}: {prefix}{node.name} has no docstring"]


def text_complaints(path: Path, source: str) -> list[str]:
    """Unfinished work and paths of one machine."""
    out: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        if found := FORBIDDEN_WORDS.search(line):
            out.append(f"{path}:{number}: {found[0]}: finish it or file an issue")
        if path.parts[0] in ("platform", *RIM) and "raise NotImplemented" in line:
            out.append(f"{path}:{number}: not implemented: no stubs")
        if found := MACHINE_PATH.search(line):
            out.append(f"{path}:{number}: {found[0]}: a path of one machine")
    return out


def makefile_targets(text: str) -> tuple[set[str], set[str], set[str]]:
    """(all rule targets, those that are .PHONY, those with a help line)."""
    rules = set(re.findall(r"^([a-z][\w-]*):(?!=)", text, re.MULTILINE))
    phony = {name for line in re.findall(r"^\.PHONY:(.*)$", text, re.MULTILINE) for name in line.split()}
    helped = set(re.findall(r"^([a-z][\w-]*):.*## \S", text, re.MULTILINE))
    return rules, phony, helped


def readme_commands(text: str) -> tuple[set[str], set[str]]:
    """(make targets, `python -m` modules) that stand in the fenced blocks and inline code of a README."""
    code = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    code += "\n" + "\n".join(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text))
    makes = set(re.findall(r"(?:^|&& |[;(] *)make (?:-\S+ )*([a-z][\w-]*)", code, re.MULTILINE))
    return makes, set(re.findall(r"python3? -m ([a-z][\w.]*)", code))
