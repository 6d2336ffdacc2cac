"""The ctypes mirror against the C header, the loader's errors, and the saved order of h. No GPU needed."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_mok import errors, native
from megatron_mok.native import communicator, failure, library, structs

ROOT = Path(__file__).resolve().parents[2]
CC = shutil.which("cc") or shutil.which("gcc")


@pytest.mark.skipif(CC is None, reason="no C compiler")
def test_structs_have_the_offsets_of_the_header(tmp_path):
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "megatron_mok/api.h"', "int main(void) {"]
    want = []
    for name, struct in structs.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        want.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                f"sizeof((({name}*)0)->{field}));"
            )
            member = getattr(struct, field)
            want.append(f"{name}.{field} {member.offset} {member.size}")
    constants = {"MOK_ABI_VERSION": structs.ABI_VERSION, "MOK_MAX_RANKS": structs.MAX_RANKS}
    for prefix, enum in (("MOK_ERR_", structs.Status), ("MOK_PHASE_", structs.Phase)):
        constants |= {("MOK_OK" if m.name == "OK" else prefix + m.name): m.value for m in enum}
    for name, value in constants.items():
        lines.append(f'printf("{name} %d\\n", (int){name});')
        want.append(f"{name} {value}")
    source = tmp_path / "offsets.c"
    source.write_text("\n".join([*lines, "return 0; }"]))
    program = tmp_path / "offsets"
    subprocess.run([CC, "-std=c11", "-I", ROOT / "csrc/include", source, "-o", program], check=True)
    assert subprocess.check_output([program], text=True).splitlines() == want


def test_header_declares_what_is_called():
    header = (ROOT / "csrc/include/megatron_mok/api.h").read_text()
    lines = [line for line in header.splitlines() if line.startswith("MOK_API")]
    assert set(structs.FUNCTIONS) == {line.split("(")[0].split()[-1].lstrip("*") for line in lines}


@pytest.fixture
def fresh_loader(monkeypatch):
    library.load.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.load.cache_clear()


def test_missing_library_says_what_to_do(fresh_loader, tmp_path):
    fresh_loader.setenv("MOK_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(errors.LibraryMissing, match=r"absent\.so: not there; run `make build`"):
        native.build_info()


@pytest.mark.skipif(CC is None, reason="no C compiler")
@pytest.mark.parametrize("case", ["B89-text", "B89-symbols", "abi"])
def test_unusable_library_is_an_error_that_names_it(fresh_loader, tmp_path, case):
    path = tmp_path / "libother.so"
    if case == "B89-text":
        path.write_text("not a library")
    else:
        names = [n for n in structs.FUNCTIONS if n != "mok_build_info"] if case == "abi" else []
        code = "".join(f"int {n}(void) {{ return 0; }}\n" for n in names)
        code += 'const char* mok_build_info(void) { return "{\\"abi\\": 999}"; }\n'
        (tmp_path / "other.c").write_text(code)
        subprocess.run([CC, "-shared", "-fPIC", tmp_path / "other.c", "-o", path], check=True)
    fresh_loader.setenv("MOK_LIBRARY", str(path))
    match = "got ABI version 999, need 2" if case == "abi" else "cannot be loaded"
    with pytest.raises(errors.LibraryMissing, match=match):
        native.load()


@pytest.mark.skipif(CC is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (structs.Status.ABI, errors.LibraryMissing),
        (structs.Status.ARGUMENT, ValueError),
        (structs.Status.DEVICE, errors.UnsupportedDevice),
        (structs.Status.CUDA, RuntimeError),
        (structs.Status.NOT_COMPILED, errors.LibraryMissing),
    ],
)
def test_a_status_is_an_error_with_the_library_s_text(fresh_loader, tmp_path, status, raised):
    """DEVICE and NOT_COMPILED are what a GPU without kernels gets."""
    spoken = ("mok_build_info", "mok_last_error", "mok_load_kernels")
    code = "".join(f"int {n}(void) {{ return 0; }}\n" for n in structs.FUNCTIONS if n not in spoken)
    code += f'const char* mok_build_info(void) {{ return "{{\\"abi\\": {structs.ABI_VERSION}}}"; }}\n'
    code += 'const char* mok_last_error(void) { return "sm_100a: not supported yet"; }\n'
    code += f"int mok_load_kernels(void) {{ return {int(status)}; }}\n"
    (tmp_path / "other.c").write_text(code)
    path = tmp_path / "libother.so"
    subprocess.run([CC, "-shared", "-fPIC", tmp_path / "other.c", "-o", path], check=True)
    fresh_loader.setenv("MOK_LIBRARY", str(path))
    with pytest.raises(raised, match="mok_load_kernels: sm_100a: not supported yet") as caught:
        library.call("mok_load_kernels", 0)
    assert type(caught.value) is raised


def fragments(h):
    """h [S, 2I] in the order that the header of unpack_h describes, written as a plain loop."""
    rows, columns = h.shape
    half = columns // 2
    out = []
    for group in range(rows // 8):
        for tile in range(half // 128):
            for vector in range(8):
                for lane in range(32):
                    up, nth = vector in (2, 3, 6, 7), vector % 2 + vector // 4 * 2
                    for j in range(4 * nth, 4 * nth + 4):
                        column = tile * 128 + 8 * j + 2 * (lane % 4) + (half if up else 0)
                        row = group * 8 + lane // 4
                        out += [h[row, column], h[row, column + 1]]
    return torch.stack(out).view(rows, columns)


@pytest.mark.parametrize(("rows", "intermediate"), [(8, 128), (24, 256)])
def test_unpack_h_undoes_the_fragment_order(rows, intermediate):
    h = torch.arange(rows * 2 * intermediate, dtype=torch.float32).view(rows, 2 * intermediate)
    assert torch.equal(native.unpack_h(fragments(h)), h)


STAMP = 5 << 24 | 1 << 20 | 3
LATER = 6 << 24 | 2 << 20 | 4


def record(kind=1, **values):
    return structs.ErrorRecord(rank=1, peer=2, call=4, layer=3, kind=kind, **values)


def test_time_out_names_everything():
    error = failure.from_record(
        record(code=1, phase=structs.Phase.PUBLISH, expected=STAMP, seen=0, waited_ns=2_500_000_000)
    )
    assert isinstance(error, errors.PeerTimeout)
    assert (error.rank, error.peer, error.call, error.layer) == (1, 2, 5, 3)
    assert (error.phase, error.seconds, error.seen) == ("publish", 2.5, "no call yet")
    assert error.expected == "call 5 (forward, layer 3)"


def test_time_out_of_a_counter_shows_the_counts():
    error = failure.from_record(record(code=1, phase=structs.Phase.GEMM2, expected=64, seen=60))
    assert isinstance(error, errors.PeerTimeout)
    assert (error.call, error.expected, error.seen) == (4, 64, 60)
    backward = failure.from_record(record(code=1, phase=structs.Phase.GEMM2, kind=2))
    assert isinstance(backward, errors.PeerTimeout) and backward.call == 5  # counted when it ends


def test_mismatch_prints_both_calls():
    error = failure.from_record(record(code=2, phase=structs.Phase.PUBLISH, expected=STAMP, seen=LATER))
    assert isinstance(error, errors.ProtocolMismatch)
    assert "call 5 (forward, layer 3)" in str(error) and "call 6 (backward, layer 4)" in str(error)


def test_abort_of_a_peer_names_it():
    error = failure.from_record(record(code=3, phase=structs.Phase.COMBINE, expected=STAMP))
    assert isinstance(error, errors.PeerAbort) and error.peer == 2
    error = failure.from_record(record(code=4, phase=structs.Phase.PUBLISH, expected=512, seen=600))
    assert isinstance(error, errors.PeerAbort) and "announced 600 tokens" in str(error)


def test_too_many_tokens_here():
    mine = structs.ErrorRecord(code=4, rank=1, peer=1, expected=512, seen=600)
    error = failure.from_record(mine)
    assert isinstance(error, errors.WorkspaceTooSmall) and (error.got, error.max_tokens) == (600, 512)


def test_no_record_is_no_error():
    assert failure.from_record(record(code=0)) is None


def test_activations_are_numbered_as_in_the_header():
    header = (ROOT / "csrc/include/megatron_mok/api.h").read_text()
    names = ("SWIGLU", "SWIGLU_CLAMPED", "GEGLU", "SQUARED_RELU")
    assert all(f"MOK_ACT_{name} = {i}" in header for i, name in enumerate(names))
    number = communicator._activation
    assert [number(0, 0.0), number(0, 7.0), number(1, 0.0), number(3, 0.0)] == [0, 1, 2, 3]
    for kind, limit in ((1, 7.0), (2, 0.0), (3, 7.0)):
        with pytest.raises(errors.ConfigError, match="activation"):
            number(kind, limit)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtypes", "accumulate", "direct"),
    [
        ((FP32, FP32), False, (True, True)),
        ((FP32, FP32), True, (True, True)),
        ((BF16, BF16), False, (True, True)),
        ((BF16, BF16), True, (False, False)),
        ((FP32, BF16), False, (True, True)),
        ((FP32, BF16), True, (False, False)),
    ],
    ids=str,
)
def test_B33_the_kernel_writes_bf16_only_where_one_rounding_is_left(dtypes, accumulate, direct):
    for count in (1, 3):
        wanted = [[torch.empty(4, 8, dtype=dtype) for _ in range(count)] for dtype in dtypes]
        *written, adds = communicator._gradient_targets(*wanted, accumulate)
        for want, got, same in zip(wanted, written, direct, strict=True):
            assert (got is want) == same
            assert len(got) == count and all(t.shape == (4, 8) and t.is_contiguous() for t in got)
            assert all(t.dtype == (want[0].dtype if same else FP32) for t in got)
        assert adds == (accumulate and all(direct))


def test_B35_frozen_weights_and_unreachable_buffers():
    whole = torch.empty(4, 8, dtype=FP32)
    assert communicator._gradient_targets([], [whole], True) == ([], [whole], True)
    for bad in (torch.empty(8, 4).t(), torch.empty(33)[1:].view(4, 8)):
        _, (written,), adds = communicator._gradient_targets([], [bad], True)
        assert written is not bad and written.is_contiguous() and not adds


@pytest.mark.parametrize("accumulate", [False, True])
def test_B36_temporary_sums_are_rounded_once(accumulate):
    """256 + 1.0078125 is 258 in bf16; had the part been rounded to 1.0 before, it would be 256."""
    wanted = [torch.full((2, 2), 256.0, dtype=BF16), torch.full((2, 2), -3.0, dtype=BF16)]
    sums = [torch.full((2, 2), 1.0078125), torch.full((2, 2), 3.0)]
    call = native.BackwardCall(
        torch.device("cpu"), structs.BackwardArgs(), *[torch.empty(0)] * 2, [(wanted, sums)], accumulate, None
    )
    before = [w.clone() for w in wanted]
    call.finish()
    for was, got, part in zip(before, wanted, sums, strict=True):
        assert torch.equal(got, (was.float() + part if accumulate else part).bfloat16())


def test_released_handle_is_an_error():
    with pytest.raises(ValueError, match="released"):
        native.lookup(10**6)
