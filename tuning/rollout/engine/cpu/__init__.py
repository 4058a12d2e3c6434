"""The kernels of decoding (`tuning.cpu`), and for which types and shapes they are made."""
