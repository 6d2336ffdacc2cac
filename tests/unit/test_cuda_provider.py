"""The CUDA provider's decisions, with the machine played by fakes."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_mok import errors, native
from megatron_mok.config import MokConfig
from megatron_mok.runtime import cuda
from megatron_mok.runtime.provider import Request

GPUS = ["GPU-a", "GPU-b", "GPU-c"]


class Ranks:
    """An exchange in which every rank says its part of each round: a value, or the error that it has."""

    def __init__(self, rank, *rounds):
        self.rank, self.size = rank, len(rounds[0])
        self.timeout_s, self.first_timeout_s = 10.0, 60.0
        self.rounds = [list(said) for said in rounds]

    def gather_bytes(self, payload):
        said = self.rounds.pop(0)
        every = [
            {"error": [type(part).__name__, str(part)]} if isinstance(part, Exception) else {"result": part}
            for part in said
        ]
        every[self.rank] = json.loads(payload)
        return [json.dumps(part).encode() for part in every]


@pytest.fixture
def machine(monkeypatch):
    """Three GPUs that reach each other."""
    fake = SimpleNamespace(apart=set())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(
            uuid=GPUS[device if isinstance(device, int) else device.index],
            multi_processor_count=132,
            major=9,
            minor=0,
        ),
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in fake.apart)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


def device(index):
    return torch.device("cuda", index)


def request(**changes):
    values = dict(
        group=None, control=0, hidden=512, top_k=2, num_experts=8, max_tokens=64, dtype=torch.bfloat16,
        device=device(0), config=MokConfig(),
    )  # fmt: skip
    return Request(**(values | changes))


def test_B64_pairs_without_peer_access_are_listed(machine):
    machine.apart.add((0, 2))
    ranks = Ranks(0, GPUS, [None, [], [0]])
    with pytest.raises(ValueError, match=r"ranks \[\(0, 2\), \(2, 0\)\].*alltoall"):
        cuda._check_devices(ranks, device(0), shared=False)


def test_all_pairs_reach_each_other(machine):
    cuda._check_devices(Ranks(1, GPUS, [[], None, []]), device(1), shared=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_B66_ranks_on_one_gpu_are_named_on_each(machine, rank):
    said = ["GPU-b", "GPU-b"]
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] on GPU GPU-b.*shared_device"):
        cuda._check_devices(Ranks(rank, said), device(1), shared=False)
    cuda._check_devices(Ranks(rank, said, [[], []]), device(1), shared=True)


def test_B16_B27_what_the_kernels_lack_is_listed_at_once(machine):
    config = MokConfig(num_sms=200, comm_sms=(202, 2))
    wrong = request(hidden=320, top_k=33, dtype=torch.float32, config=config)
    with pytest.raises(errors.ConfigError) as caught:
        cuda._check(wrong, 1)
    assert {p.field for p in caught.value.problems} == {"hidden", "top_k", "dtype", "num_sms", "comm_sms"}
    cuda._check(request(), 1)


def test_B60_no_workspace_inside_a_capture(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="capture: run one forward"):
        cuda._check(request(), 1)


def test_settings_follow_the_configuration(machine):
    config = MokConfig(comm_sms=(8, 16), minibatch_rows=384, ring_rows=1280)
    settings = cuda._settings(request(config=config), Ranks(0, GPUS))
    assert settings == native.Settings(
        num_sms=132, comm_sms=8, backward_comm_sms=16, minibatch_units=2, ring_rows=1280, timeout_s=10.0,
        first_timeout_s=60.0,
    )  # fmt: skip
    assert cuda._settings(request(), Ranks(0, GPUS[:1])).first_timeout_s == 10.0


class Handle:
    multicast_ptr = 0

    def __init__(self, region):
        self.buffer_ptrs = [region.data_ptr(), 4096]


@pytest.fixture
def symmetric(monkeypatch):
    """torch's symmetric memory on the CPU; `rendezvous` may be replaced."""
    module = pytest.importorskip(
        "torch.distributed._symmetric_memory", reason="this torch has no symmetric memory"
    )
    for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"):
        monkeypatch.setenv(name, "")
    fake = SimpleNamespace(
        empty_strided_p2p=lambda size, stride, dtype, device: torch.empty(size, dtype=dtype)
    )
    monkeypatch.setattr(module, "_SymmetricMemory", fake)
    monkeypatch.setattr(module, "rendezvous", lambda region, group: Handle(region))
    return lambda make: monkeypatch.setattr(module, "rendezvous", make)


def test_regions_of_all_ranks_and_no_multicast(symmetric):
    from megatron_mok import env

    regions, (handle, region) = cuda._rendezvous(request(), Ranks(0, [None, None]), 4096)
    assert list(regions) == [region.data_ptr(), 4096]
    assert env.flag("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    assert not env.flag("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    cuda._rendezvous(request(config=MokConfig(shared_device=True)), Ranks(0, [None, None]), 4096)
    assert env.flag("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")


def test_B51_no_rank_waits_in_the_rendezvous_for_one_without_memory(symmetric):
    symmetric(lambda region, group: pytest.fail("the rendezvous was entered"))
    ranks = Ranks(0, [None, MemoryError("out of memory")])
    with pytest.raises(errors.PeerAbort, match="rank 1 gave up: MemoryError: out of memory") as caught:
        cuda._rendezvous(request(), ranks, 4096)
    assert caught.value.peer == 1


def test_B65_a_multicast_pointer_is_an_error(symmetric):
    def rendezvous(region, group):
        handle = Handle(region)
        handle.multicast_ptr = 4096
        return handle

    symmetric(rendezvous)
    with pytest.raises(RuntimeError, match="multicast pointer 0x1000.*need 0"):
        cuda._rendezvous(request(), Ranks(0, [None, None]), 4096)


@pytest.mark.parametrize(
    "cause",
    ["pidfd_getfd: Operation not permitted", "CUDA error: system not yet initialized"],
    ids=["B62", "B63"],
)
def test_a_failed_handle_exchange_names_cause_and_remedies(symmetric, cause):
    def rendezvous(region, group):
        raise RuntimeError(cause)

    symmetric(rendezvous)
    with pytest.raises(RuntimeError, match=f"rank 0: {cause}.*pidfd_getfd.*fabric manager.*mok doctor"):
        cuda._rendezvous(request(), Ranks(0, [None, None]), 4096)


def test_B90_an_old_driver_is_an_unsupported_device(monkeypatch):
    def load(device):
        raise RuntimeError("mok_load_kernels: CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(native, "build_info", lambda: {"archs": ["90a"], "cuda": "13.0", "csrc_tree": ""})
    monkeypatch.setattr(native, "load_kernels", load)
    with pytest.raises(errors.UnsupportedDevice, match="insufficient.*built with CUDA 13.0"):
        cuda.PROVIDER.why(device(0))


def test_B71_facts_tell_gpus_and_libraries_apart(machine, monkeypatch):
    monkeypatch.setattr(native, "build_info", lambda: {"abi": 1, "csrc_tree": "abc"})
    assert cuda.PROVIDER.facts(device(0)) == {"gpu": "9.0", "num_sms": 132, "library": "ABI 1, csrc abc"}
