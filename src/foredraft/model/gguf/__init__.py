"""GGUF files, llama.cpp's format: header, weights, architectures, tokenizer, and a transformers model of them."""
