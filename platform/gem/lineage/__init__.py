"""Lineage: what a model was made of (bundle, chain), whether it may serve (gates), who decided (audit, registry)."""
