"""What runs on the workers: pool, roles, Megatron, vLLM, weights, losses."""
