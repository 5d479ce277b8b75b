"""Benchmarks, one module each: `make bench NAME=x`. See `harness` for the form of their results."""
