"""The papers that methods come from: name -> (arXiv number, BibTeX entry or None where we have no full one)."""

PAPERS: dict[str, tuple[str, str | None]] = {
    "HACPO": (
        "2603.02604",
        """@article{zhang2026heterogeneous,
    title  = {{Heterogeneous Agent Collaborative Reinforcement Learning}},
    author = {Zhixia Zhang and others},
    year   = 2026,
    eprint = {arXiv:2603.02604},
}""",
    ),
    "GSPO": (
        "2507.18071",
        """@article{zheng2025group,
    title  = {{Group Sequence Policy Optimization}},
    author = {Chujie Zheng and others},
    year   = 2025,
    eprint = {arXiv:2507.18071},
}""",
    ),
    "GRPO": (
        "2402.03300",
        """@article{shao2024deepseekmath,
    title  = {{DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models}},
    author = {Zhihong Shao and others},
    year   = 2024,
    eprint = {arXiv:2402.03300},
}""",
    ),
    "GRAFT": ("2609.37868", None),
    "SGT": ("2605.07244", None),
    "LUFFY": ("2504.14945", None),
    "SAPO": ("2509.08721", None),
    "F-TIS": ("2605.22537", None),
}
