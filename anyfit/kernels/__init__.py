"""The arithmetic of the update, in plain torch: the oracle of any faster kernel."""
