"""`python -m pipelines check SPEC`: what is wrong with a data set, said before anything is trained on it."""
