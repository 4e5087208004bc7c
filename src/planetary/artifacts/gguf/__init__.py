"""GGUF, the file format of llama.cpp: a model's settings, tokenizer and tensors in one file."""
