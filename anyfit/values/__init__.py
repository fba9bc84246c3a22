"""The nouns that travel between the rooms: frozen, strict, readable as JSON, and free of torch."""
