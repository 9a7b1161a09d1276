"""Endpoints in the form of the Hugging Face hub: tokenizer files of the served base models."""
