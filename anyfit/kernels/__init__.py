"""The arithmetic of the update: plain torch, and a C++ kernel with its twin in plain torch."""
