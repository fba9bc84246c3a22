"""anyfit under other people's training loops. Each file is a user of anyfit's public names, as any script is."""
