"""From a feature store to one folder of flat .npy files that any peer can map; runs in our environment.

`export(store, folder, Options(history=50))` writes, for N impressions (training days, validation day, test day, in the
store's order: by day, then user and time within a day):

    ids.npy        [N, F] int32   codes of the single-valued fields, in the order of meta["fields"]
    multi_<f>.npy  [N, M] int32   codes of a multi-valued field, 0 = padding
    numeric.npy    [N, D] float32 standardised numbers, missing flags that vary, vectors; meta["numeric"] names them
    hist_<f>.npy   [N, L] int32   newest L events before the impression's cut, newest last, 0 = padding in front
    labels.npy     [N, K] uint8, mask.npy [N, K] uint8   in the order of meta["tasks"], on the entire space
    user.npy, ad.npy [N] int32 (entity index), surface.npy, day.npy [N] int16, cut.npy [N] int32,
    time_ms.npy, impression_id.npy [N] int64, true_<task>.npy [N] float32 (generated data only)
    rates.npy      [N, R] float32 past-only rates (see `past.past_rates`), matches.npy [N, M] meetings in the timeline
    meta.json      names, vocabulary sizes (codes 0 padding, 1 null, 2 unknown), splits {name: [start, stop]}

A store without a split has one split, "train".  `python -m tests.benchmarks.peers.export STORE FOLDER --history 50`
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem.data.rows import SideRows
from gem.data.schema import NUM_RESERVED, Field, Side
from gem.data.store import FeatureStore, Impressions, Timelines
from tests.benchmarks.peers.past import I64, Meetings, Outcomes, pair, past_meetings, past_rates

VERSION = 1
MAX_MULTI = 8  # values of a multi-valued field that are kept
CHUNK = 4096  # rows whose history is gathered at once
DELAY_MS = 60_000  # until the outcome of an impression is known, where the spec says nothing


@dataclass(frozen=True)
class Options:
    """history: L; events: "all", or "flagged" for those that carry any flag (a click, a like, …);

    rates: whether to write rates.npy and matches.npy; last_rows: only so many rows at the end of training (speed runs);
    sequence_fields: how many single-valued ad fields a history carries (ad id first, then by vocabulary).
    """

    history: int = 50
    events: str = "all"
    rates: bool = True
    last_rows: int = 0
    sequence_fields: int = 2


def export(store: FeatureStore, folder: Path, options: Options = Options()) -> dict[str, Any]:
    """Write the folder (see the module) and return its meta. Raises ValueError for unknown `events`."""
    if options.events not in ("all", "flagged"):
        raise ValueError(f"events: got {options.events!r}; allowed are 'all' and 'flagged'")
    folder.mkdir(parents=True, exist_ok=True)
    imp, splits = _rows(store, options.last_rows)
    timelines = store.timelines()
    meta: dict[str, Any] = {
        "version": VERSION,
        "store": store.hash,
        "history": options.history,
        "events": options.events,
        "tasks": [t.name for t in store.schema.tasks],
        "splits": splits,
        "surfaces": list(store.schema.surfaces),
        "days": list(imp.days),
        "rows": len(imp),
    }
    for name in ("user", "ad", "surface", "day", "cut", "time_ms", "impression_id"):
        np.save(folder / f"{name}.npy", getattr(imp, name))
    np.save(folder / "labels.npy", imp.labels.astype(np.uint8))
    np.save(folder / "mask.npy", imp.mask.astype(np.uint8))
    for name, p in imp.true.items():
        np.save(folder / f"true_{name}.npy", p)
    meta |= _features(store, imp, folder, splits["train"])
    meta["sequences"] = _histories(store, timelines, imp, folder, options)
    if options.rates:
        rates, meta["rates"] = rate_table(store, imp)
        np.save(folder / "rates.npy", rates)
        matches, meta["matches"] = match_table(store, timelines, imp)
        np.save(folder / "matches.npy", matches)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def _rows(store: FeatureStore, last_rows: int) -> tuple[Impressions, dict[str, list[int]]]:
    if "split" not in store.manifest:
        imp, ends = store.impressions(), []
    else:
        split = store.split
        imp = store.impressions([*split.train_days, split.validation_day, split.test_day])
        ends = [int(np.searchsorted(imp.day, len(split.train_days) + i)) for i in (0, 1)]
    bounds = [0, *ends, len(imp)]
    if last_rows and last_rows < bounds[1]:
        drop = bounds[1] - last_rows
        imp = imp.take(np.arange(drop, len(imp)))
        bounds = [0, *(b - drop for b in bounds[1:])]
    names = ("train", "validation", "test")[: len(bounds) - 1]
    return imp, {n: [bounds[i], bounds[i + 1]] for i, n in enumerate(names)}


def _features(store: FeatureStore, imp: Impressions, folder: Path, train: list[int]) -> dict[str, Any]:
    """Write ids, multi-valued fields and numbers of all three sides; returns their names."""
    context = np.arange(len(imp)) if imp.rows is None else imp.rows
    sides = (
        ("user", store.schema.user, store.users.side_rows, imp.user),
        ("ad", store.schema.ad, store.ads.side_rows, imp.ad),
        ("context", store.schema.context, imp.context, context),
    )
    fields, multi, ids, numbers, names = [], [], [], [], []
    for side, schema, rows, at in sides:
        for f in schema.fields:
            if not f.multi:
                fields.append({"name": f.name, "side": side, "rows": f.rows})
                ids.append(rows.field(f.name)[at].astype(np.int32))
                continue
            values = _padded(rows, f, at)
            np.save(folder / f"multi_{f.name}.npy", values)
            multi.append({"name": f.name, "side": side, "rows": f.rows, "width": values.shape[1]})
        found, labels = _numbers(schema, rows, at)
        numbers.append(found)
        names += labels
    matrix = np.concatenate(numbers, 1)
    varies = np.ptp(matrix[train[0] : train[1]], axis=0) > 0
    np.save(folder / "ids.npy", np.stack(ids, 1))
    np.save(folder / "numeric.npy", np.ascontiguousarray(matrix[:, varies]))
    return {"fields": fields, "multi": multi, "numeric": [n for n, v in zip(names, varies, strict=True) if v]}


def _numbers(side: Side, rows: SideRows, at: NDArray[np.integer]) -> tuple[NDArray[np.float32], list[str]]:
    vectors = [f"{name}_{i}" for name, width in side.vectors for i in range(width)]
    names = [*side.numeric, *(f"{n}_missing" for n in side.numeric), *vectors]
    return np.concatenate([rows.numeric[at], rows.vectors[at]], 1), names


def _padded(rows: SideRows, field: Field, at: NDArray[np.integer]) -> NDArray[np.int32]:
    """The first values of a multi-valued field, [N, M], zeros behind them."""
    offsets, values = rows.multi[field.name]
    start, length = offsets[at], offsets[at + 1] - offsets[at]
    width = int(np.clip(length.max(initial=1), 1, max(MAX_MULTI, field.hashes)))
    place = np.arange(width)
    inside = place < length[:, None]
    where = np.where(inside, start[:, None] + place, 0)
    return np.where(inside, values[where] if len(values) else 0, 0).astype(np.int32)


def group_fields(side: Side) -> list[Field]:
    """Single-valued ad fields that group ads: the ad id, then the two of the largest vocabularies."""
    single = [f for f in side.fields if not f.multi]
    return [single[0], *sorted(single[1:], key=lambda f: -f.rows)[:2]]


def _histories(
    store: FeatureStore, timelines: Timelines, imp: Impressions, folder: Path, options: Options
) -> list[dict[str, str]]:
    side = store.schema.ad
    single = [f for f in side.fields if not f.multi]
    # The author-like field: the spec's first of those with a large vocabulary.
    large = [f for f in single[1:] if f in group_fields(side)]
    fields = [single[0], *large][: options.sequence_fields]
    keep = timelines.flags > 0 if options.events == "flagged" else np.ones(len(timelines.ad), np.bool_)
    kept = np.flatnonzero(keep)
    before = np.concatenate([[0], np.cumsum(keep)])  # kept events before each event
    base = timelines.offsets[imp.user]
    low, high = before[base], before[base + imp.cut]
    codes = [store.ads.side_rows.field(f.name).astype(np.int32) for f in fields]
    shape = (len(imp), options.history)
    files = [
        np.lib.format.open_memmap(folder / f"hist_{f.name}.npy", mode="w+", dtype=np.int32, shape=shape) for f in fields
    ]
    for start in range(0, len(imp), CHUNK):
        part = slice(start, start + CHUNK)
        at = high[part, None] - options.history + np.arange(options.history)
        inside = at >= low[part, None]
        ads = timelines.ad[kept[np.where(inside, at, 0)]] if len(kept) else np.zeros(at.shape, np.int32)
        for file, code in zip(files, codes, strict=True):
            file[part] = np.where(inside, code[ads], 0)
    for file in files:
        file.flush()
    return [{"name": f"hist_{f.name}", "of": f.name} for f in fields]


def outcome_delays_ms(store: FeatureStore) -> list[int]:
    """Per task how long after an impression its outcome is taken as known: the label's window, else the log's delay."""
    if not (store.path / "spec.json").exists():
        return [DELAY_MS for _ in store.schema.tasks]
    spec = store.spec
    log = max([e.available_after_ms for e in spec.events if e.table == spec.impressions.table], default=DELAY_MS)
    windows = [spec.labels[t.name].window_hours for t in store.schema.tasks]
    return [int(w * 3_600_000) if w else log for w in windows]


def rate_table(store: FeatureStore, imp: Impressions) -> tuple[NDArray[np.float32], list[str]]:
    """Past-only smoothed rates of the impressions: by user, ad, its groups, surface and user x surface; and names."""
    ads = store.ads.side_rows
    surface = imp.surface.astype(np.int64)
    keys = {"user": imp.user.astype(np.int64), "ad": imp.ad.astype(np.int64), "surface": surface}
    groups = {f.name: ads.field(f.name)[imp.ad].astype(np.int64) for f in group_fields(store.schema.ad)[1:]}
    groups |= {f.name: _padded(ads, f, imp.ad)[:, 0].astype(np.int64) for f in store.schema.ad.fields if f.multi}
    keys |= groups
    keys["user_surface"] = pair(imp.user, surface, 1 + int(surface.max(initial=0)))
    for name, code in groups.items():
        keys[f"user_{name}"] = pair(imp.user, code, 1 + int(code.max(initial=0)))
    known = imp.time_ms[:, None] + np.asarray(outcome_delays_ms(store), np.int64)
    tasks = tuple(t.name for t in store.schema.tasks)
    return past_rates(Outcomes(np.asarray(imp.time_ms), keys, imp.labels, imp.mask, known, tasks))


def match_table(store: FeatureStore, timelines: Timelines, imp: Impressions) -> tuple[NDArray[np.float32], list[str]]:
    """How often and when the user met this ad, its groups, or anything, in the timeline before the cut; and names."""
    ads, schema = store.ads.side_rows, store.schema
    events, rows = np.arange(len(timelines.ad)), np.arange(len(imp))
    keys: dict[str, tuple[tuple[I64, I64], tuple[I64, I64]]] = {
        "any": ((events, np.zeros_like(events)), (rows, np.zeros_like(rows))),
        "ad": _known((events, timelines.ad), (rows, imp.ad), 1),
    }
    for f in group_fields(schema.ad)[1:]:
        code = ads.field(f.name)
        keys[f.name] = _known((events, code[timelines.ad]), (rows, code[imp.ad]), NUM_RESERVED)
    for f in schema.ad.fields:
        if f.multi:
            offsets, values = ads.multi[f.name]
            pairs = [_spread(offsets, values, at) for at in (timelines.ad, imp.ad)]
            keys[f.name] = _known(pairs[0], pairs[1], NUM_RESERVED)
    kinds = [timelines.kind == k for k in range(2, 1 + len(schema.kinds))]
    flags = [(timelines.flags >> b) & 1 for b in range(min(2, len(schema.flags)))]
    weights = np.stack([c.astype(np.float32) for c in (*kinds, *flags)], 1)
    return past_meetings(
        Meetings(
            user_E=np.repeat(np.arange(len(timelines.offsets) - 1), timelines.lengths()),
            number_E=events - np.repeat(timelines.offsets[:-1], timelines.lengths()),
            time_ms_E=np.asarray(timelines.time_ms),
            weights_EW=weights,
            weights=(*schema.kinds[1:], *schema.flags[:2]),
            user_N=imp.user,
            cut_N=imp.cut,
            time_ms_N=np.asarray(imp.time_ms),
            keys=keys,
        )
    )


def _known(entries: tuple[Any, Any], rows: tuple[Any, Any], first: int) -> tuple[tuple[I64, I64], tuple[I64, I64]]:
    """Drop codes below `first`: what is unknown is not the same unknown thing."""
    (owner_E, code_E), (owner_N, code_N) = entries, rows
    e, n = code_E >= first, code_N >= first
    return (owner_E[e], code_E[e].astype(np.int64)), (owner_N[n], code_N[n].astype(np.int64))


def _spread(offsets: I64, values: NDArray[np.int32], at: NDArray[np.integer]) -> tuple[I64, I64]:
    """(owner, value) of every value of the entities `at`."""
    length = offsets[at + 1] - offsets[at]
    owner = np.repeat(np.arange(len(at)), length)
    first = np.cumsum(length) - length
    return owner, values[np.repeat(offsets[at] - first, length) + np.arange(len(owner))].astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a feature store for the peers")
    parser.add_argument("store", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--history", type=int, default=Options.history)
    parser.add_argument("--events", choices=("all", "flagged"), default=Options.events)
    parser.add_argument("--last-rows", type=int, default=Options.last_rows)
    parser.add_argument("--no-rates", action="store_true")
    a = parser.parse_args()
    options = Options(history=a.history, events=a.events, rates=not a.no_rates, last_rows=a.last_rows)
    meta = export(FeatureStore.open(a.store, verify=False), a.folder, options)
    print(json.dumps({k: meta[k] for k in ("rows", "splits", "numeric", "sequences")}))


if __name__ == "__main__":
    main()
