"""CPU kernels for decoding, in C: XLA's products of few rows reach half the speed of the cores, its attention less.

`kernels` builds the sources with the machine's own compiler; `products` and `attention` call them, and say for which
types and shapes. Without a compiler XLA computes the same.
"""
