"""Ray Tune: sweeps of cheap variants. `python -m tuning --help`."""
