"""Architectures, the weight map, and Hugging Face folders in and out."""
