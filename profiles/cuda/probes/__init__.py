"""Questions to a machine, each answered by a small experiment."""
