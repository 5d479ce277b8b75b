"""Canonical tables to a feature store: timelines, cuts, labels, entities, windows."""
