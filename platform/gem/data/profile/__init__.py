"""Mergeable summaries of a data set, for `python -m pipelines check`."""
