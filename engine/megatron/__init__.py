"""The training side: a Megatron-core model laid out as vLLM lays it out."""
