"""The kernels of decoding, and for which types and shapes they are made; `tuning.cpu.kernels` builds them."""
