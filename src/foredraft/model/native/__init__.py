"""The native engine: decoders with quantised weights on CPUs, as fused kernels."""
