"""One HTML file per loop from its summary: no scripts, no outside assets, readable on a phone and offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.report import sections
from pipelines.report.style import CSS, card, esc, section
from pipelines.summary import replace_text, validate_summary

# What the figures mean; term and plain definition.
DEFINITIONS = (
    (
        "NE, normalized entropy",
        "Log loss of the predictions divided by the log loss of always predicting the base rate. The base rate is "
        "the one of the very rows evaluated (the test window; for a surface or a day, its own rows), so 1.000 means "
        "no better than knowing the average of that window. Lower is better; differences of 0.001 matter in ads.",
    ),
    ("Bayes limit", "NE of the true probabilities. Known for generated data only: no model can be better."),
    ("AUC", "Chance that a positive is ranked above a negative, over all rows at once, ties counted half."),
    ("gAUC", "AUC within each user, averaged with the number of the user's rows as weight; users with one label only "
     "do not count. It says how well one person's ads are ordered."),
    ("Calibration", "Sum of predictions over number of positives. 1.00 is right, 1.10 promises ten per cent too much."),
    ("95 % interval", "Bootstrap over users (all rows of a user stay together). Where two intervals of different "
     "models overlap widely, the difference is not resolved by this run."),
    ("conversion", "Counted on all impressions (a click and then a conversion), not only on those clicked."),
    ("transfer ratio", "Share of the foundation model's gain that its student kept; empty where not measured."),
    ("promoted", "The model passed its gates on the test window and became the version that serving uses."),
)  # fmt: skip


def render_report(summary: Mapping[str, Any]) -> str:
    """The page as text. Raises DataError if the summary does not fit its schema."""
    valid = validate_summary(summary)
    parts = (
        sections.verdict(valid),
        sections.facts(valid),
        sections.models_section(valid),
        sections.surfaces_section(valid),
        sections.pictures_section(valid),
        sections.stages_section(valid),
        sections.lineage_section(valid),
        sections.data_section(valid),
        sections.next_section(valid),
        sections.config_section(valid),
        _how_to_read(),
    )
    title = f"{valid['dataset']}: one loop"
    commit = f" · commit <code>{esc(valid['commit'][:12])}</code>" if valid["commit"] else ""
    sub = f'<p class="sub">{esc(valid["started_utc"])}{commit}</p>'
    head = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{esc(title)}</title><style>{CSS}</style></head>"
    )
    return f"{head}<body><main><h1>{esc(title)}</h1>{sub}{''.join(parts)}</main></body></html>\n"


def write_report(summary: Mapping[str, Any], path: Path) -> Path:
    """Write the page (beside, then renamed) and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, render_report(summary))
    return path


def _how_to_read() -> str:
    items = "".join(f"<dt>{esc(term)}</dt><dd>{esc(text)}</dd>" for term, text in DEFINITIONS)
    return section("How to read this", card(f"<dl>{items}</dl>"))
