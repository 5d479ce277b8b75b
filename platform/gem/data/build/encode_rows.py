"""Canonical events and impressions to the columns of the store, but for the user and the cut."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.build import store_write
from gem.data.build.collect import order_of
from gem.data.encoding import HOUR, SURFACE, WEEKDAY, Encoder
from gem.data.keys import KeyIndex
from gem.data.spec import DatasetSpec


@functools.lru_cache(maxsize=2)
def _loaded(store: Path, inode: int, modified_ns: int) -> tuple[Encoder, KeyIndex]:
    """Encoder and index of ads, once per process and not once per shard; the numbers tell one store from the next."""
    return Encoder.load(store), KeyIndex(store_write.read_table(store / store_write.ADS, columns=["key"])["key"])


class RowEncoder:
    """Encodes rows of one store; ads become entity indices, values rows of vocabularies."""

    def __init__(self, spec: DatasetSpec, store: Path) -> None:
        self.spec = spec
        stamp = (store / store_write.ADS).stat()
        self.encoder, self.ads = _loaded(store, stamp.st_ino, stamp.st_mtime_ns)

    def events(self, rows: pa.Table) -> pa.Table:
        """Columns of a timeline partition; `user` is 0 until it is known."""
        return pa.table(
            {
                "user": pa.array(np.zeros(rows.num_rows, np.int32)),
                "known_ms": rows["known_ms"],
                "time_ms": rows["time_ms"],
                "ad": pa.array(self.ads.index_many(rows["ad"])),
                "kind": rows["kind"],
                "flags": rows["flags"],
                "surface": pa.array(self.encoder.surface_codes(rows["surface"])),
                "dwell": rows["dwell"],
                "order": pa.array(order_of(rows).astype(np.int32)),
                "dup": rows["dup"],
            }
        ).combine_chunks()

    def impressions(self, rows: pa.Table) -> pa.Table:
        """Columns of an impression partition; user 0, cut -1 and outcomes of logs 0 until they are known."""
        raw = {n[4:]: rows[n] for n in rows.column_names if n.startswith("ctx:")}
        context = self.encoder.context_columns(raw, rows["time_ms"].to_numpy(), rows["surface"])
        columns: dict[str, Any] = {
            "impression_id": rows["impression_id"],
            "user": pa.array(np.zeros(rows.num_rows, np.int32)),
            "ad": pa.array(self.ads.index_many(rows["ad"])),
            "time_ms": rows["time_ms"],
            "day": rows["day"].cast(pa.int32()),
            "cut": pa.array(np.full(rows.num_rows, -1, np.int32)),
            "surface": context.pop(SURFACE).cast(pa.int16()),
        }
        columns |= {f"{store_write.CONTEXT_PREFIX}{n}": context[n] for n in (HOUR, WEEKDAY, *raw)}
        for task, label in self.spec.labels.items():
            if label.table:
                columns[f"key_{task}"] = rows[f"key:{task}"]
                columns[f"own_{task}"] = pa.array(np.zeros(rows.num_rows, np.int8))
            else:
                columns[f"own_{task}"] = pc.fill_null(rows[f"label:{task}"], -1).cast(pa.int8())
            columns[f"label_{task}"] = columns[f"own_{task}"]
        columns |= {f"true_{n[5:]}": rows[n] for n in rows.column_names if n.startswith("true:")}
        columns["dup"] = rows["dup"]
        return pa.table(columns).combine_chunks()
