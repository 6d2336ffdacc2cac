"""The table in docs/memory.md is what tools/memory_table.py prints."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

spec = importlib.util.spec_from_file_location("memory_table", ROOT / "tools" / "memory_table.py")
memory_table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory_table)


def test_B56_the_documented_table_is_current():
    table = memory_table.table()
    assert table in (ROOT / "docs" / "memory.md").read_text(), "run python tools/memory_table.py"
    assert len(table.splitlines()) == 2 + len(list(memory_table.MODELS.glob("*.json")))


def test_a_row_by_hand():
    """4*I bytes for each of 1.25*T*K rows, 12 and a little for each of the schedule's R*T*K + 127*32 rows."""
    flags = {"hidden-size": 7168, "moe-ffn-hidden-size": 2048, "num-experts": 256, "moe-router-topk": 8}
    cells = memory_table.row("x", flags)
    schedule = 12 * (8 * 8192 * 8 + 127 * 32)
    h = 4 * 2048 * 8192 * 8
    want = [schedule, 1.25 * h + schedule, 0.5 * h + schedule, schedule, 2 * (7168 + 3 * 2048) * 131072]
    assert cells[6:11] == [f"{size / 1e6:,.0f}" for size in want]
