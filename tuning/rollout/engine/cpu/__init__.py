"""The kernels of decoding, and for which types and shapes they are made; `rlhf.tuning.cpu.kernels` builds them."""
