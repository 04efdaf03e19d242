"""Says in one line how a rank's process ended, from Ray's message of a paragraph; pure."""

from __future__ import annotations

import re


def cause_of_death(message: str) -> str:
    """Condense the text of a `ray.exceptions.RayActorError`."""
    if code := re.search(r"exit code (-?\d+)", message):
        return f"exit code {code[1]}"
    if "killed by `ray.kill`" in message:
        return "it was ended on purpose"
    if "NODE_OUT_OF_MEMORY" in message or "memory on the node" in message:
        return "ended by Ray because the machine's memory was nearly full"
    if "creation task" in message:
        return f"failed to start: {message.strip().splitlines()[-1]}"
    if "connection error code" in message:
        return "no exit code: killed by a signal (SIGKILL, the kernel's out-of-memory killer) or crashed in native code"
    if detail := re.search(r"Worker exit detail: ([^\n]*)", message):
        return detail[1].strip()
    return message.strip().splitlines()[0] if message.strip() else "unknown"
