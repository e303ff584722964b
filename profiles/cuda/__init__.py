"""The CUDA device of a run: a timed pass with two events per step, a traced pass with Kineto, and hazard checking."""
