"""Decoder layers in C++ for CPUs.

`python -m kernels.cpu` compiles them, `library` binds them, `decoder` is what `kernels` dispatches to.
"""
