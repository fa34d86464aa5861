"""GGUF, the one-file format of llama.cpp: reading and writing."""
