"""What an install makes: a wheel without nvcc, configuration errors, the built library where there is one."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "megatron_mok" / "native" / "libmegatron_mok.so"
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def configure(build: Path, *options: str, **environment: str) -> subprocess.CompletedProcess:
    command = [CMAKE, "-S", str(ROOT), "-B", str(build), *options]
    return subprocess.run(
        command, env={**os.environ, **environment}, text=True, capture_output=True, timeout=240
    )


@pytest.mark.parametrize("archs", ["80", "90", "90a,sm_100a"])
def test_unknown_arch_is_a_clear_error(tmp_path, archs):
    done = configure(tmp_path, MOK_ARCHS=archs)
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert (
        f"got '{archs.split(',')[-1]}'" in message
        and "90a;100a;103a" in message
        and "MOK_ARCHS=90a" in message
    )


def test_torchs_arch_list_is_not_read(tmp_path):
    done = configure(tmp_path, "-DMOK_NVCC=OFF", TORCH_CUDA_ARCH_LIST="8.0 9.0", MOK_ARCHS="100a")
    assert done.returncode == 0, done.stderr
    assert "MOK_ARCHS:STRING=100a\n" in (tmp_path / "CMakeCache.txt").read_text()


@pytest.mark.skipif(not NVCC, reason="needs nvcc to be found")
@pytest.mark.parametrize("cuda_home", ["", ":/usr/local/cuda", "/does/not/exist"])
def test_cuda_home_of_any_kind_is_survived(tmp_path, cuda_home):
    done = configure(tmp_path, CUDA_HOME=cuda_home, MOK_ARCHS="90a")
    assert done.returncode == 0, done.stderr
    assert "nvcc not found" not in done.stderr


def test_wheel_without_nvcc(tmp_path):
    """Installs, says that the library is missing, serves every Python >= 3.12 and holds every module."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    options = ["-C", "cmake.define.MOK_NVCC=OFF", "-C", f"build-dir={tmp_path}/build"]
    done = subprocess.run([*command, *options, str(ROOT)], text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "nvcc not found" in line]
    assert len(said) == 1 and "without the CUDA library" in said[0]
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {p.relative_to(ROOT).as_posix() for p in (ROOT / "megatron_mok").rglob("*.py")}
    assert source <= names
    models = {f"megatron_mok/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "configs").rglob("*.json")}
    assert models <= names
    assert not any(name.endswith(".so") for name in names)
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "mok=megatron_mok.cli:main" in zipfile.ZipFile(wheel).read(entry_points).decode().replace(" ", "")


@pytest.mark.parametrize(("optional", "status"), [(["--optional"], 0), ([], 1)])
def test_build_tool_without_nvcc(tmp_path, optional, status):
    """The install goes on with one line; whoever asks for the library gets an error."""
    for name in ("CMakeLists.txt", "csrc", "tools", "configs"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    ninja = Path(sys.executable).with_name("ninja")
    command = [CMAKE, "-S", str(tmp_path), "-B", str(tmp_path / "build" / "cmake"), "-G", "Ninja"]
    command += ["-DMOK_NVCC=OFF", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    command = [sys.executable, str(tmp_path / "tools" / "build.py"), "--dirty", *optional]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1].startswith("megatron-mok: no nvcc")
    assert not list(tmp_path.rglob("*.so"))


@pytest.fixture(scope="module")
def build_info() -> dict:
    """What the installed library says of itself, on a machine that may have no GPU."""
    if not LIBRARY.exists():
        assert not NVCC, "nvcc is here, so `make venv` or `make build` should have built the library"
        pytest.skip("no nvcc on this machine, so no library")
    script = (
        f"import ctypes; library = ctypes.CDLL({str(LIBRARY)!r}); "
        "library.mok_build_info.restype = ctypes.c_char_p; print(library.mok_build_info().decode())"
    )
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_library_loads_without_a_gpu_and_names_its_archs(build_info):
    """All three, or those that the build was asked for (MOK_ARCHS)."""
    cache = ROOT / "build" / "cmake" / "CMakeCache.txt"
    asked = re.search(r"^MOK_ARCHS:STRING=(.*)$", cache.read_text() if cache.exists() else "", re.MULTILINE)
    assert build_info["archs"] == re.split("[ ,;]+", asked[1] if asked else "90a;100a;103a")
    assert "set(MOK_KNOWN_ARCHS 90a 100a 103a)" in (ROOT / "CMakeLists.txt").read_text(), "the default"


def test_library_needs_no_cuda_or_torch_library(build_info):
    needed = subprocess.run(
        ["readelf", "-d", str(LIBRARY)], text=True, capture_output=True, check=True
    ).stdout
    libraries = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "(NEEDED)" in line]
    assert {name.split(".so")[0] for name in libraries} <= {
        "libc", "libm", "libdl", "libpthread", "librt", "ld-linux-x86-64", "ld-linux-aarch64"
    }  # fmt: skip


def test_library_exports_the_c_abi_alone(build_info):
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(LIBRARY)], text=True, capture_output=True, check=True
    )
    names = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert names and all(name.startswith("mok_") for name in names), sorted(names)


def test_library_holds_every_arch_and_wgmma(build_info):
    """Each arch named has machine code; every main kernel of sm_90a has WGMMAs (HGMMA in SASS)."""
    cuobjdump = shutil.which("cuobjdump") or triton_tool("cuobjdump")
    environment = dict(os.environ, PATH=f"{Path(cuobjdump).parent}:{os.environ['PATH']}")

    def dump(*options: str) -> str:
        command = [cuobjdump, *options, str(LIBRARY)]
        return subprocess.run(
            command, env=environment, text=True, capture_output=True, check=True, timeout=240
        ).stdout

    listed = dump("--list-elf")
    for arch in build_info["archs"]:
        assert f"sm_{arch}" in listed
    if "90a" in build_info["archs"]:
        functions = dump("-sass", "-arch", "sm_90a").split("Function : ")[1:]
        kernels = {name: "HGMMA" in code for name, _, code in (f.partition("\n") for f in functions)}
        main = {name: has for name, has in kernels.items() if "ward_kernel" in name}
        assert len(main) == 4 and all(main.values()), main  # forward and backward, two activations


def triton_tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def test_host_tests(tmp_path):
    """The C++ tests of what decides order and addresses, built without CUDA."""
    done = configure(tmp_path, "-DMOK_NVCC=OFF", "-DMOK_BUILD_TESTS=ON")
    assert done.returncode == 0, done.stderr
    subprocess.run([CMAKE, "--build", str(tmp_path), "-j2"], check=True, timeout=240)
    ctest = str(Path(CMAKE).with_name("ctest"))
    done = subprocess.run(
        [ctest, "--test-dir", str(tmp_path), "--output-on-failure", "--no-tests=error"],
        text=True, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_decode_cases(tmp_path):
    """Tickets of the backward, segments and places of rows, 100,000 random cases each."""
    program = tmp_path / "decode_cases"
    sources = [ROOT / "tests" / "build" / "decode_cases.cc", ROOT / "csrc" / "tests" / "main.cc"]
    flags = ["-std=c++20", "-O2", f"-I{ROOT}/csrc", f"-I{ROOT}/csrc/include"]
    subprocess.run(["c++", *flags, *sources, "-o", program], check=True, timeout=120)
    done = subprocess.run([program], text=True, capture_output=True, timeout=120)
    assert done.returncode == 0 and "0 failed" in done.stdout, done.stdout


def test_abi_version_is_the_one_of_the_header(build_info):
    header = (ROOT / "csrc" / "include" / "megatron_mok" / "api.h").read_text()
    (version,) = (
        line.split()[2] for line in header.splitlines() if line.startswith("#define MOK_ABI_VERSION")
    )
    assert build_info["abi"] == int(version)
