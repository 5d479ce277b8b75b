"""gem: the mathematics and the decisions of an open ads foundation model. Imports no Ray."""

__version__ = "0.1.0"
