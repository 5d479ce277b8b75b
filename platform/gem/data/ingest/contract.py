"""The contract between a spec and all files of its tables: columns, their types, day partitions, checksums.

Only headers are read; a file that breaks the contract is named, with what is different and what to do.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from gem.data.ingest.columns import is_list, is_text
from gem.data.ingest.made_columns import file_number, made_names
from gem.data.ingest.raw import RawFile, Stored, other_separator, stored_schema
from gem.data.ingest.sources import DataFolder, over_files, partition_day
from gem.data.ingest.spec_columns import ColumnUse, column_uses
from gem.data.spec import DatasetSpec, TableSpec
from gem.errors import DataError, SpecError, suggest

SUMS = "SHA256SUMS"
_SUM_LINE = re.compile(r"^(\\?)([0-9a-fA-F]{64}) [ *](.+)$")
_MAX_NAMED = 10
_REPAIR = (
    "Write the file again with the type the others have, or leave its day out. Nothing was read; earlier versions of "
    "the store are as they were."
)

Files = Mapping[str, Sequence[RawFile]]


def check_columns(spec: DatasetSpec, files: Files) -> None:
    """Check that every file has the columns the spec names, each once and of the type that it has in the other files.

    More columns than the spec names are fine; a column may be new from a feature's `since` on. Raises SpecError where
    the spec is wrong and DataError where one file differs from the others.
    """
    uses: dict[str, list[ColumnUse]] = {}
    for use in column_uses(spec):
        uses.setdefault(use.table, []).append(use)
    for name, mine in uses.items():
        _check_table(name, spec.tables[name], mine, files.get(name, ()))


def check_partitions(spec: DatasetSpec, files: Files, allow_missing: bool) -> None:
    """Raise DataError if days are missing between the first and the last day folder of a table.

    Only tables of which every file lies in a day folder (`day=`, `date=` or `dt=`) are looked at.
    """
    if allow_missing:
        return
    for name in spec.tables:
        days = [partition_day(file) for file in files.get(name, ())]
        present = {day for day in days if day is not None}
        if len(present) < 2 or None in days:
            continue
        first, last = min(present), max(present)
        between = (first + dt.timedelta(days=i) for i in range((last - first).days))
        missing = [day.isoformat() for day in between if day not in present]
        if missing:
            raise DataError(
                f'table "{name}": no partition for {_some(missing)}, between {first} and {last}. Deliver the missing '
                "days (a day without rows is a file with a header and no rows), or accept the gap with "
                "--set data.allow_missing_days=true"
            )


def check_sums(folder: DataFolder, hashes: Mapping[str, str]) -> int:
    """Compare known hashes (path below the folder -> hex sha256) with the folder's SHA256SUMS, if it has one.

    Returns how many files were compared. Raises DataError for a listed file that is not there, and for one whose
    content is another.
    """
    listed = read_sums(folder)
    absent = [name for name in listed if name not in hashes and folder.file(name) is None]
    if absent:
        raise DataError(
            f"{folder}/{SUMS}: {len(absent)} listed files are not there: {_some(absent)}. Deliver them, or take "
            "their lines out."
        )
    for name in sorted(listed.keys() & hashes.keys()):
        if listed[name] != hashes[name]:
            raise DataError(
                f"{folder}/{name}: the file is not the one in {SUMS}: it has sha256 {hashes[name]}, listed is "
                f"{listed[name]}. It was damaged or changed after the list was made: fetch it again, or renew the list."
            )
    return len(listed.keys() & hashes.keys())


def read_sums(folder: DataFolder) -> dict[str, str]:
    """Path -> hex sha256 from the folder's SHA256SUMS (as `sha256sum` writes it); {} without one. Raises DataError."""
    file = folder.file(SUMS)
    if file is None:
        return {}
    out = {}
    for number, line in enumerate(file.read().decode("utf-8", "replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _SUM_LINE.match(line)
        if not found:
            raise DataError(f"{file}, line {number}: not a line of sha256sum: {line[:80]!r}. Make the list again.")
        name = found[3].replace("\\n", "\n").replace("\\\\", "\\") if found[1] else found[3]
        out[name.removeprefix("./")] = found[2].lower()
    return out


@dataclass
class _Reference:
    """First file in which a column has a type."""

    file: RawFile
    family: str
    kind: str


@dataclass
class _Columns:
    """What was met of the columns of one table so far."""

    table: str
    names: dict[str, RawFile] = field(default_factory=dict)
    types: dict[str, _Reference] = field(default_factory=dict)


def _check_table(name: str, table: TableSpec, uses: list[ColumnUse], files: Sequence[RawFile]) -> None:
    remote = any(not file.is_local for file in files)
    schemas = over_files(lambda file: stored_schema(table, file), files, remote)
    _check_numbers(name, table, files)
    met = _Columns(name)
    for file, stored in zip(files, schemas, strict=True):
        _check_made(name, table, file, stored.names)
        for column in stored.names:
            met.names.setdefault(column, file)
    for file, stored in zip(files, schemas, strict=True):
        _check_names(met, table, uses, (file, stored))
    wanted = sorted({use.column for use in uses})
    for file, stored in zip(files, schemas, strict=True):
        for column in wanted:
            if stored.num_rows and column in stored.types:
                _check_type(met, column, stored.types[column], file)
    _check_null_types(met, wanted, list(zip(files, schemas, strict=True)))


def _check_names(met: _Columns, table: TableSpec, uses: list[ColumnUse], what: tuple[RawFile, Stored]) -> None:
    file, stored = what
    names = [*stored.names, *(n for n in made_names(table, file) if n not in stored.names)]
    twice = sorted({n for n in stored.names if stored.names.count(n) > 1} & {use.column for use in uses})
    if twice:
        raise SpecError(f"{file}: the header names {twice} more than once. Rename the columns.")
    day = partition_day(file)
    for use in uses:
        if use.column in names or (use.since and day and day.isoformat() < use.since):
            continue
        other = met.names.get(use.column)
        if other is not None and partition_day(file) is not None:
            raise DataError(
                f'{file}: column "{use.column}" ({use.where}) is missing; had: {use.column} in {other}; has now: '
                f"{', '.join(stored.names)}. Write the file again with the column, or leave its day out."
            )
        raise SpecError(
            f'{use.where}: table "{met.table}" has no column "{use.column}".{suggest(use.column, names)} '
            f"{file} has: {', '.join(names)}.{_hint(table, use, stored.names, other)} Correct the spec."
        )


def _hint(table: TableSpec, use: ColumnUse, names: list[str], has_it: RawFile | None) -> str:
    other = other_separator(table, names)
    if other:
        hint = f" Is the separator right? The header has one column, separated by {other!r}: "
        return f"{hint}set tables.{use.table}.separator."
    if use.since:
        return f" `since: {use.since}` excuses only files in folders of earlier days (day=YYYY-MM-DD)."
    return f" {has_it} has it: write this file again with the column, or leave the file out." if has_it else ""


def _check_made(name: str, table: TableSpec, file: RawFile, stored: list[str]) -> None:
    """A column that the spec makes must not hide one of the file. (One of a hive folder gives way to the file's.)"""
    fields = {n: f"constants.{n}" for n in table.constants}
    fields |= dict.fromkeys(re.compile(table.path_columns or "").groupindex, "path_columns")
    fields |= {table.row_number: "row_number"} if table.row_number else {}
    fields |= {table.row_time.column: "row_time.column"} if table.row_time else {}
    for column in stored:
        if column in fields:
            raise SpecError(
                f'tables.{name}.{fields[column]}: {file} has a column "{column}" of its own. Choose another name.'
            )


def _check_numbers(name: str, table: TableSpec, files: Sequence[RawFile]) -> None:
    if not table.row_number:
        return
    seen: dict[int, RawFile] = {}
    for file in files:
        other = seen.setdefault(file_number(file), file)
        if other is not file:
            raise DataError(
                f"tables.{name}.row_number: {other} and {file} get the same numbers by chance of names. Rename one."
            )


def _check_type(met: _Columns, column: str, kind: pa.DataType, file: RawFile) -> None:
    now = family(kind)
    if now == "null":
        return
    had = met.types.setdefault(column, _Reference(file, now, str(kind)))
    if had.family != now:
        raise DataError(
            f'{file}: column "{column}" of table "{met.table}" changed its type; had: {had.kind} ({had.family}) in '
            f"{had.file}; has now: {kind} ({now}). {_REPAIR}"
        )


def _check_null_types(met: _Columns, wanted: list[str], files: list[tuple[RawFile, Stored]]) -> None:
    for file, stored in files:
        for column in wanted:
            kind, had = stored.types.get(column), met.types.get(column)
            if had and stored.num_rows and kind is not None and family(kind) == "null":
                raise DataError(
                    f'{file}: column "{column}" of table "{met.table}" has no type any more (every value is null); '
                    f"had: {had.kind} in {had.file}. {_REPAIR}"
                )


def family(kind: pa.DataType) -> str:
    """Types that read alike: integer, float, text, bool, timestamp, list<…>, null, or the type's own name."""
    if is_text(kind):
        return "text"
    if is_list(kind):
        return f"list<{family(kind.value_type)}>"
    if pa.types.is_dictionary(kind):
        return family(kind.value_type)
    for name, test in (
        ("integer", pa.types.is_integer),
        ("float", pa.types.is_floating),
        ("bool", pa.types.is_boolean),
        ("timestamp", pa.types.is_timestamp),
        ("decimal", pa.types.is_decimal),
        ("null", pa.types.is_null),
    ):
        if test(kind):
            return name
    return str(kind)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
