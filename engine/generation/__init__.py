"""The generation side: vLLM in the rank's process, on the actor's memory."""
