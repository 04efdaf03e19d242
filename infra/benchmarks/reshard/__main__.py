"""Transitions between training and generation on one or several devices, onecopy beside the ways of others.

    python -m infra.benchmarks.reshard --shape qwen2.5-1.5b --shape qwen2.5-3b --out infra/benchmarks/results
    python -m infra.benchmarks.reshard --shape qwen2.5-7b --weights-only --out infra/benchmarks/results
    python -m infra.benchmarks.reshard --shape qwen2.5-0.5b --only-onecopy --alternations 200 --out infra/benchmarks/results
    python -m infra.benchmarks.reshard --shape tiny --gpus 2 --train tp2 --generate tp1 --out /tmp/out      # gloo without GPUs

Random weights; bfloat16 on GPUs (fp32 on CPU) with fp32 masters and moments in memory, CUDA graphs on. In a round every mode goes
into generation, generates, compares with the actor, and goes back; then one update changes the weights. The first round
is warm-up and not counted.

onecopy: the program. full_gather: every rank rebuilds every whole tensor and vLLM's `load_weights` cuts its slices out, as verl,
NeMo-RL and slime do. core_swap: megatron-core's `core/resharding`, only if it leaves bit for bit what full_gather leaves. Both
keep the training weights in memory.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from infra.benchmarks.reshard.ranks import MODULE, rank, run_shape
from infra.benchmarks.reshard.table import write


def main(arguments: list[str]) -> None:
    options = options_of(arguments)
    if options.rank_of:
        rank(options)
        return
    for shape in options.shape:
        write(run_shape(shape, options, arguments), f"python -m {MODULE} {shlex.join(arguments)}", options.out)


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", action="append", required=True, help="may be given several times")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="ranks")
    parser.add_argument("--train", default="tp1", help="layout, as tp2,pp2")
    parser.add_argument("--generate", default="tp1")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alternations", type=int, default=0, help="of onecopy alone, for memory that grows")
    parser.add_argument("--only-onecopy", action="store_true")
    parser.add_argument("--weights-only", action="store_true", help="no update, so no moments")
    parser.add_argument("--no-control", dest="control", action="store_false", help="do not compare with transformers")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--memory-fraction", type=float, default=0.4)
    parser.add_argument("--timeout", type=float, default=540, help="seconds for one shape")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.weights_only and options.alternations:
        parser.error("--alternations are of updates and generation, --weights-only makes no update")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
