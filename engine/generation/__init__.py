"""The generation side: vLLM in the rank's process, on the actor's memory."""

import os

# vLLM reads these when it is first imported, which the modules of this package do.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine must live in this process to share its memory
for _name, _value in {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled on first use
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share the cores of a small machine
}.items():
    os.environ.setdefault(_name, _value)
