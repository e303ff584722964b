"""The kernels on CUDA. Importing a module of this package needs Triton, launching a kernel a GPU or the interpreter.

A launch function has the name of its custom op, whose docstring says what it computes. It takes those of the op's
arguments that it uses, by their names, or groups of them (``kernels.declare``); their types are the op's. No
constexpr and no specialised integer depends on the batch: a kernel is compiled once, before a run is timed.
"""
