"""Values for people: tables, bars and lines in a terminal."""
