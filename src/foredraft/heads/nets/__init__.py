"""Networks of trainable heads: tensors in, tensors out. They do not decode, sample, or load weights."""
