"""Pipeline stages of a model as it is: each rank runs all of its Python, and the calls of its own stages alone."""
