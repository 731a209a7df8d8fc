"""Trains a team of language models on maths problems with verifiable answers.

    accelerate launch examples/train_math.py --config examples/configs/size_pair.yaml
    python examples/train_math.py --models Qwen/Qwen3-1.7B-Base Qwen/Qwen3-4B-Base --dataset train.jsonl

Every field of HACPOConfig, of TRL's ModelConfig (LoRA, quantization, dtype, attention) and of `ScriptArguments` can be
given on the command line or in a YAML file named by --config; the command line wins. `--help` lists them all,
`--dry_run` prints the plan. What it does is in hacpo_trl/cli/train.py; `hacpo train` is the same.
"""

import sys

from hacpo_trl.cli.console import start_quietly

start_quietly()

from hacpo_trl.cli.train import ScriptArguments, main

__all__ = ["ScriptArguments", "main"]

if __name__ == "__main__":
    sys.exit(main())
