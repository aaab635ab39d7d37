"""Tokenizers, vocabularies and grammars."""
