"""All rules applied to the facts."""

from __future__ import annotations

from pipelines.check import rules_signal, rules_tables, rules_time
from pipelines.check.finding import Finding, by_level
from pipelines.check.gather import Facts
from pipelines.check.measures import Measures


def judge(facts: Facts, measures: Measures) -> list[Finding]:
    """Every finding, errors first."""
    rules = (*rules_tables.RULES, *rules_time.RULES, *rules_signal.RULES)
    return by_level([finding for rule in rules for finding in rule(facts, measures)])
