"""Real CUDA: a timed pass that watches little, a traced pass that sees everything, and probes of the machine."""
