"""Sizes, the choice of the back end, and communicators on one rank."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_mok import errors, runtime
from megatron_mok.config import MokConfig
from megatron_mok.reference import schedule
from megatron_mok.runtime import comm as comm_module

BF16 = torch.bfloat16
ROOT = Path(__file__).resolve().parents[2]
CXX = shutil.which("c++") or shutil.which("g++")
SIZES = {"hidden": 7168, "top_k": 8, "num_ranks": 8}


@pytest.fixture(autouse=True)
def no_state_between_tests():
    yield
    runtime.release()
    comm_module._comms.clear()


def get(**changes):
    arguments = {"hidden": 16, "top_k": 2, "num_experts": 4, "max_tokens": 8, "device": "cpu"}
    arguments |= {"dtype": torch.float32, "config": MokConfig()} | changes
    return runtime.get_comm(arguments.pop("group", None), **arguments)


# ---- bytes ----


def test_B54_B56_workspace_is_what_the_design_says():
    """2 * T * H * (2 + K) and little more; linear in T, and nearly independent of the number of ranks."""
    for tokens in (1024, 8192, 65536):
        rows = 2 * tokens * 7168 * (2 + 8)
        got = runtime.workspace_bytes(max_tokens=tokens, **SIZES)
        assert rows < got < 1.01 * rows
        # routing of all ranks: 8 bytes per route and rank, the only part that grows with the ranks
        one = runtime.workspace_bytes(max_tokens=tokens, **SIZES | {"num_ranks": 1})
        many = runtime.workspace_bytes(max_tokens=tokens, **SIZES | {"num_ranks": 64})
        assert many - one == pytest.approx(63 * tokens * 8 * 8, abs=2048)
    twice = runtime.workspace_bytes(max_tokens=16384, **SIZES)
    assert twice == pytest.approx(2 * runtime.workspace_bytes(max_tokens=8192, **SIZES), rel=1e-3)


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
def test_B54_workspace_bytes_are_those_of_the_kernels(tmp_path):
    """Against csrc/layout/workspace.h, compiled for the host."""
    rng = random.Random(0)
    cases = [
        {
            "num_ranks": rng.choice([1, 2, 8, 72]),
            "max_tokens": rng.randrange(1, 70000),
            "top_k": rng.randrange(1, 33),
            "hidden": 128 * rng.randrange(1, 65),
        }
        for _ in range(50)
    ]
    lines = [
        'printf("%lld\\n", (long long)mok::SymmetricLayout::make({num_ranks}, {max_tokens}, {top_k}, '
        "{hidden}).bytes);".format(**case)
        for case in cases
    ]
    includes = "#include <cstdio>\n#include <initializer_list>\n#include <layout/workspace.h>\n"
    source, program = tmp_path / "sizes.cc", tmp_path / "sizes"
    source.write_text("\n".join([includes, "int main() {", *lines, "return 0; }"]))
    paths = ["-I", ROOT / "csrc", "-I", ROOT / "csrc/include"]
    subprocess.run([CXX, "-std=c++17", *paths, source, "-o", program], check=True)
    want = subprocess.check_output([program], text=True).split()
    assert [runtime.workspace_bytes(**case) for case in cases] == list(map(int, want))


def test_B56_saved_bytes_are_the_rows_of_h_and_the_table():
    sizes = {"tokens": 8192, "ffn": 2048, "top_k": 8, "num_experts": 256, "num_ranks": 8}
    got = runtime.saved_bytes(**sizes)
    rows = 1.25 * 8192 * 8
    table = 4 * schedule.table_words(8, 8192, 8, 32)
    assert got == rows * 2 * 2048 * 2 + table
    relu = runtime.saved_bytes(**sizes, activation="squared_relu", save_capacity=0.5)
    assert relu == 0.5 * 8192 * 8 * 2048 * 2 + table


def test_saved_bytes_equal_what_a_forward_keeps():
    from megatron_mok.ops import moe_forward
    from megatron_mok.reference import exchange
    from tests.oracle import problem

    q = problem(tokens=33, ffn=12, experts=4, top_k=2)
    handle = exchange.register()
    rows = schedule.saved_rows(1.25, 33, 2)
    _, h, table = moe_forward(q.x, q.ids, q.p, [q.w1], [q.w2], handle, 4, 40, 1, rows, 0, 0.0)
    exchange.close(handle)
    want = runtime.saved_bytes(
        tokens=33, ffn=12, top_k=2, num_experts=4, num_ranks=1, max_tokens=40, dtype=torch.float32
    )
    assert h.nbytes + table.nbytes == want


# ---- back end ----


def test_auto_on_a_cpu_layer_is_the_reference_and_says_why():
    name, why = runtime.choose_backend(MokConfig(), "cpu")
    reason = "the layer is on the CPU" if torch.cuda.is_available() else "no GPU on this machine"
    assert (name, why) == ("reference", f"backend=auto: {reason}")
    assert runtime.choose_backend(MokConfig(backend="reference"), "cpu")[0] == "reference"


def test_cuda_for_a_cpu_layer_is_refused():
    with pytest.raises(errors.UnsupportedDevice, match="got a layer on cpu"):
        runtime.choose_backend(MokConfig(backend="cuda"), "cpu")
    with pytest.raises(errors.UnsupportedDevice, match="got a layer on cpu"):
        get(config=MokConfig(backend="cuda"))


def test_B85_auto_on_a_gpu_never_falls_back(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "megatron_mok.runtime.cuda", None)
    for backend in ("auto", "cuda"):
        with pytest.raises(errors.LibraryMissing, match="make build"):
            runtime.choose_backend(MokConfig(backend=backend), "cuda:0")
    name, why = runtime.choose_backend(MokConfig(backend="reference"), "cuda:0")
    assert name == "reference" and "as asked for" in why


class FakeProvider:
    """A back end that records what it is asked for."""

    name = "cuda"

    def __init__(self, fails=None):
        self.opened, self.closed, self.fails = [], [], fails

    def why(self, device):
        return "a fake"

    def facts(self, device):
        return {"arch": "90a", "sms": 132}

    def open(self, request):
        if self.fails:
            raise self.fails
        self.opened.append(request)
        return len(self.opened) - 1

    def close(self, handle):
        self.closed.append(handle)

    def abort(self, handle, cause):
        pass

    def set_layer(self, handle, layer):
        pass


def test_provider_gets_the_request_and_its_errors_come_through(monkeypatch):
    provider = FakeProvider()
    monkeypatch.setattr(comm_module, "_provider", lambda backend, device: provider)
    comm = get(max_tokens=8)
    assert (comm.handle, comm.backend, comm.max_tokens) == (0, "cuda", 8) and "a fake" in comm.why
    request = provider.opened[0]
    assert (request.hidden, request.top_k, request.num_experts, request.dtype) == (16, 2, 4, torch.float32)
    runtime.reserve(16)
    assert (comm.handle, comm.max_tokens, provider.closed) == (1, 16, [0])
    runtime.release()
    assert comm.handle is None and provider.closed == [0, 1]
    provider.fails = errors.UnsupportedDevice("no such GPU")
    with pytest.raises(errors.UnsupportedDevice, match="no such GPU"):
        get()
    assert comm.handle is None


# ---- communicators ----


def test_B54_one_communicator_serves_48_layers_and_two_shapes_get_two():
    comms = {id(get()) for _ in range(48)}
    assert len(comms) == 1
    assert get(hidden=32) is not get() and get(top_k=1) is not get() and get(dtype=BF16) is not get()


def test_B55_the_workspace_does_not_grow_with_each_new_length():
    comm = get(max_tokens=100)
    handle = comm.handle
    for tokens in (100, 7, 64, 99, 1):
        assert get(max_tokens=tokens) is comm
    assert comm.handle == handle and comm.max_tokens == 100


def test_another_configuration_makes_the_workspace_anew():
    first = get()
    second = get(config=MokConfig(save_capacity=0.5))
    assert second is not first and first.handle is None and second.handle is not None


def test_B57_release_frees_and_the_next_forward_rebuilds():
    comm = get()
    runtime.release()
    assert comm.handle is None
    from tests.oracle import problem

    q = problem(tokens=8)
    out = runtime.moe(q.x, q.ids, q.p, list(q.w1), list(q.w2), comm=comm, num_experts=4)
    assert comm.handle is not None and out.shape == q.x.shape


def test_reserve_holds_for_workspaces_made_later_until_release():
    runtime.reserve(64)
    assert get(max_tokens=8).max_tokens == 64
    runtime.release()
    assert get(max_tokens=8).max_tokens == 8
    with pytest.raises(ValueError, match="positive integer"):
        runtime.reserve(0)


def test_experts_that_do_not_divide_are_a_config_error(monkeypatch):
    comm = get()
    comm.close()
    comm.size = 3
    with pytest.raises(errors.ConfigError, match="num_experts: got 4, need a multiple of 3 ranks"):
        comm.open()


def test_a_rank_keeps_its_own_error_where_the_peers_cannot_be_told():
    from megatron_mok.runtime.agreement import on_all

    class Alone:
        def gather_bytes(self, payload):
            raise errors.PeerAbort("lost rank 1")

    def fails():
        raise MemoryError("no memory left")

    with pytest.raises(MemoryError, match="no memory left") as caught:
        on_all(Alone(), fails)
    assert isinstance(caught.value.__cause__, errors.PeerAbort)
    with pytest.raises(errors.PeerAbort, match="lost rank 1"):
        on_all(Alone(), lambda: 1)


def test_B70_importing_touches_no_gpu():
    import subprocess
    import sys

    code = "import megatron_mok, megatron_mok.runtime, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_provider_has_the_protocol_s_methods():
    """Also the CUDA one, which cannot be opened here: the same names and parameters."""
    import inspect

    from megatron_mok.runtime import cuda, provider

    methods = [name for name in vars(provider.Provider) if not name.startswith("_") and name != "name"]
    assert {"open", "close", "abort", "facts", "why", "set_layer"} <= set(methods)
    for kind in (provider.ReferenceProvider, cuda.CudaProvider):
        for name in methods:
            want = list(inspect.signature(getattr(provider.Provider, name)).parameters)
            assert list(inspect.signature(getattr(kind, name)).parameters) == want, (kind, name)
