"""register(), the launcher, the arguments, the layer's construction.

B61's and B84's halves on Megatron-Core main cannot run here: main is on no package index.
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_mok
from megatron_mok.errors import ConfigError

ROOT = pathlib.Path(megatron_mok.__file__).parent.parent


@pytest.fixture
def registered() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other tests have imported megatron.training
        megatron_mok.register()
    megatron_mok.configure(megatron_mok.MokConfig())
    yield
    megatron_mok.unregister()
    megatron_mok.configure(megatron_mok.MokConfig())


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, **options)


@pytest.mark.short
def test_import_loads_nothing_heavy_B70() -> None:
    code = (
        "import sys, megatron_mok; megatron_mok.MokConfig; "
        "print([m for m in ('torch', 'megatron.core', 'numpy') if m in sys.modules])"
    )
    result = run_python("-c", code)
    assert result.stdout.strip() == "[]", result.stderr


def test_root_keeps_old_syntax() -> None:
    """`mok doctor` imports the package's root on any Python >= 3.9."""
    for file in ("__init__.py", "env.py", "errors.py"):
        ast.parse((ROOT / "megatron_mok" / file).read_text(), feature_version=(3, 9))


def test_lazy_names() -> None:
    for name in megatron_mok.__all__:
        assert getattr(megatron_mok, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        megatron_mok.nonsense  # noqa: B018


@pytest.mark.short
def test_register_is_idempotent_and_undone() -> None:
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.transformer import TransformerConfig
    from megatron.training import arguments

    def seams() -> list[Any]:
        field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
        return [
            field.type,
            TransformerConfig.__post_init__,
            moe_module_specs.MoELayer,
            arguments.add_megatron_arguments,
        ]

    assert not megatron_mok.is_registered()
    before = seams()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron_mok.register()
    after = seams()
    megatron_mok.register()
    assert megatron_mok.is_registered() and seams() == after
    assert typing.get_args(after[0]) == (*typing.get_args(before[0]), "mok")
    assert all(a is not b for a, b in zip(after, before, strict=True))
    assert issubclass(after[2], before[2])
    megatron_mok.unregister()
    assert not megatron_mok.is_registered() and seams() == before


def test_late_registration_is_said() -> None:
    """Hybrid models' specs are made at import: who registers later is told."""
    pytest.importorskip(
        "megatron.core.models.hybrid.hybrid_layer_specs",
        reason="this Megatron-Core has no hybrid models' specs",
    )
    with pytest.warns(UserWarning, match="hybrid"):
        megatron_mok.register()
    megatron_mok.unregister()


# --- launcher


def test_launch_runs_an_unmodified_script(tmp_path: pathlib.Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, neighbour, megatron_mok\n"
        "if __name__ == '__main__':\n"
        "    print(neighbour.VALUE, sys.argv[1:], megatron_mok.is_registered())\n"
    )
    result = run_python("-m", "megatron_mok.launch", str(script), "--flag", "x")
    assert result.stdout.strip().endswith("7 ['--flag', 'x'] True"), result.stderr


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"]])
def test_launch_without_a_script(arguments: list[str]) -> None:
    result = run_python("-m", "megatron_mok.launch", *arguments)
    assert result.returncode == 2 and "usage" in result.stderr


# --- arguments

STANDARD = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 4 --num-experts 8 --swiglu --disable-bias-linear --moe-ffn-hidden-size 32"
).split()


@pytest.fixture
def parse(registered: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    from megatron.training import arguments

    def run(*extra: str, dispatcher: str | None = "mok", **options: Any) -> Any:
        chosen = ["--moe-token-dispatcher-type", dispatcher] if dispatcher else []
        monkeypatch.setattr(sys, "argv", ["script", *STANDARD, *chosen, *extra])
        return arguments.parse_args(**options)

    return run


@pytest.mark.short
def test_arguments_configure_B84(parse: Callable[..., Any]) -> None:
    knobs = "--mok-comm-sms 8 16 --mok-save-capacity 0.5 --mok-main-grad off --mok-shared-device"
    args = parse(*knobs.split(), "--mok-timeout-s", "9")
    assert args.moe_token_dispatcher_type == "mok"
    config = megatron_mok.current()
    assert (config.comm_sms, config.save_capacity, config.main_grad) == ((8, 16), 0.5, "off")
    assert config.shared_device and config.timeout_s == 9
    assert config.max_tokens == 4 * 32, "micro batch * sequence length"


def test_max_tokens_is_divided_by_tp_and_cp(parse: Callable[..., Any]) -> None:
    parse(*"--tensor-model-parallel-size 2 --context-parallel-size 4 --sequence-parallel".split(),
          *"--expert-tensor-parallel-size 1".split())  # fmt: skip
    assert megatron_mok.current().max_tokens == 4 * 32 // 8
    parse("--mok-max-tokens", "999")
    assert megatron_mok.current().max_tokens == 999


@pytest.mark.short
def test_max_tokens_is_enough_for_evaluation_B06(parse: Callable[..., Any]) -> None:
    """Megatron-Core 0.18 and 0.19 both have --eval-micro-batch-size."""
    parse("--eval-micro-batch-size", "6")
    assert megatron_mok.current().max_tokens == 6 * 32
    megatron_mok.configure(megatron_mok.MokConfig())
    parse("--eval-micro-batch-size", "2")
    assert megatron_mok.current().max_tokens == 4 * 32


def test_max_tokens_is_that_of_the_last_command_line(parse: Callable[..., Any]) -> None:
    for batch in (2, 8):
        parse("--micro-batch-size", str(batch))
        assert megatron_mok.current().max_tokens == batch * 32


@pytest.mark.short
def test_knobs_count_beside_arguments_that_nobody_knows_B85(parse: Callable[..., Any]) -> None:
    knobs = ["--mok-backend", "reference", "--mok-save-capacity", "0.5"]
    parse("--someone-elses-flag", "7", *knobs, ignore_unknown_args=True)
    config = megatron_mok.current()
    assert (config.backend, config.save_capacity, config.max_tokens) == ("reference", 0.5, 4 * 32)
    with pytest.raises(ConfigError, match="num_sms: got 3"):
        parse("--someone-elses-flag", "--mok-num-sms", "3", ignore_unknown_args=True)


def test_a_misspelt_knob_is_an_error_B85(parse: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="--mok-back-end: got.*--mok-backend"):
        parse("--mok-back-end", "reference", ignore_unknown_args=True)
    with pytest.raises(SystemExit):
        parse("--someone-elses-flag")


@pytest.mark.short
def test_knobs_count_with_a_yaml_file_B84(parse: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.yaml"
    text = "disable_msc_deprecated: false\nenable_msc: false\n"  # Megatron asks the file even for these
    file.write_text(text + "language_model:\n  moe_token_dispatcher_type: mok\n")
    args = parse("--yaml-cfg", str(file), "--mok-save-capacity", "0.5", dispatcher=None)
    assert args.language_model.moe_token_dispatcher_type == "mok"
    assert megatron_mok.current().save_capacity == 0.5
    assert megatron_mok.current().max_tokens is None, "the sizes stand in the file: the first call's counts"
    with pytest.raises(ConfigError, match="num_sms: got 3"):
        parse("--yaml-cfg", str(file), "--mok-num-sms", "3", dispatcher=None)
    args = parse("--yaml-cfg", str(file), "--mok-save-capacity", "0.75")
    assert args.language_model.moe_token_dispatcher_type == "mok", "twice the same is no contradiction"
    assert (megatron_mok.current().save_capacity, megatron_mok.current().max_tokens) == (0.75, None)


KNOB = ("--mok-save-capacity", "0.5")


@pytest.mark.short
@pytest.mark.parametrize(
    "in_file, words, need",
    [
        ("alltoall", ("--moe-token-dispatcher-type", "mok", *KNOB),
         r"type: got 'mok', need what .* says \(alltoall\).*mok under language_model in .*model.yaml"),
        ("mok", ("--moe-token-dispatcher-type", "alltoall", *KNOB), r"type: got 'alltoall', need .* \(mok\)"),
        ("mok", ("--moe-token-dispatcher-type=allgather",), r"type: got 'allgather', need .* \(mok\)"),
        ("alltoall", KNOB, r"capacity: got 0.5, need .*model.yaml \(it is alltoall\)"),
        ("flex", ("--moe-token-dispatcher-type", "alltoall", *KNOB), r"capacity: got 0.5, .* \(it is flex\)"),
    ],
)  # fmt: skip
def test_a_yaml_file_that_contradicts_is_one_error_B85(
    parse: Callable[..., Any], tmp_path: pathlib.Path, in_file: str, words: tuple[str, ...], need: str
) -> None:
    """Megatron itself takes the file's dispatcher and drops the command line's; allgather is its default."""
    file = tmp_path / "model.yaml"
    file.write_text(f"language_model:\n  moe_token_dispatcher_type: {in_file}\n")
    with pytest.raises(ConfigError, match=need) as caught:
        parse("--yaml-cfg", str(file), *words, dispatcher=None)
    assert len(caught.value.problems) == 1


def test_a_yaml_file_of_other_dispatchers_is_megatrons_matter(
    parse: Callable[..., Any], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(
        "disable_msc_deprecated: false\nenable_msc: false\n"
        "language_model:\n  moe_token_dispatcher_type: alltoall\n"
    )
    args = parse("--yaml-cfg", str(file), dispatcher="flex")
    assert args.language_model.moe_token_dispatcher_type == "alltoall"
    assert capsys.readouterr().out.count("argparse arguments will be ignored") == 1, "it warns once, as ever"
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml"):
        parse("--yaml-cfg", str(tmp_path / "absent.yaml"))


def test_bad_value_lists_choices_B84(parse: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(dispatcher="mokk")
    message = capsys.readouterr().err
    assert all(choice in message for choice in ("mokk", "allgather", "alltoall", "flex", "mok"))


def test_help_lists_every_knob_B84() -> None:
    """Of our group only: the help of Megatron 0.19's own arguments holds a bare percent sign, and fails."""
    import argparse
    from dataclasses import fields

    from megatron_mok.mcore.args import add_arguments

    shown = add_arguments(argparse.ArgumentParser()).format_help()
    for field in fields(megatron_mok.MokConfig):
        assert f"--mok-{field.name.replace('_', '-')}" in shown


def test_bad_knobs_and_refused_settings_in_one_message_B85(parse: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*"--mok-num-sms 3 --mok-ring-rows 100 --moe-expert-capacity-factor 1.0".split(),
              "--use-megatron-fsdp")  # fmt: skip
    fields = {p.field for p in caught.value.problems}
    assert fields == {"num_sms", "ring_rows", "moe_expert_capacity_factor", "use_megatron_fsdp"}


def test_knobs_need_the_dispatcher_B85(parse: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="--mok-backend.*allgather"):
        parse("--mok-backend", "reference", dispatcher="allgather")
    assert parse(dispatcher="alltoall").moe_token_dispatcher_type == "alltoall"


@pytest.mark.parametrize("extra", ["--moe-enable-deepep", "--moe-flex-dispatcher-backend hybridep"])
def test_flags_of_other_dispatchers_B85(parse: Callable[..., Any], extra: str) -> None:
    with pytest.raises(ConfigError, match="flex"):
        parse(*extra.split())


def test_without_the_plugin_the_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import arguments

    assert not megatron_mok.is_registered()
    monkeypatch.setattr(sys, "argv", ["script", *STANDARD, "--moe-token-dispatcher-type", "mok"])
    with pytest.raises(SystemExit):
        arguments.parse_args()


# --- configuration


@pytest.mark.parametrize(
    "values",
    [
        dict(comm_sms=(8, 7)), dict(comm_sms=8), dict(minibatch_rows=100), dict(ring_rows=0),
        dict(num_sms=1),
        dict(save_capacity=-1.0), dict(save_capacity=float("inf")), dict(precision="fp64"),
        dict(backend="gpu"),
        dict(timeout_s=0), dict(preset=""), dict(preset="h200"), dict(max_tokens=0), dict(max_tokens=True),
        dict(main_grad="yes"),
        dict(shared_device=1), dict(check_every=-1),
    ],
    ids=lambda v: next(iter(v)),
)  # fmt: skip
def test_bad_configuration(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        megatron_mok.MokConfig(**values)
    problem = caught.value.problems[0]
    assert (problem.field, problem.got) == next(iter(values.items()))
    assert problem.need and problem.remedy and problem.field in str(caught.value)


def test_presets_do_not_exist_yet(parse: Callable[..., Any]) -> None:
    """Nothing would read one: a name must not be taken in silence."""
    with pytest.raises(ConfigError, match="preset: got 'h200'.*do not exist yet.*leave it out"):
        parse("--mok-preset", "h200")


def test_configure_and_current() -> None:
    before = megatron_mok.current()
    try:
        assert megatron_mok.configure(save_capacity=2.0).save_capacity == 2.0
        assert megatron_mok.configure(num_sms=64) == megatron_mok.current()
        assert megatron_mok.current().save_capacity == 2.0
        with pytest.raises(ConfigError):
            megatron_mok.configure(num_sms=63)
        assert megatron_mok.current().num_sms == 64, "a refused change leaves all as it was"
        with pytest.raises(TypeError):
            megatron_mok.configure({"num_sms": 2})  # type: ignore[arg-type]
    finally:
        megatron_mok.configure(before)


# --- layers


def test_unknown_experts_are_refused() -> None:
    from megatron_mok.mcore.experts import with_mok

    with pytest.raises(ConfigError, match="SequentialMLP or TEGroupedMLP"):
        with_mok(torch.nn.Linear)


def test_layer_that_is_not_ours_is_an_error() -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_mok.mcore.layer import check_applied

    class Foreign(MoELayer):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.config = SimpleNamespace(moe_token_dispatcher_type="mok")
            self.experts = torch.nn.Linear(1, 1)

    with pytest.raises(ConfigError, match="Foreign"):
        check_applied(torch.nn.Sequential(Foreign()))
    check_applied(torch.nn.Linear(1, 1))


def test_pre_hooks_of_bypassed_modules_run() -> None:
    """Megatron's DDP finishes gathering a module's weights in such a hook."""
    from megatron_mok.mcore.experts import run_forward_pre_hooks

    first, second = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    seen: list[Any] = []
    first.register_forward_pre_hook(lambda module, args: seen.append(module))
    first[0].register_forward_pre_hook(lambda module, args, kwargs: seen.append(module), with_kwargs=True)
    second.register_forward_pre_hook(lambda module, args: seen.append(module))
    run_forward_pre_hooks(([first], [second]))
    assert seen == [first, first[0], second]
    second.register_forward_pre_hook(lambda module, args: (torch.ones(2),))
    with pytest.raises(RuntimeError, match="Linear"):
        run_forward_pre_hooks(([first], [second]))


def test_built_model_and_one_line_B85(ranks: Any) -> None:
    """Both kinds of layers in one process; each mok model's back end and its reason are said by rank 0."""
    results = ranks.run("cases:announce")
    assert all(r["mok"] == ["MokMoELayer", "MokSequentialMLP", "MokTokenDispatcher"] for r in results)
    assert all(r["alltoall"][1:] == ["SequentialMLP", "MoEAlltoAllTokenDispatcher"] for r in results)
    assert all(r["type_kept"] for r in results)
    assert [len(r["lines"]) for r in results] == [2, 0, 0, 0], "two models"
    for line in results[0]["lines"]:
        assert "2 MoE layers" in line and "reference back end" in line and "no GPU" in line


def test_one_line_for_a_model_in_chunks_B85(ranks: Any) -> None:
    lines = ranks.run("build_cases:chunks")
    assert [len(of_rank) for of_rank in lines] == [1, 0, 0, 0] and "1 MoE layers on this rank" in lines[0][0]
    lines = ranks.run("build_cases:chunks", mtp_num_layers=1)
    assert [len(of_rank) for of_rank in lines] == [1, 0, 0, 0]


def test_one_line_where_the_first_stage_has_no_experts_B85(ranks: Any) -> None:
    """The lowest rank that has some speaks."""
    lines = ranks.run("build_cases:chunks", moe_layer_freq=[0, 1, 0, 1])
    assert [len(of_rank) for of_rank in lines] == [0, 0, 1, 0] and "2 MoE layers" in lines[2][0]


def test_one_line_without_ddp_B85(ranks: Any) -> None:
    results = ranks.run("build_cases:without_ddp")
    assert [[len(lines) for lines in of_rank] for of_rank in results] == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert all("2 MoE layers" in lines[0] and "reference back end" in lines[0] for lines in results[0])


def test_layer_that_is_not_ours_on_one_rank_is_an_error_on_all_B51(ranks: Any) -> None:
    """Also on the ranks that only share its dense layers (EP 2 on four ranks)."""
    results = ranks.run("build_cases:foreign_layer_on_rank_1")
    for rank, result in enumerate(results):
        kind, text = result["failure"]
        assert "MoE layer: got 'MokMoELayer', need" in text and result["seconds"] < 30
        assert kind == ("ConfigError" if rank == 1 else "PeerAbort")
        assert rank == 1 or "rank 1 gave up: ConfigError" in text
    assert len({result["step"] for result in results}) == 1


def test_constructor_that_fails_on_one_rank_is_an_error_on_all_B51(ranks: Any) -> None:
    results = ranks.run("build_cases:no_memory_for_gradients_on_rank_1")
    for rank, result in enumerate(results):
        kind, text = ("MemoryError", "") if rank == 1 else ("PeerAbort", "rank 1 gave up: MemoryError: ")
        assert result["failure"] == (kind, text + "no memory for the gradients") and result["seconds"] < 30
    assert len({result["step"] for result in results}) == 1


def test_a_model_that_was_dropped_is_not_counted_B85(ranks: Any) -> None:
    lines = ranks.run("build_cases:dropped")
    assert [len(of_rank) for of_rank in lines] == [1, 0, 0, 0] and "2 MoE layers" in lines[0][0]


def test_back_end_missing_on_one_stage_is_an_error_on_all_B51(ranks: Any) -> None:
    failures = ranks.run("build_cases:no_back_end_on_rank_2")
    told = ("UnsupportedDevice", "rank 2: sm_80: need sm_90a")
    assert failures == [told, told, ("UnsupportedDevice", "sm_80: need sm_90a"), told]


def test_experts_that_cannot_start_on_one_rank_B51(ranks: Any) -> None:
    results = ranks.run("build_cases:pre_hook_fails_on_rank_1")
    for rank, result in enumerate(results):
        kind, text = ("MemoryError", "gathered weights") if rank == 1 else ("PeerAbort", "rank 1 gave up")
        assert all(got[0] == kind and text in got[1] for got in result["failures"])
        assert result["seconds"] < 30 and result["again"] < 1e-5


def test_grouped_experts(ranks: Any) -> None:
    """TEGroupedMLP's form, its linear layers replaced by plain modules with weight0, weight1, ...: the same
    bits."""
    assert all(ranks.run("cases:grouped_experts"))


def test_transformer_engine_experts() -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    from megatron_mok.mcore.experts import MokTEGroupedMLP, with_mok

    builder = with_mok(TESpecProvider().grouped_mlp_modules(True))
    assert builder.func is MokTEGroupedMLP  # type: ignore[attr-defined]
