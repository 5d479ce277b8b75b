"""The check as one HTML page: findings first, then pictures, then the tables behind them. No scripts, no assets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.check import pictures
from pipelines.check.finding import ERROR, HINT, OK, WARN, Finding, percent, tally
from pipelines.check.gather import Facts, RoleFacts
from pipelines.check.measures import Measures
from pipelines.check.overview import columns_overview, facts_overview, rates_overview, tables_overview
from pipelines.report.style import CSS, badge, card, esc, figure, section, table

_BADGES = {ERROR: "bad", WARN: "warn", HINT: "plain", OK: "good"}
EXPLAINED = (
    ("ERROR", "Training on these data would fail or mislead; the command ends with status 2."),
    ("WARN", "Somebody should look before a model is trained."),
    ("HINT", "Worth knowing; nothing has to be done."),
    ("Interval", "Wilson's 95 % interval of a rate. Rates, drift and AUC are measured on a sample of whole rows, "
     "at most 20,000 a day, chosen by hash; counts, ranges and nulls are exact."),
    ("PSI", "Population stability index between the last day and the days before: 0 is the same, above 0.1 look, above "
     "0.25 strong. The black tick is what two samples of one distribution would show on average."),
    ("AUC alone", "How well a single column orders the label, ties counted half; categories are scored with the rate "
     "that other users show. A feature above 0.9 is nearly always known only after the fact."),
)  # fmt: skip


def render_page(name: str, findings: Sequence[Finding], facts: Facts | None, measures: Measures, sub: str) -> str:
    """The page as text; `facts` is None if the spec itself could not be read."""
    parts = [_verdict(findings)]
    if facts is not None:
        parts.append(_facts(facts, measures))
    parts.append(section("Findings", _findings([f for f in findings if f.level != OK])))
    if facts is not None:
        parts.append(
            section("Pictures", f'<div class="pics">{_pictures(facts, measures)}</div>' if facts.roles else "")
        )
        parts += [_table("Tables", *tables_overview(facts)), _table("Label rates", *rates_overview(measures))]
        parts.append(_quarantine(list(facts.roles.values())))
        parts.append(_table("Columns", *columns_overview(facts, measures), left=(0, 1, 2)))
    parts.append(section("Looked at and fine", _findings([f for f in findings if f.level == OK])))
    items = "".join(f"<dt>{esc(term)}</dt><dd>{esc(text)}</dd>" for term, text in EXPLAINED)
    parts.append(section("How to read this", card(f"<dl>{items}</dl>")))
    title = f"{name}: check of the data"
    head = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{esc(title)}</title><style>{CSS}</style></head>"
    )
    body = f'<h1>{esc(title)}</h1><p class="sub">{esc(sub)}</p>{"".join(parts)}'
    return f"{head}<body><main>{body}</main></body></html>\n"


def _verdict(findings: Sequence[Finding]) -> str:
    count = {level: sum(f.level == level for f in findings) for level in _BADGES}
    kind = "bad" if count[ERROR] else "mixed" if count[WARN] else ""
    lead = "Do not train on these data yet." if count[ERROR] else (
        "Look at the warnings before training." if count[WARN] else "Nothing stands against training.")  # fmt: skip
    return card(f'<p class="lead">{esc(lead)}</p><p class="why">{esc(tally(findings))}</p>', f"verdict {kind}")


def _facts(facts: Facts, measures: Measures) -> str:
    cells = [
        f"<div class='fact'><b>{esc(v)}</b><span>{esc(k)}</span></div>" for k, v in facts_overview(facts, measures)
    ]
    return f'<div class="facts">{"".join(cells)}</div>' if cells else ""


def _findings(findings: Sequence[Finding]) -> str:
    rows = []
    for f in findings:
        todo = f'<br><span class="note">{esc(f.todo)}</span>' if f.todo else ""
        head = f'{badge(f.level, _BADGES[f.level])}<br><span class="note">{esc(f.check)}</span>'
        rows.append([head, f"<b>{esc(f.where)}</b><br>{esc(f.what)}{todo}"])
    return card(table(["level", "where, what, and what to do"], rows, left=(0, 1))) if rows else ""


def _pictures(facts: Facts, measures: Measures) -> str:
    out = []
    imp = facts.roles.get("impressions")
    if imp is not None:
        out.append(figure("Impressions by day", pictures.rows_by_day(imp), "A day without a bar has no rows."))
    for label in facts.spec.labels:
        given = facts.spec.labels[label].given
        text = f"Among rows with {given}. " if given else ""
        out.append(figure(f"{label} by day", pictures.rates_by_day(measures, label), text + "Band: 95 % interval."))
        caption = text + "In brackets: sampled rows with a known outcome. Bar: 95 % interval."
        out.append(figure(f"{label} by surface", pictures.rates_by_surface(measures, label), caption))
    out.append(
        figure("Activity by hour", pictures.hours(facts), "Nights should be quiet; if noon is, the zone is wrong.")
    )
    caption = "Dashed: 0.1 (look) and 0.25 (strong). Tick: what chance alone would show."
    out.append(figure("Drift of the last day", pictures.drift_bars(measures), caption))
    caption = "Best label of each column. Dashed: 0.9, above which a feature is an error."
    out.append(figure("One column alone", pictures.auc_bars(measures), caption))
    out.append(figure("Length of histories", pictures.history_bars(measures), "All event sources together."))
    out.append(figure("Missing values", pictures.null_bars(facts.roles), "Columns with nulls, most first."))
    return "".join(out)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0, 1)) -> str:
    cells = [[esc(cell) for cell in row] for row in rows]
    return section(title, card(table(header, cells, left=left))) if cells else ""


def _quarantine(roles: Sequence[RoleFacts]) -> str:
    rows: list[list[Any]] = []
    for role in roles:
        for reason, n in sorted(role.quarantined.items(), key=lambda r: -r[1]):
            for i, (file, row) in enumerate(role.examples[reason][:3]):
                head = (
                    [esc(role.title), esc(reason), f"{n:,}", percent(n / max(1, role.raw_rows))] if not i else [""] * 4
                )
                rows.append([*head, esc(file), f"<code>{esc(row)}</code>"])
    header = ["table", "reason", "rows", "share", "file", "examples"]
    return section("Quarantined rows", card(table(header, rows, left=(0, 1, 4, 5)))) if rows else ""
