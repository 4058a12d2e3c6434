"""Kernels for CPUs, in C: `kernels` builds them with the machine's own compiler and registers them with XLA.

tuning/models/fused.c            attention of training and scoring, and its gradient: XLA's takes twice as long
tuning/models/matmul.c           products of training with factors rounded to bfloat16
tuning/rollout/engine/cpu/*.c    products and attention of decoding: XLA's products of few rows reach half the speed of
                                 the cores, its attention less

Their callers choose types and shapes. Without a compiler XLA computes the same.
"""
