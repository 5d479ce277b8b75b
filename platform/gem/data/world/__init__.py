"""A generated ads world whose true probabilities are known."""
