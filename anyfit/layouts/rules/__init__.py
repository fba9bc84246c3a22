"""How each op may be cut along one axis."""
