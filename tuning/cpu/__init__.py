"""Kernels for CPUs, in C: `kernels` builds the sources with the machine's own compiler and registers them with XLA.

attention, products   of decoding: XLA's products of few rows reach half the speed of the cores, its attention less
matmul                of training, where factors are rounded to bfloat16 and the processor has a matrix unit

What calls them says for which types and shapes. Without a compiler XLA computes the same.
"""
