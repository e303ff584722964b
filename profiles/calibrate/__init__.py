"""Hardware profiles fitted to a machine: samples, lines through them, and the file that a scenario can name."""
