"""Raw files wherever they lie: a local folder, or a store that Arrow opens by URI (s3://, gs://, file://).

Credentials come from the environment only. They are in no `RawFile`, no error and no repr.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import os
import re
import urllib.parse
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from gem.data.ingest.globs import fixed_folder, glob_regex
from gem.errors import DataError, GemError, SpecError

_URI = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]+:/")
_SECRET_QUERY = re.compile(r"key|secret|token|password|credential", re.IGNORECASE)
_SECRET_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_REFUSED = re.compile(
    r"ACCESS_DENIED|AccessDenied|INVALID_ACCESS_KEY|InvalidAccessKey|INVALID_CLIENT_TOKEN|SIGNATURE|Signature|FORBIDDEN"
    r"|Forbidden|status 40[13]|EXPIRED|ExpiredToken|PERMISSION_DENIED|UNAUTHENTICATED|[Cc]redentials"
)
_ABSENT = re.compile(r"NO_SUCH_BUCKET|NoSuchBucket|NO_SUCH_KEY|does not exist|NOT_FOUND|No such file|not found")
_PARTITION_NAMES = ("day", "date", "dt")
_MAX_LISTED = 20
_BLOCK = 8 << 20
_THREADS = 16

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, order=True)
class RawFile:
    """One raw file. `uri` is a local path or a URI as Arrow opens it; `relative` is its path below the data folder."""

    relative: str
    uri: str
    size: int  # bytes
    modified_ns: int

    @classmethod
    def of(cls, file: RawFile | str | os.PathLike[str]) -> RawFile:
        """A RawFile as it is; for a local path, one relative to the folder above its `name=value` folders."""
        if isinstance(file, RawFile):
            return file
        path = Path(file)
        try:
            stat = path.stat()
        except OSError as e:
            raise DataError(f"{path}: cannot open the file: {e.strerror}. Check the path.") from None
        parts = list(path.parts[-1:])
        for folder in path.parts[-2::-1]:
            if "=" not in folder:
                break
            parts.insert(0, folder)
        return cls("/".join(parts), str(path), stat.st_size, stat.st_mtime_ns)

    @property
    def name(self) -> str:
        return PurePosixPath(self.relative).name

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.relative).suffixes

    @property
    def is_local(self) -> bool:
        return not is_uri(self.uri)

    def read(self) -> bytes:
        """The whole content; for small files. Raises DataError."""
        with open_input(self) as stream:
            content: bytes = _guarded(stream.read, str(self), DataError)
        return content

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> RawFile:
        return cls(**raw)

    def __str__(self) -> str:
        """How messages name the file: its path, or its URI without the options of the store."""
        return self.uri if self.is_local else self.uri.partition("?")[0]

    def __fspath__(self) -> str:
        if not self.is_local:
            raise DataError(f"{self}: not on this machine; open it with gem.data.ingest.sources.open_input")
        return self.uri


class DataFolder:
    """A folder of raw files: a local one, or a URI such as s3://bucket/prefix?endpoint_override=…&scheme=http.

    Raises SpecError for a scheme nobody knows; nothing is opened yet.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        text = os.fspath(root)
        self.local: Path | None = None
        self._uri = ""
        if not is_uri(text):
            self.local = Path(text)
        elif text.lower().startswith("file:"):
            self.local = Path(urllib.parse.unquote("/" + text.split(":", 1)[1].lstrip("/")))
        else:
            self._uri = _clean_uri(text)

    def __str__(self) -> str:
        return str(self.local) if self.local is not None else self._uri.partition("?")[0]

    def __repr__(self) -> str:
        return f"DataFolder({str(self)!r})"

    def find(self, patterns: Iterable[str]) -> list[RawFile]:
        """Files that match any of the glob patterns (`*`, `?`, `[…]` within a name, `**` over folders), by path.

        Raises SpecError for a missing bucket or folder and DataError for a store that refuses or does not answer.
        """
        found: dict[str, RawFile] = {}
        for pattern in patterns:
            match = glob_regex(pattern)
            for file in self._below(*fixed_folder(pattern)):
                if match.fullmatch(file.relative):
                    found[file.relative] = file
        return sorted(found.values())

    def check(self) -> None:
        """Raise SpecError or DataError unless the folder exists and can be listed."""
        if self.local is not None:
            if not self.local.is_dir():
                raise SpecError(
                    f"data folder {self.local}: no such folder. Set DATA_DIR to the folder of the raw tables."
                )
            return
        self._list("", deep=False)

    def listing(self) -> str:
        """The names in the folder, for messages."""
        if self.local is not None:
            names = sorted(p.name + ("/" if p.is_dir() else "") for p in self.local.iterdir())
        else:
            names = sorted(i.base_name + ("" if i.is_file else "/") for i in self._list("", deep=False))
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        return (", ".join(names[:_MAX_LISTED]) or "nothing") + more

    def file(self, relative: str) -> RawFile | None:
        """The file at a path below the folder; None if there is none."""
        if self.local is not None:
            path = self.local / relative
            if not path.is_file():
                return None
            stat = path.stat()
            return RawFile(relative, str(path), stat.st_size, stat.st_mtime_ns)
        uri = self._join(relative)
        system, path_there = _locate(uri)
        info = _guarded(lambda: system.get_file_info(path_there), str(self))
        return RawFile(relative, uri, int(info.size), int(info.mtime_ns or 0)) if info.is_file else None

    def _below(self, prefix: str, depth: int) -> list[RawFile]:
        """Files below `prefix`, at most `depth` names further down (0: any depth)."""
        if self.local is not None:
            return _walk(self.local, prefix, depth)
        base = _locate(self._uri)[1].rstrip("/")
        out = []
        for info in self._list(prefix, deep=depth != 1):
            if info.is_file:
                relative = info.path[len(base) :].lstrip("/")
                out.append(RawFile(relative, self._join(relative), int(info.size), int(info.mtime_ns or 0)))
        return out

    def _list(self, prefix: str, deep: bool) -> list[Any]:
        system, base = _locate(self._uri)
        path = "/".join(p for p in (base.rstrip("/"), prefix) if p)
        shown = "/".join(p for p in (str(self), prefix) if p)
        # A pattern's own folder may be absent; the data folder itself may not.
        selector = pafs.FileSelector(path, recursive=deep, allow_not_found=bool(prefix))
        return list(_guarded(lambda: system.get_file_info(selector), shown))

    def _join(self, relative: str) -> str:
        head, question, query = self._uri.partition("?")
        return f"{head.rstrip('/')}/{_quoted(relative)}{question}{query}"


def is_uri(text: str) -> bool:
    """Whether a data folder is given as a URI. A URI that went through `Path` (s3:/bucket) still counts."""
    return bool(_URI.match(text))


def open_input(file: RawFile | Path) -> pa.NativeFile:
    """Open a raw file for random access, bytes as they are stored. Raises DataError."""
    raw = RawFile.of(file)
    system, path = _locate(raw.uri)
    opened: pa.NativeFile = _guarded(lambda: system.open_input_file(path), str(raw), DataError)
    return opened


def sha256(file: RawFile | Path) -> str:
    """Hex sha256 of a raw file, read in pieces. Raises DataError."""
    digest = hashlib.sha256()
    with open_input(file) as stream:
        while block := _guarded(lambda: stream.read(_BLOCK), str(file), DataError):
            digest.update(block)
    return digest.hexdigest()


def partition_day(file: RawFile | Path) -> dt.date | None:
    """The day of a `day=`, `date=` or `dt=` folder (2026-01-01 or 20260101) on the file's path; None without one."""
    for name, value in hive_columns(RawFile.of(file)).items():
        if name.lower() in _PARTITION_NAMES and value is not None:
            try:
                return dt.date.fromisoformat(value)
            except ValueError:
                continue
    return None


def hive_columns(file: RawFile) -> dict[str, str | None]:
    """Columns that the `name=value` folders of the path stand for."""
    out: dict[str, str | None] = {}
    for folder in PurePosixPath(file.relative).parts[:-1]:
        name, equals, value = folder.partition("=")
        if equals and name:
            value = urllib.parse.unquote(value)
            out[name] = None if value == "__HIVE_DEFAULT_PARTITION__" else value
    return out


def over_files(function: Callable[[In], Out], items: Iterable[In], remote: bool) -> list[Out]:
    """`function` of every item, in order; with threads where each call waits for a store far away."""
    if not remote:
        return [function(item) for item in items]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


def _walk(root: Path, prefix: str, depth: int) -> list[RawFile]:
    out: list[RawFile] = []
    stack = [(prefix, 1)]
    while stack:
        folder, level = stack.pop()
        try:
            entries = list(os.scandir(root / folder))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as e:
            raise DataError(f"{root / folder}: cannot list the folder: {e.strerror}. Check its permissions.") from None
        for entry in entries:
            relative = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_file():
                stat = entry.stat()
                out.append(RawFile(relative, str(root / relative), stat.st_size, stat.st_mtime_ns))
            elif entry.is_dir(follow_symlinks=depth > 0) and (depth == 0 or level < depth):
                stack.append((relative, level + 1))
    return out


def _clean_uri(text: str) -> str:
    """A URI without user, password or secret options; `s3:/bucket` (a URI that was a Path) is mended."""
    scheme, _, rest = text.partition(":")
    head, _, query = rest.lstrip("/").partition("?")
    host, slash, path = head.partition("/")
    options = [o for o in query.split("&") if o]
    kept = [o for o in options if not _SECRET_QUERY.search(o.partition("=")[0])]
    if "@" in host or len(kept) < len(options):
        warnings.warn(
            f"data folder {scheme}://{host.rpartition('@')[2]}{slash}{path}: the credentials in the URI are not used. "
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or GOOGLE_APPLICATION_CREDENTIALS",
            stacklevel=3,
        )
    query = "&".join(kept)
    if not host:
        raise SpecError(
            f"data folder {text}: the URI names no bucket; write {scheme}://bucket/prefix. Correct DATA_DIR."
        )
    path = _quoted(urllib.parse.unquote(path))
    return f"{scheme.lower()}://{host.rpartition('@')[2]}{slash}{path}" + (f"?{query}" if query else "")


def _quoted(path: str) -> str:
    return urllib.parse.quote(path, safe="/=-_.~")


@functools.lru_cache(maxsize=64)
def _store(uri: str) -> pafs.FileSystem:
    """One connection per bucket and options."""
    scheme, _, query = uri.partition("?")
    if scheme.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in query:
        query += "&retry_limit_seconds=60" if query else "retry_limit_seconds=60"  # Google's default is 15 minutes
    return pafs.FileSystem.from_uri(f"{scheme}?{query}" if query else scheme)[0]


def _locate(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or URI and the path in it. Raises SpecError for a URI that Arrow does not take."""
    if not is_uri(uri):
        return pafs.LocalFileSystem(), os.path.abspath(uri)
    head, question, query = uri.partition("?")
    scheme, _, rest = head.partition("://")
    host, _, path = rest.partition("/")
    if scheme in ("s3", "gs", "gcs"):
        system = _guarded(lambda: _store(f"{scheme}://{host}{question}{query}"), head)
        return system, f"{host}/{urllib.parse.unquote(path)}".rstrip("/")
    found: tuple[pafs.FileSystem, str] = _guarded(lambda: pafs.FileSystem.from_uri(uri), head)
    return found


def _guarded(action: Callable[[], Any], shown: str, absent: type[GemError] = SpecError) -> Any:
    """Run an action on a store; what it raises becomes an error that says what to do."""
    try:
        return action()
    except (pa.ArrowException, OSError) as e:
        text = str(e)
        for secret in filter(None, map(os.environ.get, _SECRET_NAMES)):
            text = text.replace(secret, "***")
    if "Unrecognized filesystem type" in text:
        raise SpecError(
            f"data folder {shown}: nobody knows this kind of URI; allowed are a local path, file://, "
            "s3://bucket/prefix and gs://bucket/prefix. Correct DATA_DIR."
        )
    if "URI" in text and "AWS Error" not in text:
        raise SpecError(f"data folder {shown}: {text}. Correct DATA_DIR.")
    if _REFUSED.search(text):
        raise DataError(
            f"{shown}: the store refused the credentials of this process ({text}). Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY (Google: GOOGLE_APPLICATION_CREDENTIALS) in the environment, and ask for the right "
            "to list and read there."
        )
    if _ABSENT.search(text):
        what = "no such file" if absent is DataError else "no such bucket or folder"
        raise absent(f"{shown}: {what} ({text}). Check the name" + ("." if absent is DataError else " in DATA_DIR."))
    raise DataError(
        f"{shown}: cannot be read ({text}). Check the network and the URI's endpoint_override, scheme and region, then "
        "try again."
    )
