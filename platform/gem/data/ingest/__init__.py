"""Raw files, wherever they lie, to checked canonical Arrow tables."""
