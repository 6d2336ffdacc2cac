"""The launch scripts and the model configurations against Megatron's own parser and configuration."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mok.bench import ab

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("launch_n*.sh"))
MODELS = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.json"))
SHAPES = {  # hidden size, expert intermediate size, experts, experts per token, layers
    "deepseek-v3": (7168, 2048, 256, 8, 61),
    "kimi-k2": (7168, 2048, 384, 8, 61),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 48),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 94),
    "glm-4.5": (5120, 1536, 160, 8, 92),
    "tiny": (128, 128, 16, 4, 3),
}


def command(script: str, model: str | None = None, *extra: str) -> list[str]:
    """What the launch script would run, one entry an argument."""
    environment = dict(
        os.environ, LAUNCH=r"printf %s\n", DATA="/data/text_document", TOKENIZER="/data/tokenizer"
    )
    if model:
        environment["MODEL"] = model
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / script), *extra],
        env=environment,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def case(argv: list[str]) -> dict:
    """What Megatron is to parse of a torchrun command: the script's arguments and the number of processes."""
    nodes, per_node = (int(argv[argv.index(flag) + 1]) for flag in ("--nnodes", "--nproc-per-node"))
    return {"world": nodes * per_node, "argv": argv[argv.index("examples/pretrain.py") + 1 :]}


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict]:
    """Every script with its default model, every model with one script, and two that must be refused."""
    cases = {script: case(command(script)) for script in SCRIPTS}
    cases |= {model: case(command("launch_node8_mok.sh", model)) for model in MODELS if model != "tiny"}
    cases["tiny"] = case(command("launch_node8_mok.sh", "tiny", "--seq-length", "256"))
    wrong = cases["launch_node8_mok.sh"]
    cases["unknown flag"] = wrong | {"argv": [*wrong["argv"], "--moe-token-dispatcher", "mok"]}
    cases["experts do not divide"] = wrong | {"argv": [*wrong["argv"], "--num-experts", "100"]}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "parse_flags.py")],
        input=json.dumps(cases), env=dict(os.environ, TORCHDYNAMO_DISABLE="1"),
        text=True, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("script", SCRIPTS)
def test_megatron_accepts_launch_script(script, parsed):
    got = parsed[script]
    assert "error" not in got, got["error"]
    dispatcher = ("mok", "deepep") if "mok" in script else ("flex", "hybridep")
    assert (got["moe_token_dispatcher_type"], got["moe_flex_dispatcher_backend"]) == dispatcher
    size = 8 if "node8" in script else 64
    assert (got["world_size"], got["expert_model_parallel_size"]) == (size, size)


@pytest.mark.parametrize("system", ["node8", "nvl72"])
def test_scripts_differ_in_the_dispatcher_only(system):
    mok, hybridep = (command(f"launch_{system}_{kind}.sh") for kind in ("mok", "hybridep"))
    launcher = ["-m", "megatron_mok.launch"]
    cut = mok.index(launcher[0])
    assert mok[cut : cut + 2] == launcher
    start = mok.index("--moe-token-dispatcher-type")
    assert mok[:cut] + mok[cut + 2 : start] == hybridep[: start - 2]
    assert all("moe" in flag for flag in hybridep[start - 2 :] if flag.startswith("--"))
    assert all("moe" in flag or "mok" in flag for flag in mok[start:] if flag.startswith("--"))


def test_nccl_has_sms_beside_the_kernels(monkeypatch):
    """docs/user-guide.md: the scripts overlap NCCL with kernels that would else take every SM."""
    assert ab.option(command("launch_node8_mok.sh"), "mok-num-sms") == "116"
    monkeypatch.setenv("NCCL_MAX_CTAS", "32")
    assert ab.option(command("launch_node8_mok.sh"), "mok-num-sms") == "100"


@pytest.mark.parametrize("model", MODELS)
def test_megatron_accepts_model(model, parsed):
    got = parsed[model]
    assert "error" not in got, got["error"]
    names = ("hidden_size", "moe_ffn_hidden_size", "num_moe_experts", "moe_router_topk", "num_layers")
    assert tuple(got[name] for name in names) == SHAPES[model]


def test_the_parser_refuses(parsed):
    assert "SystemExit" in parsed["unknown flag"]["error"]
    assert "experts" in parsed["experts do not divide"]["error"]


@pytest.mark.parametrize("model", MODELS)
def test_every_source_covers_flags_of_the_model(model):
    config = json.loads((ROOT / "configs" / "models" / f"{model}.json").read_text())
    assert config["name"] == model
    covered = {flag for covers in config["sources"].values() for flag in covers}
    named_absent = {flag for flag in covered if flag not in config["flags"]}
    assert named_absent <= {"moe-shared-expert-intermediate-size"}  # a source may say that there is none
    if model == "tiny":
        assert config["notes"]
        return
    sizes = {flag for flag, value in config["flags"].items() if type(value) in (int, float)}
    assert sizes <= covered, f"no source for {sorted(sizes - covered)}"
    assert any(re.match("https://", source) for source in config["sources"])
