"""From one block of a model to code that runs it cut over the ranks of one axis."""
