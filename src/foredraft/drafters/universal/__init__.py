"""A draft model with any tokenizer, and conversions between two tokenizers (arXiv:2502.05202)."""
