"""Names and groups of surfaces. A group is a vertical model's; codes 0..2 are the reserved rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gem.data.schema import NUM_RESERVED
from gem.data.spec import SurfaceSpec

RESERVED_SURFACES = ("<pad>", "<null>", "<unknown>")


def group_surfaces(
    spec: SurfaceSpec, values: Sequence[str], rows: Mapping[str, int], old: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    """Readable names by code, group names, and the group of every code.

    A surface with at least `min_rows` training impressions is a group; the others together are `rest`. Reserved codes
    go to `rest`, or to the largest group where there is no rest.

    `old` are the groups of an earlier window: they stay, in their order and whatever their rows are now; new groups
    come behind them, by size, and a `rest` that is needed for the first time last.
    """
    names = [spec.names.get(v, v) for v in values]
    total: dict[str, int] = {}
    for value, name in zip(values, names, strict=True):
        total[name] = total.get(name, 0) + rows.get(value, 0)
    by_size = sorted(total, key=lambda n: (-total[n], n))
    groups = [*old, *(n for n in by_size if total[n] >= spec.min_rows and n not in old)]
    if set(total) - set(groups) or not groups:
        groups = groups if spec.rest in groups else [*groups, spec.rest]
    fallback = groups.index(spec.rest) if spec.rest in groups else 0
    of_name = {n: i for i, n in enumerate(groups)}
    group_of = [fallback] * NUM_RESERVED + [of_name.get(n, fallback) for n in names]
    return (*RESERVED_SURFACES, *names), tuple(groups), tuple(group_of)
