"""Ray Data and Ray Train: the stages of the loop. `python -m pipelines --help`."""
