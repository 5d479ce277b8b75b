"""Rules on what a model would learn from: label rates, drift, leakage suspects, hot users."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gem.data.profile.stats import wilson
from pipelines.check.finding import ERROR, HINT, OK, WARN, Finding, percent, some
from pipelines.check.gather import Facts, RoleFacts
from pipelines.check.measures import Drift, Measures, Rate, SingleAuc

MIN_RATE_ROWS = 100
BIG_SURFACE = 0.01  # of the rows
JUMP_SIGMA = 5.0
JUMP_RELATIVE = 0.15
PSI_WARN, PSI_STRONG = 0.1, 0.25
LEAK, SUSPECT = 0.9, 0.8
HOT_SHARE, HOT_TIMES = 0.01, 20.0  # of all events, and times the median user
UNSEEN = 0.2  # of the rows of the last day
BURST = 10  # events of one user in one second


def label_rates(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Rates overall, constant surfaces, and days that stand out."""
    for name in facts.spec.labels:
        rates = [r for r in measures.rates if r.label == name]
        whole = next((r for r in rates if not r.surface and not r.day), None)
        if whole is None:
            continue
        if not whole.rows or whole.positives in (0, whole.rows):
            what = f"{whole.positives:,} positives in {whole.rows:,} rows with a known outcome: nothing to learn"
            yield Finding(ERROR, "label rate", f"labels.{name}", what, "is it the right column, log or key?")
            continue
        yield from _constant_surfaces(name, rates, whole)
        odd = [(r, reason) for r in rates if r.day and not r.surface if (reason := _jump(r, rates))]
        yield from (Finding(WARN, "label rate", f"labels.{name} {r.day}", *reason) for r, reason in odd)
        if not odd:
            what = f"{interval(whole)} of {whole.rows:,} sampled rows"
            numbers = {"rate": whole.rate, "low": whole.low, "high": whole.high, "rows": whole.rows}
            yield Finding(OK, "label rate", f"labels.{name}", f"{what}; no day stands out", numbers=numbers)


def _constant_surfaces(name: str, rates: list[Rate], whole: Rate) -> Iterator[Finding]:
    found = [r for r in rates if r.surface and not r.day and r.rows >= MIN_RATE_ROWS]
    flat = [r for r in found if r.high < whole.rate / 10 or r.low > 0.95]
    if not flat:
        return
    rows = sum(r.rows for r in flat)
    level = WARN if rows > BIG_SURFACE * whole.rows else HINT
    what = "nearly always or never on surface " + some([f"{r.surface} ({r.positives:,}/{r.rows:,})" for r in flat], 5)
    todo = "does the surface have this outcome at all (auto-play, no button)? If not, leave it out"
    yield Finding(level, "label rate", f"labels.{name}", what, todo, {r.surface: r.rate for r in flat})


def _jump(rate: Rate, rates: list[Rate]) -> tuple[str, str, dict[str, float]] | None:
    """A day is odd if it is far from the other days, measured by their own spread and by its interval."""
    others = [r for r in rates if r.day and not r.surface and r.day != rate.day and r.rows >= MIN_RATE_ROWS]
    if rate.rows < MIN_RATE_ROWS or len(others) < 2:
        return None
    values = np.array([r.rate for r in others])
    middle = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    low, high = wilson(rate.positives, rate.rows, JUMP_SIGMA)
    far = abs(rate.rate - middle)
    if low <= middle <= high or far <= JUMP_SIGMA * spread or far <= JUMP_RELATIVE * max(middle, 1e-9):
        return None
    what = f"{interval(rate)} of {rate.rows:,} rows, {percent(middle)} on a usual day"
    numbers = {"rate": rate.rate, "usual": middle, "low": rate.low, "high": rate.high, "rows": float(rate.rows)}
    return what, "outcomes lost, late or counted twice on that day?", numbers


def interval(rate: Rate) -> str:
    """A rate with its interval: 44.9 % [44.7, 45.1]."""
    digits = 1 if rate.rate >= 0.01 else 3
    return f"{100 * rate.rate:.{digits}f} % [{100 * rate.low:.{digits}f}, {100 * rate.high:.{digits}f}]"


def drift(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Features distributed otherwise on the last day than on the days before."""
    by_feature: dict[str, list[Drift]] = {}
    for d in measures.drift:
        by_feature.setdefault(d.feature, []).append(d)
    flagged = 0
    for feature, found in by_feature.items():
        over = [d for d in found if d.psi - d.noise > PSI_WARN]
        if not over:
            continue
        flagged += 1
        worst = max(over, key=lambda d: d.psi - d.noise)
        everywhere = any(not d.surface for d in over)
        strong = any(d.psi - d.noise > PSI_STRONG for d in over if not d.surface or not everywhere)
        where = [d.surface or "all surfaces" for d in over]
        what = f"{'strong ' if strong else ''}shift on {measures.days[-1]}: PSI " + some(
            [f"{d.psi:.2f} on {w}" for d, w in zip(over, where, strict=True)], 3)  # fmt: skip
        what += f" (noise {worst.noise:.2f}; above {PSI_WARN} look, above {PSI_STRONG} strong)"
        todo = "a changed export or a new audience? The model was trained on the days before"
        numbers = {"psi": {d.surface or "": d.psi for d in found}, "strong": strong}
        yield Finding(WARN if everywhere else HINT, "drift", feature, what, todo, numbers)
    if by_feature and not flagged:
        most = max(measures.drift, key=lambda d: d.psi)
        what = f"{len(by_feature)} features are as before on {measures.days[-1]}; "
        what += f"largest PSI {most.psi:.2f} ({most.feature}{f' on {most.surface}' if most.surface else ''})"
        yield Finding(OK, "drift", "all features", what, numbers={"largest": most.psi})


def unseen(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Categories that first appear on the last day: a model knows none of them."""
    for feature, share in measures.unseen.items():
        if share > UNSEEN:
            what = f"{percent(share)} of the rows of {measures.days[-1]} have a value that no earlier day has"
            todo = "the model knows none of them: is it an id, a date or a counter?"
            yield Finding(HINT, "new values", feature, what, todo, {"share": share})


def leaks(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Columns that tell the label too well alone."""
    suspects: dict[str, list[SingleAuc]] = {}
    unused: dict[str, list[str]] = {}
    for one in measures.aucs:
        if one.use == "feature" and one.auc > SUSPECT:
            suspects.setdefault(one.column, []).append(one)
        elif one.use == "unused" and one.auc > LEAK:
            unused.setdefault(one.column, []).append(f"{one.label} {one.auc:.3f}")
    for column, found in suspects.items():
        level = ERROR if max(a.auc for a in found) > LEAK else WARN
        what = "tells the label alone, as an outcome does: AUC " + some([f"{a.auc:.3f} for {a.label}" for a in found])
        todo = "known only after the impression? Take it out and list it in impressions.outcomes"
        yield Finding(level, "leak", column, what, todo, {a.label: a.auc for a in found})
    for column, texts in unused.items():
        what = f"unused column that looks like an outcome: AUC alone for {', '.join(texts)}"
        yield Finding(HINT, "leak", column, what, "list it in impressions.outcomes, so that nobody makes it a feature")
    features = [a for a in measures.aucs if a.use in ("feature", "free")]
    if features and not suspects:
        best = max(features, key=lambda a: a.auc)
        what = f"no feature alone has an AUC above {SUSPECT}; highest {best.auc:.3f} ({best.column} for {best.label})"
        yield Finding(OK, "leak", "all features", what, numbers={"highest": best.auc})
    if facts.sample is not None and not measures.aucs:
        yield Finding(HINT, "leak", "all features", "too few outcomes of either kind to look for leaks")


def users(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Longest histories and users that are no persons."""
    events = [r for k, r in facts.roles.items() if k.startswith("events") and r.rows]
    if not events or not measures.histories:
        return
    h = measures.histories
    total: dict[str, int] = {}
    for role in events:
        for user, n in role.top_users.items():
            total[user] = total.get(user, 0) + n
    user, most = max(total.items(), key=lambda t: (t[1], t[0]))
    share = most / h["events"]
    hot = share > HOT_SHARE and most > HOT_TIMES * h["median"]
    what = f"{h['events']:,.0f} events of {h['users']:,.0f} users; per user median {h['median']:,.0f}, "
    what += f"p99 {h['p99']:,.0f}, longest {max(most, h['longest']):,.0f} ({percent(share)} of all, user {user})"
    todo = "a bot, a test account or a default id? Its rows shape every statistic: drop it from the log" if hot else ""
    numbers = {**h, "share": share, "top": dict(sorted(total.items(), key=lambda t: -t[1])[:10])}
    yield Finding(WARN if hot else OK, "hot user" if hot else "histories", f"user {user}" if hot else "events", what,
                  todo, numbers)  # fmt: skip
    for role in events:
        yield from _bursts(facts, role)


def _bursts(facts: Facts, role: RoleFacts) -> Iterator[Finding]:
    burst = [m for m in role.most.get("second", []) if m["events"] >= BURST]
    if burst:
        what = f"user {burst[0]['user']} has {burst[0]['events']:,} different events in one second"
        todo = "a bot, or times cut to a coarser unit?"
        yield Finding(WARN, "burst", role.title, what, todo, {"top": burst[:5]})
    limit = facts.config.data.max_rows_per_user_day
    over = [m for m in role.most.get("day", []) if m["events"] > limit]
    if over:
        what = f"user {over[0]['user']} has {over[0]['events']:,} events on one day; {limit:,} are kept"
        todo = "data.max_rows_per_user_day says how many"
        yield Finding(WARN, "burst", role.title, what, todo, {"top": over[:5]})


RULES = (label_rates, drift, unseen, leaks, users)
