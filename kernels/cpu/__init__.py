"""Decoder layers in C++ for CPUs.

`build` compiles them, `trial` tries what came of that, `library` binds them, and `decoder` is what `kernels`
dispatches to.
"""
