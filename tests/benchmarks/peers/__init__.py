"""Peers (FuxiCTR, torch-rechub, LightGBM) in a virtual environment of their own, on the rows of a feature store.

`export` and `environment` run in our environment; `run_peer` and `lightgbm_arm` in the peers' (no `gem` there).
See README.md for the order of calls.
"""
