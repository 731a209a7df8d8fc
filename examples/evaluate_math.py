"""Evaluates one or many standalone models on the paper's maths benchmarks, from the Hub or from local files.

    python examples/evaluate_math.py out/model-a out/model-b --benchmarks math_500 gsm8k aime_2025
    python examples/evaluate_math.py out/model-a --data_dir data --before base/model-a --engine vllm

`--help` lists all options; what they do is in hacpo_trl/cli/evaluate.py and hacpo_trl/evaluation/answers.py.
"""

import sys

from hacpo_trl.cli.console import start_quietly

start_quietly()

from hacpo_trl.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
