"""The kernels on CUDA. Importing a module of this package needs Triton, launching a kernel a GPU or the interpreter.

A launch function has the name and the arguments of its custom op, whose docstring says what it computes. No constexpr
and no specialised integer depends on the batch: a kernel is compiled once, before a run is timed.
"""
