"""Rules on tables and columns: refusals, types, quarantine, contract, nulls, duplicates, coverage, cardinality."""

from __future__ import annotations

from collections.abc import Iterator

from gem.data.build.sanity import MAX_CONFLICT_SHARE
from gem.data.ingest.spec_columns import column_uses
from gem.data.profile.checks import MEANING
from pipelines.check.finding import ERROR, HINT, OK, WARN, Finding, percent, some
from pipelines.check.gather import EXTRA, Facts, RoleFacts
from pipelines.check.measures import Measures

QUARANTINE_WARN = 0.01
DUPLICATE_WARN = 0.05
NULL_HINT = 0.5
NULL_JUMP = 0.1  # difference of null rates between a day and the others
MIN_DAY_ROWS = 30
COVERAGE_ERROR, COVERAGE_WARN = 0.5, 0.95
MANY_SURFACES = 200
ID_LIKE = 0.5  # distinct values per row
_HINTS = ("a surface with a name",)


def refused(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Everything that preprocess would refuse."""
    for where, message in facts.refused:
        yield Finding(ERROR, "refused", where, message, "preprocess stops here too: repair the file or the spec")
    if not facts.refused:
        names = {t: len(f) for t, f in facts.files.items()}
        what = f"{sum(names.values())} files of {len(names)} tables fit the spec"
        yield Finding(OK, "schema", "all tables", what, numbers={"files": names})


def types(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Columns that change type, come or go between the files of a table."""
    used = {(use.table, use.column) for use in column_uses(facts.spec)}
    for table, files in facts.files.items():
        seen: dict[str, dict[str, str]] = {}
        for file in files:
            for column, kind in file.families.items():
                seen.setdefault(column, {}).setdefault(kind, file.name)
        for column, kinds in seen.items():
            known = {k: f for k, f in kinds.items() if k != "null"}
            if len(known) > 1:
                what = "changes type between files: " + ", ".join(f"{k} in {f}" for k, f in known.items())
                todo = "write the column with one type in all files"
                level = ERROR if (table, column) in used else HINT
                yield Finding(level, "type", f"{table}.{column}", what, todo, {"types": list(known)})
            without = [f.name for f in files if column not in f.columns]
            if without:
                what = f"missing in {len(without)} of {len(files)} files: {some(without, 2)}"
                yield Finding(HINT, "type", f"{table}.{column}", what, "do not use it before all files have it")


def quarantine(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Rows that preprocess would put aside."""
    limit = facts.config.data.max_quarantine_share
    clean = True
    seen: set[tuple[str, ...]] = set()
    for role in facts.roles.values():
        bad = sum(role.quarantined.values())
        same = (role.table, *(f"{r} {n}" for r, n in sorted(role.quarantined.items())))
        if not bad or same in seen:
            continue
        seen.add(same)
        clean = False
        share = bad / max(1, role.raw_rows)
        level = ERROR if share > limit else WARN if share > QUARANTINE_WARN else HINT
        reasons = sorted(role.quarantined.items(), key=lambda r: -r[1])
        file, row = role.examples[reasons[0][0]][0]
        what = f"{bad:,} of {role.raw_rows:,} rows ({percent(share)}) go to the quarantine: "
        what += ", ".join(f"{r} {n:,}" for r, n in reasons) + f"; such as {row} in {file}"
        todo = f"repair the rows; above {percent(limit)} preprocess stops (data.max_quarantine_share)"
        yield Finding(level, "quarantine", role.title, what, todo, {"share": share, "reasons": role.quarantined})
    if clean and facts.roles:
        yield Finding(OK, "quarantine", "all tables", "every row can be read")


def contract(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Failures of the canonical contract (pandera), one line per column and check."""
    count = 0
    for role in facts.roles.values():
        found: dict[tuple[str, str], list[int | str]] = {}
        for case in role.contract:
            mine = found.setdefault((case["column"], case["check"]), [0, case["example"], case["file"]])
            mine[0] = int(mine[0]) + case["rows"]
        for (column, check), (rows, example, file) in found.items():
            if check == "one row per key":
                continue  # `duplicates` counts them over all files
            count += 1
            share = int(rows) / max(1, role.rows)
            level = HINT if check in _HINTS else ERROR
            if check.endswith(("log1p", "future")):
                level = WARN if share > QUARANTINE_WARN else HINT
            what = f"{int(rows):,} rows ({percent(share)}): {MEANING.get(check, check)}; such as {example} in {file}"
            where = f"{role.title} {column.replace('ctx:', '')}"
            yield Finding(level, "contract", where, what, f"expected: {check}", {"rows": rows, "share": share})
    if not count and facts.roles:
        yield Finding(OK, "contract", "all tables", "types, ranges and allowed sets hold on every row")


def nulls(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Columns that are empty, mostly empty, or suddenly emptier on one day."""
    empty: list[str] = []
    mostly: list[str] = []
    for role in facts.roles.values():
        for name, column in role.columns.items():
            if not column["rows"] or _own_extra(name) or role.key.startswith("events"):
                continue
            share = column["nulls"] / column["rows"]
            if share == 1:
                empty.append(f"{role.title}.{plain(name)}")
            elif share > NULL_HINT:
                mostly.append(f"{role.title}.{plain(name)} {percent(share)}")
    if empty:
        todo = "the model learns nothing from them: repair the export or take them out of the spec"
        yield Finding(WARN, "nulls", some(empty, 6), f"{len(empty)} columns have no value at all", todo)
    if mostly:
        yield Finding(HINT, "nulls", some(mostly, 6), f"{len(mostly)} columns are mostly empty")
    jumps = list(_null_jumps(facts))
    yield from jumps
    if not jumps and facts.roles:
        yield Finding(OK, "nulls", "impressions by day", "no column is emptier on one day than on the others")


def _null_jumps(facts: Facts) -> Iterator[Finding]:
    role = facts.roles.get("impressions")
    days = role.by_day if role else {}
    for name in sorted({n for one in days.values() for n in one["nulls"]}):
        rates = {d: one["nulls"].get(name, 0) / one["rows"] for d, one in days.items() if one["rows"] >= MIN_DAY_ROWS}
        if len(rates) < 2:
            continue
        middle = sorted(rates.values())[len(rates) // 2 if len(rates) % 2 else len(rates) // 2 - 1]
        far = {d: r for d, r in rates.items() if abs(r - middle) > NULL_JUMP}
        if not far or len(far) > len(rates) / 2:
            continue
        worst = max(far, key=lambda d: abs(far[d] - middle))
        what = f"{percent(far[worst])} null on {worst}, {percent(middle)} on a usual day ({len(far)} such days)"
        used = HINT if _own_extra(name) else WARN
        yield Finding(used, "null jump", f"impressions.{plain(name)}", what, "was the column lost in the export?", far)


def duplicates(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Rows that are there more than once."""
    role = facts.roles.get("impressions")
    if role is not None and role.rows:
        imp = facts.spec.impressions
        key = " + ".join(imp.duplicate_key or ([imp.id] if imp.id else [imp.user, imp.ad, imp.time.column]))
        again, same = role.keys["dup"].num_repeats, role.keys["row"].num_repeats
        share = again / role.rows
        conflicts = role.conflicts / role.rows
        numbers = {"by_key": again, "whole_rows": same, "share": share, "conflicts": role.conflicts}
        if conflicts > MAX_CONFLICT_SHARE:
            what = (
                f"{role.conflicts:,} rows ({percent(conflicts)}) share {key} with an impression of another ad or time"
            )
            todo = "preprocess stops: name columns that identify an impression in impressions.duplicate_key"
            yield Finding(ERROR, "duplicates", "impressions", what, todo, numbers)
        elif again:
            differ = max(0, again - same)
            what = f"{again:,} rows ({percent(share)}) repeat {key}; {same:,} of them are equal in every column"
            what += (
                f", {differ:,} differ{_differences(role)} and the copy with the most outcomes stays" if differ else ""
            )
            level = WARN if share > DUPLICATE_WARN or differ > MAX_CONFLICT_SHARE * role.rows else HINT
            yield Finding(
                level, "duplicates", "impressions", what, "they are dropped; mend the log that repeats", numbers
            )
        else:
            yield Finding(OK, "duplicates", "impressions", f"no row repeats {key}", numbers=numbers)
    for side in ("users", "ads"):
        role = facts.roles.get(side)
        own = role is not None and role.table != facts.spec.impressions.table  # a log has many rows of a user
        if role is not None and own and role.keys["key"].num_repeats:
            again = role.keys["key"].num_repeats
            example = next((c["example"] for c in role.contract if c["check"] == "one row per key"), "")
            what = f"{again:,} rows repeat a key" + (f", such as {example}" if example else "") + "; one row is used"
            todo = "write one row per key"
            yield Finding(WARN, "duplicates", role.title, what, todo, {"rows": again, "share": again / role.rows})


def _differences(role: RoleFacts) -> str:
    """In which columns repeated rows differ."""
    top = sorted(role.differ.items(), key=lambda c: -c[1])
    return f" (in {some([f'{plain(c)} {n:,}' for c, n in top], 3)})" if top else ""


def coverage(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Are the keys of one table found in the other?"""
    imp = facts.roles.get("impressions")
    if imp is None or not imp.rows:
        return
    for side, name in (("users", "user"), ("ads", "ad")):
        role = facts.roles.get(side)
        if role is None or role.table == imp.table:
            continue
        keys, rows = imp.keys[name].found_in(role.keys["key"])
        back, _ = role.keys["key"].found_in(imp.keys[name])
        level = ERROR if rows < COVERAGE_ERROR else WARN if rows < COVERAGE_WARN else OK
        what = f"{percent(keys)} of the {name}s and {percent(rows)} of the rows of impressions are in {role.title}; "
        what += f"{percent(back)} of its keys were shown"
        todo = "is it the same key, with the same spelling? Missing ones have no features" if level != OK else ""
        yield Finding(level, "coverage", f"impressions -> {role.title}", what, todo,
                      {"keys": keys, "rows": rows, "back": back})  # fmt: skip
    for name, label in facts.spec.labels.items():
        role = facts.roles.get(f"labels.{name}")
        if label.table and role is not None and role.rows:
            keys, rows = role.keys["key"].found_in(imp.keys[f"key:{name}"])
            level = ERROR if rows < 0.01 else WARN if rows < COVERAGE_WARN else OK
            what = f"{percent(rows)} of the outcomes belong to an impression of the log"
            todo = "outcomes without an impression count for nothing: same key, same period?" if level != OK else ""
            yield Finding(level, "coverage", f"{role.title} -> impressions", what, todo, {"rows": rows, "keys": keys})
    events = [r for k, r in facts.roles.items() if k.startswith("events") and r.table != imp.table]
    for role in events:
        keys, rows = role.keys["user"].found_in(imp.keys["user"])
        level = WARN if rows < 0.01 and role.rows else OK
        what = f"{percent(keys)} of the users of these events were shown an impression"
        if "ads" in facts.roles:
            _, known = role.keys["ad"].found_in(facts.roles["ads"].keys["key"])
            what += f"; {percent(known)} of the events are of known ads"
        todo = "the histories belong to nobody: same user key?" if level != OK else ""
        yield Finding(level, "coverage", f"{role.title} -> impressions", what, todo, {"keys": keys, "rows": rows})


def cardinality(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Features with one value only, or with nearly as many values as rows."""
    constant: list[str] = []
    for key in ("impressions", "users", "ads"):
        role = facts.roles.get(key)
        if role is None or role.rows < MIN_DAY_ROWS:
            continue
        for name, sample in role.keys.items():
            column = name.removeprefix("value:")
            if not name.startswith("value:") or column.startswith(f"ctx:{EXTRA}"):
                continue
            if sample.num_keys == 1 and sample.num_rows == role.rows:
                constant.append(f"{role.title}.{plain(column)}")
            elif sample.num_keys > ID_LIKE * max(1, sample.num_rows) and sample.num_rows >= MIN_DAY_ROWS:
                what = f"{sample.num_keys:,} values in {sample.num_rows:,} rows: an id, hardly a feature"
                where = f"{role.title}.{plain(column)}"
                numbers = {"distinct": sample.num_keys, "singletons": sample.num_singletons}
                yield Finding(
                    HINT, "cardinality", where, what, "raise min_count, use hash_rows or leave it out", numbers
                )
        for name, summary in role.columns.items():
            own = name.startswith("ctx:") or (key != "impressions" and name != "key")
            if own and not _own_extra(name) and "min" in summary and summary["min"] == summary["max"]:
                constant.append(f"{role.title}.{plain(name)}")
    if len(measures.surfaces) > MANY_SURFACES:
        what = f"{len(measures.surfaces):,} different surfaces: models are made per surface"
        yield Finding(WARN, "cardinality", "impressions.surface", what, "is it the right column?")
    if constant:
        yield Finding(HINT, "cardinality", some(constant, 6), f"{len(constant)} features have a single value",
                      "they carry no information: leave them out")  # fmt: skip


def plain(column: str) -> str:
    """A canonical column by the name the spec gives it."""
    return column.removeprefix("ctx:").removeprefix(EXTRA)


def _own_extra(name: str) -> bool:
    return name.startswith(f"ctx:{EXTRA}")


RULES = (refused, types, quarantine, contract, nulls, duplicates, coverage, cardinality)
