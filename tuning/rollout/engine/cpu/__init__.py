"""Decoding's kernels for CPU, in C: XLA's products of few rows reach half of what the cores can do, its attention less.

`kernels` builds the sources with the machine's own compiler; `products` and `attention` call them, and say when they
can be. Without a compiler XLA does the same.
"""
