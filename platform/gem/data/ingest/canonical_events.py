"""Timeline events and label logs of one raw file or part, every row checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.hashing import as_int63, combine64, stable_hash64
from gem.data.ingest import columns, units
from gem.data.ingest.clock import Limits
from gem.data.ingest.impression_keys import impression_keys, key_columns
from gem.data.ingest.raw import Part, RawFile
from gem.data.ingest.row_reader import Canonical, RowReader, Slice, long_ids, nul_ids
from gem.data.ingest.spec_check import flag_names, kind_names
from gem.data.schema import DWELL_BUCKETS
from gem.data.spec import DatasetSpec, EventSource, FeatureSpec, TimeSpec

ITEM_MARK = "~"  # begins the key of an entity that an event describes by its features
_UNIT = "\x1f"

_DWELL_EDGES = 2.0 ** np.arange(DWELL_BUCKETS - 2)  # seconds: 1, 2, 4, …


def read_events(
    spec: DatasetSpec, source_index: int, file: RawFile | Path, part: Part | None = None, limits: Limits | None = None
) -> Canonical:
    """Columns: user, ad; time_ms, known_ms int64; kind uint8; flags uint16; surface string (null allowed); dwell uint8;
    order int64 (record number in the file; position in the list for list_before); dup int64: events equal in it are one
    event (over the impression table it equals the impressions' dup column; elsewhere a hash of the id, or of all fields
    where there is none; list events never collide within a user). Over the log of a label also `key:<task>` int64 or
    string (null allowed), as the impressions have it.

    known_ms is the later of time + available_after_ms and the time of arrival (`ingested`), if that is given. With
    `item` the ad is text: "~" and the JSON of the features that are not null, keys sorted (`item_features` reads it).
    With `list_before` (time L) the n items of a user stand 1 ms apart, the last one at L.
    Reasons: null_user null_ad null_id id_too_long bad_id null_time time_out_of_range future_time bad_flag unparsable.
    """
    source = spec.events[source_index]
    when = source.list_before or source.time
    assert when is not None  # spec_check refuses a source without either
    over_impressions = source.table == spec.impressions.table and source.list_before is None
    keys = {n: la.key for n, la in spec.labels.items() if la.table == source.table and la.key and source.time}
    extra = [*(key_columns(spec.impressions) if over_impressions else []), *keys.values()]
    reader = RowReader(spec, source.table, Slice(file, part, limits), [*_event_columns(source), *extra])
    user, time_ms = reader.ids(source.user, "null_user"), reader.times(when)
    size = len(user)
    out: dict[str, pa.Array] = {
        "user": user,
        "ad": pa.nulls(size, pa.int64()) if source.list_before else _ads(spec, source, reader),
        "time_ms": pa.array(time_ms),
        "known_ms": pa.array(_known(source, reader, time_ms)),
        "kind": pa.array(np.full(size, kind_names(spec).index(source.kind) + 1, dtype=np.uint8)),
        "flags": pa.array(_flags(spec, source, reader)),
        "surface": reader.category(source.surface) if source.surface else pa.nulls(size, pa.string()),
        "dwell": pa.array(_dwell(reader, source.dwell)),
        "order": pa.array(reader.raw.number),
    }
    if source.list_before:
        return _expand_lists(source, reader, out)
    out |= {f"key:{task}": reader.ids(column, None) for task, column in keys.items()}
    if over_impressions:
        imp = spec.impressions
        own = [columns.to_ids(reader.column(c), reader.where(c)) for c in (imp.user, imp.ad)]
        out["dup"] = pa.array(impression_keys(imp, reader, own[0], own[1], time_ms)[1])
    elif source.id:
        out["dup"] = pa.array(as_int63(stable_hash64(reader.ids(source.id, "null_id"), "event")))
    else:
        small = out["kind"].to_numpy().astype(np.int64) << 32  # small numbers in one word: one hash, not three
        small |= (out["flags"].to_numpy().astype(np.int64) << 16) | out["dwell"].to_numpy()
        parts = [out["user"], out["ad"], out["time_ms"], pa.array(small), *([out["surface"]] if source.surface else [])]
        out["dup"] = pa.array(as_int63(combine64(*(stable_hash64(p) for p in parts))))
    return reader.finish(out)


def read_label_log(
    spec: DatasetSpec, label: str, file: RawFile | Path, part: Part | None = None, limits: Limits | None = None
) -> Canonical:
    """Columns: key int64 or string, time_ms int64.

    Reasons: null_key id_too_long bad_id null_time time_out_of_range future_time unparsable.
    """
    what = spec.labels[label]
    assert what.table and what.key and what.time  # spec_check refuses a label log without them
    reader = RowReader(spec, what.table, Slice(file, part, limits), [what.key, what.time.column])
    return reader.finish({"key": reader.ids(what.key, "null_key"), "time_ms": pa.array(reader.times(what.time))})


def item_features(key: str) -> dict[str, Any] | None:
    """Features of an ad that only an event describes, from its key; None for the key of an ad of its own."""
    if not key.startswith(ITEM_MARK + "{"):
        return None
    try:
        out: dict[str, Any] = json.loads(key[len(ITEM_MARK) :])
    except json.JSONDecodeError:
        return None
    return out


def _event_columns(source: EventSource) -> Iterator[str]:
    yield source.user
    yield from ([source.ad] if source.ad else source.item.values())
    times = (source.time, source.list_before, source.dwell, source.ingested)
    yield from (when.column for when in times if when)
    yield from (column for column in (source.surface, source.action, source.id) if column)
    yield from source.flags.values()


def _known(source: EventSource, reader: RowReader, time_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    known = time_ms + source.available_after_ms
    return np.maximum(known, reader.arrival(source.ingested)) if source.ingested else known


def _ads(spec: DatasetSpec, source: EventSource, reader: RowReader) -> pa.Array:
    if source.ad:
        return reader.ids(source.ad, "null_ad")
    described = {f.name: f for f in spec.ads.features}
    parts = {name: _coded(reader, described[name], column) for name, column in sorted(source.item.items())}
    code = np.zeros(reader.size, np.int64)
    for codes, values in parts.values():
        code = np.unique(code * (len(values) + 1) + codes + 1, return_inverse=True)[1].reshape(-1)
    first = np.unique(code, return_index=True)[1].tolist() if reader.size else []
    keys: list[str | None] = []
    for row in first:
        item = {name: values[codes[row]] for name, (codes, values) in parts.items() if codes[row] >= 0}
        text = json.dumps(item, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        keys.append(ITEM_MARK + text if item else None)
    return reader.checked_ids(pa.array(keys, pa.string()).take(pa.array(code)), "null_ad")


def _coded(reader: RowReader, feature: FeatureSpec, column: str) -> tuple[npt.NDArray[np.int64], list[Any]]:
    """One item feature as (position of each row's value, -1 for null; the distinct values)."""
    if feature.kind == "numeric":
        values = reader.number_or_missing(column, feature)
    elif feature.kind == "multi":
        values = pc.binary_join(reader.multi(column, feature.separator), _UNIT)
    else:
        values = reader.category(column)
    coded = values.dictionary_encode()
    distinct = coded.dictionary.to_pylist()
    if feature.kind == "multi":
        distinct = [text.split(_UNIT) if text else [] for text in distinct]
    codes = pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, distinct


def _flags(spec: DatasetSpec, source: EventSource, reader: RowReader) -> npt.NDArray[np.uint16]:
    names = flag_names(spec)
    out = np.full(reader.size, sum(1 << names.index(n) for n in set(source.always)), dtype=np.uint16)
    labels = [w.column for w in spec.labels.values()] if source.table == spec.impressions.table else []
    for name, column in source.flags.items():
        # The reason that the impressions give for the same cell, so that one bad row is counted once.
        reason = "bad_label" if column in labels else "bad_flag"
        on = reader.binary(column, reason, flag_threshold(spec, source, name)) == 1
        out[on] |= np.uint16(1 << names.index(name))
    if source.action:
        actions = reader.category(source.action).dictionary_encode()
        bits = [1 << names.index(f) if (f := source.action_flags.get(a)) else 0 for a in actions.dictionary.to_pylist()]
        codes = pc.fill_null(actions.indices, len(bits)).to_numpy(zero_copy_only=False)
        out |= np.array([*bits, 0], np.uint16)[codes]
    return out


def flag_threshold(spec: DatasetSpec, source: EventSource, flag: str) -> float | None:
    """`at_least` of a flag over a rating: that of the label of the same column, the one of the same name first."""
    if source.table != spec.impressions.table:
        return None
    same = {n: w.at_least for n, w in spec.labels.items() if w.column and w.column == source.flags[flag]}
    return same.get(flag, next(iter(same.values()), None))


def _dwell(reader: RowReader, dwell: TimeSpec | None) -> npt.NDArray[np.uint8]:
    """Bucket: 0 unknown, 1 below a second, then 2 + floor(log2(seconds)), at most DWELL_BUCKETS - 1."""
    if dwell is None:
        return np.zeros(reader.size, dtype=np.uint8)
    values, bad = columns.to_floats(reader.column(dwell.column), reader.where(dwell.column))
    seconds = units.to_seconds(values.to_numpy(zero_copy_only=False).astype(np.float64), dwell.unit)
    known = np.isfinite(seconds) & (seconds >= 0)
    reader.mark(bad, "unparsable")
    reader.count("unknown_dwell", int((~known & np.asarray(values.is_valid())).sum()))
    bucket = 1 + np.searchsorted(_DWELL_EDGES, seconds, side="right")
    return np.where(known, bucket, 0).astype(np.uint8)


def _expand_lists(source: EventSource, reader: RowReader, per_list: dict[str, pa.Array]) -> Canonical:
    """One row per list to one row per item, oldest first; the last item stands at the list's time."""
    assert source.ad  # spec_check refuses a list without it
    raw = reader.column(source.ad)
    if not columns.is_list(raw.type):
        words = columns.text(raw) if columns.is_text(raw.type) else columns.category_text(raw)
        raw = pc.split_pattern(words, pattern=",")
    lists = columns.as_list(raw)
    items = columns.to_ids(lists.flatten(), reader.where(source.ad))
    parent = np.asarray(pc.list_parent_indices(lists), dtype=np.int64)
    null, wrong = np.asarray(items.is_null()), long_ids(items) | nul_ids(items)
    reader.count("null_list_items", int(null.sum()))
    reader.count("bad_list_items", int(wrong.sum()))
    known = ~null & ~wrong
    keep = known & reader.good()[parent]
    parent = parent[keep]
    lengths = np.bincount(parent, minlength=reader.size)
    starts = np.cumsum(lengths) - lengths
    position = np.arange(len(parent), dtype=np.int64) - starts[parent]
    out = {name: values.take(pa.array(parent)) for name, values in per_list.items()}
    back = pa.array(position - lengths[parent] + 1)
    out["ad"] = items.filter(pa.array(keep))
    out["time_ms"] = pc.add(out["time_ms"], back)
    out["known_ms"] = pc.add(out["known_ms"], back)
    out["order"] = pa.array(position)
    parts = [out[c] for c in ("user", "ad", "time_ms", "kind", "flags", "order")]
    out["dup"] = pa.array(as_int63(combine64(*(stable_hash64(p) for p in parts))))
    return reader.result(pa.table(out))
