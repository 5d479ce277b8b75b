"""Pieces between the passes of preprocess: Arrow files of one shard, gone when the store stands."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc

ENDING = ".arrow"


@dataclass(frozen=True)
class Places:
    """store: the feature store being built, with the files of the store before. work: pieces between the passes."""

    store: Path
    work: Path

    def built(self, shard: int) -> Path:
        """Folder of what the second pass made of a shard."""
        return self.work / "built" / shard_name(shard)


def shard_name(shard: int) -> str:
    """Folder of one shard's pieces."""
    return f"shard-{shard:03d}"


def write_piece(path: Path, table: pa.Table) -> None:
    """Write one table as `<path>.arrow`, whole or not at all. Not compressed: it is mapped, not read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    with ipc.new_file(str(beside), table.schema, options=ipc.IpcWriteOptions(unify_dictionaries=True)) as writer:
        writer.write_table(table)
    beside.replace(path.with_name(path.name + ENDING))


def write_shards(path: Path, table: pa.Table, bounds: Sequence[int]) -> None:
    """Write one table as one piece whose record batches are the rows between neighbouring `bounds`: one per shard.

    A shard without rows has an empty batch: it carries the columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    whole = table.unify_dictionaries().combine_chunks()
    arrays = [c.chunk(0) if c.num_chunks else pa.array([], c.type) for c in whole.columns]
    rows = pa.RecordBatch.from_arrays(arrays, schema=whole.schema)
    with ipc.new_file(str(beside), whole.schema) as writer:
        for start, end in itertools.pairwise(bounds):
            writer.write_batch(rows.slice(start, end - start))
    beside.replace(path.with_name(path.name + ENDING))


def has_piece(path: Path) -> bool:
    """Is there a piece of that name?"""
    return path.with_name(path.name + ENDING).is_file()


def read_piece(path: Path, shard: int | None = None) -> pa.Table:
    """Map one piece, or one shard's batch of it."""
    with pa.memory_map(str(path.with_name(path.name + ENDING))) as source:
        reader = ipc.open_file(source)
        return reader.read_all() if shard is None else pa.Table.from_batches([reader.get_batch(shard)])


def load_pieces(folder: Path, types: Mapping[str, str], shard: int | None = None) -> pa.Table | None:
    """All pieces of a folder in name order, or one shard's batches of them; None if there is none.

    Key columns are cast to their type over all files.
    """
    parts = []
    for path in sorted(folder.glob(f"*{ENDING}")):
        table = read_piece(path.with_name(path.name.removesuffix(ENDING)), shard)
        for column in types:
            if column in table.column_names and table.schema.field(column).type != types[column]:
                at = table.column_names.index(column)
                table = table.set_column(at, column, table[column].cast(types[column]))
        parts.append(table)
    if not parts:
        return None
    return pa.concat_tables(parts, promote_options="permissive").unify_dictionaries().combine_chunks()
