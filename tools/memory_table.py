"""Prints the table of docs/memory.md: what a MoE layer keeps for backward, for each model in configs/models.

Symbols: T tokens per rank, K experts per token, E experts, H hidden size, I expert intermediate size.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_mok import runtime

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
TOKENS, RANKS = 8192, 8
CAPACITIES = (1.25, 0.5, 0.0)
FIXED_ROWS = (
    131072  # of x, h and act in bf16: what an implementation keeps that sizes them once for all routings
)


def row(name: str, flags: dict[str, int]) -> list[str]:
    hidden, ffn, top_k = flags["hidden-size"], flags["moe-ffn-hidden-size"], flags["moe-router-topk"]

    def kept(capacity: float) -> int:
        return runtime.saved_bytes(
            tokens=TOKENS, ffn=ffn, top_k=top_k, num_experts=flags["num-experts"], num_ranks=RANKS,
            save_capacity=capacity,
        )  # fmt: skip

    workspace = runtime.workspace_bytes(max_tokens=TOKENS, hidden=hidden, top_k=top_k, num_ranks=RANKS)
    fixed = 2 * (hidden + 3 * ffn) * FIXED_ROWS
    megabytes = [f"{size / 1e6:,.0f}" for size in (kept(0), *map(kept, CAPACITIES), fixed, workspace)]
    sizes = [hidden, ffn, flags["num-experts"], top_k]
    return [name, *map(str, sizes), f"{TOKENS * top_k:,}", *megabytes]


def table() -> str:
    """Markdown; sizes in MB (1e6 bytes)."""
    head = ["model", "H", "I", "E", "K", "rows T*K", "schedule"]
    head += [f"saved, capacity {capacity:g}" for capacity in CAPACITIES]
    head += [f"2*(H+3I)*{FIXED_ROWS}", "workspace"]
    rows = []
    for file in sorted(MODELS.glob("*.json")):
        model = json.loads(file.read_text())
        rows.append(row(model["name"], model["flags"]))
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    print(table())
