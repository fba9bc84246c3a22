"""`python -m anyfit` is `anyfit`."""

from .cli import main

main()
