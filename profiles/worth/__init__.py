"""What a source line or a host phase is worth: runs of the same scenario with one thing changed in the simulation."""
