"""The operators and moe() on one rank: autograd, main_grad, input forms, state, torch.compile."""

import gc
import itertools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_mok import ops, runtime
from megatron_mok.config import MokConfig
from megatron_mok.errors import ConfigError, LibraryMissing, WorkspaceTooSmall
from megatron_mok.reference import exchange
from tests.oracle import assert_equal_bits, problem, relative_error, solve


def comm_for(q, max_tokens=None, **config):
    return runtime.get_comm(
        None,
        hidden=q.x.shape[1],
        top_k=q.ids.shape[1],
        num_experts=q.num_experts,
        max_tokens=max_tokens or max(len(q.x), 1),
        device="cpu",
        dtype=q.x.dtype,
        config=MokConfig(**config),
    )


@pytest.fixture(autouse=True)
def no_state_between_tests():
    yield
    runtime.release()


def leaves(q, **needs):
    """x, p and one leaf per expert, as a model has them; needs: x, p, w1, w2 (default True)."""

    def on(name):
        return needs.get(name, True)

    return (
        q.x.clone().requires_grad_(on("x")),
        q.p.clone().requires_grad_(on("p")),
        [w.clone().requires_grad_(on("w1")) for w in q.w1],
        [w.clone().requires_grad_(on("w2")) for w in q.w2],
    )


def call(q, x, p, w1, w2, comm=None, **options):
    options = {"activation": q.activation, "act_limit": q.limit} | options
    return runtime.moe(x, q.ids, p, w1, w2, comm=comm or comm_for(q), num_experts=q.num_experts, **options)


def step(q, comm=None, **options):
    """out and gradients of one forward and backward."""
    x, p, w1, w2 = leaves(q)
    out = call(q, x, p, w1, w2, comm, **options)
    out.backward(q.dy)
    grads = {"dw1": torch.stack([w.grad for w in w1]), "dw2": torch.stack([w.grad for w in w2])}
    return {"out": out.detach(), "dx": x.grad, "dp": p.grad, **grads}


def test_moe_equals_the_oracle():
    for activation, limit in (("swiglu", None), ("swiglu", 0.5), ("geglu", None), ("squared_relu", None)):
        q = problem(activation=activation, limit=limit)
        got, want = step(q), solve(q)
        assert max(relative_error(got[name], want[name]) for name in want) < 2e-6


def test_B43_one_rank_needs_no_process_group():
    q = problem(top_k=4)
    assert not torch.distributed.is_initialized()
    comm = comm_for(q)
    out = call(q, q.x, q.p, list(q.w1), list(q.w2), comm)
    assert out.shape == q.x.shape and (comm.rank, comm.size, comm.backend) == (0, 1, "reference")
    assert relative_error(out, solve(q)["out"]) < 1e-6


# ---- requires_grad ----


@pytest.mark.parametrize(
    "needs",
    list(itertools.product([False, True], repeat=4)),
    ids=lambda n: "B35-" + "".join("xpab"[i] if v else "-" for i, v in enumerate(n)),
)
def test_only_the_gradients_asked_for(needs):
    q = problem()
    want = step(q)
    names = ("x", "p", "w1", "w2")
    x, p, w1, w2 = leaves(q, **dict(zip(names, needs, strict=True)))
    out = call(q, x, p, w1, w2)
    assert torch.equal(out, want["out"]) and out.requires_grad == any(needs)
    if any(needs):
        out.backward(q.dy)
    got = {"dx": [x], "dp": [p], "dw1": w1, "dw2": w2}
    for (name, tensors), need in zip(got.items(), needs, strict=True):
        for i, tensor in enumerate(tensors):
            if need:
                assert torch.equal(tensor.grad, want[name][i] if len(tensors) > 1 else want[name])
            else:
                assert tensor.grad is None


def test_B35_single_frozen_experts_and_toggling_between_steps():
    q = problem()
    want = step(q)
    x, p, w1, w2 = leaves(q)
    for frozen in ([0], [1, 2], []):
        for i, (a, b) in enumerate(zip(w1, w2, strict=True)):
            a.grad = b.grad = None
            a.requires_grad_(i not in frozen)
            b.requires_grad_(i not in frozen)
        call(q, x, p, w1, w2).backward(q.dy)
        for i in range(4):
            if i in frozen:
                assert w1[i].grad is None and w2[i].grad is None
            else:
                assert torch.equal(w1[i].grad, want["dw1"][i]) and torch.equal(w2[i].grad, want["dw2"][i])


def test_B35_no_buffers_for_frozen_weights():
    w = [torch.zeros(4, 4) for _ in range(3)]
    buffers, accumulate = ops.weight_gradient_buffers((w, w), ([False] * 3, [True] * 3))
    assert [len(b) for b in buffers] == [0, 3] and not accumulate


# ---- main_grad ----


def with_main_grad(weights, dtype=torch.float32, flag=True):
    for w in weights:
        w.main_grad = torch.zeros(w.shape, dtype=dtype)
        if flag:
            w.grad_added_to_main_grad = False
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids="B34-B36-main_grad-{}".format)
def test_two_micro_batches_add_into_main_grad_exactly_twice(dtype):
    q = problem(tokens=64, hidden=32, ffn=24, dtype=torch.bfloat16)
    x, p, w1, w2 = leaves(q)
    once = {}
    hooks = []
    for w in with_main_grad(w1 + w2, dtype):
        w.register_post_accumulate_grad_hook(lambda param: hooks.append(param))
    for micro_batch in range(2):
        for w in w1 + w2:
            w.grad, w.grad_added_to_main_grad = None, False
        call(q, x, p, w1, w2).backward(q.dy)
        assert len(hooks) == (micro_batch + 1) * 8
        assert all(w.grad_added_to_main_grad and w.grad.shape == w.shape for w in w1 + w2)
        if micro_batch == 0:
            once = {id(w): w.main_grad.clone() for w in w1 + w2}
    for w in w1 + w2:
        assert w.main_grad.dtype == dtype and w.main_grad.norm() > 0
        assert torch.equal(w.main_grad, 2 * once[id(w)])


def test_B36_low_bits_survive_in_fp32_main_grad():
    """dW2 of one token is dy * act: 256 from the first micro-batch, 1 from the second."""
    q = problem(
        tokens=1, hidden=1, ffn=1, experts=1, top_k=1, dtype=torch.bfloat16, activation="squared_relu"
    )
    for dtype, total in ((torch.float32, 257.0), (torch.bfloat16, 256.0)):
        x, p, w1, w2 = leaves(q)
        with torch.no_grad():
            x.fill_(1), p.fill_(1), w1[0].fill_(1)
        with_main_grad(w1 + w2, dtype)
        for value in (256.0, 1.0):
            call(q, x, p, w1, w2).backward(torch.full((1, 1), value, dtype=torch.bfloat16))
        assert w2[0].main_grad.item() == total


def test_B02_empty_expert_leaves_main_grad_untouched():
    q = problem()
    q.ids[q.ids == 2] = -1
    x, p, w1, w2 = leaves(q)
    for w in with_main_grad(w1 + w2):
        w.main_grad.fill_(3.0)
    call(q, x, p, w1, w2).backward(q.dy)
    assert (w1[2].main_grad == 3).all() and (w2[2].main_grad == 3).all()
    assert not (w1[1].main_grad == 3).any()


def test_placeholder_gradients_follow_zero_out_wgrad():
    q = problem()
    x, p, w1, w2 = leaves(q)
    for w in with_main_grad(w1 + w2):
        w.zero_out_wgrad = True
    call(q, x, p, w1, w2).backward(q.dy)
    assert all((w.grad == 0).all() for w in w1 + w2)


def test_B34_main_grad_off_auto_and_on():
    q = problem()
    want = step(q)
    for mode, flag, fused in (
        ("off", True, False),
        ("auto", False, False),
        ("auto", True, True),
        ("on", False, True),
    ):
        x, p, w1, w2 = leaves(q)
        with_main_grad(w1 + w2, flag=flag)
        call(q, x, p, w1, w2, main_grad=mode).backward(q.dy)
        for i, w in enumerate(w1):
            assert torch.equal(w.main_grad if fused else w.grad, want["dw1"][i]), (mode, flag)
            assert fused or not w.main_grad.any()
    x, p, w1, w2 = leaves(q)
    call(q, x, p, w1, w2, main_grad="auto").backward(q.dy)  # a bare module: ordinary gradients
    assert torch.equal(w1[0].grad, want["dw1"][0])
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        call(q, *leaves(q), main_grad="on")
    with pytest.raises(ValueError, match="main_grad"):
        call(q, *leaves(q), main_grad="maybe")


def test_B34_main_grad_of_a_wrong_dtype_or_shape_is_refused():
    q = problem(dtype=torch.bfloat16)
    x, p, w1, w2 = leaves(q)
    with_main_grad(w1 + w2, torch.float16)
    out = call(q, x, p, w1, w2)
    with pytest.raises(TypeError, match="main_grad: got torch.float16"):
        out.backward(q.dy)
    with_main_grad(w1 + w2)
    w1[0].main_grad = torch.zeros(3)
    out = call(q, x, p, w1, w2)
    with pytest.raises(ValueError, match="main_grad: got"):
        out.backward(q.dy)


def test_main_grad_of_some_weights_only_and_of_a_stacked_weight():
    q = problem()
    want = step(q)
    x, p, w1, w2 = leaves(q)
    with_main_grad(w1[:1])
    call(q, x, p, w1, w2).backward(q.dy)
    assert torch.equal(w1[0].main_grad, want["dw1"][0])
    for i in range(1, 4):
        assert torch.equal(w1[i].grad, want["dw1"][i])
    stacked1, stacked2 = (w.clone().requires_grad_() for w in (q.w1, q.w2))
    with_main_grad([stacked1])
    call(q, x, p, stacked1, stacked2).backward(q.dy)
    assert torch.equal(stacked1.main_grad, want["dw1"]) and torch.equal(stacked2.grad, want["dw2"])


def test_main_grad_survives_checkpointing_and_saved_tensor_hooks():
    q = problem()
    want = step(q)
    for mode in ("non-reentrant", "reentrant", "hooks"):
        x, p, w1, w2 = leaves(q)
        with_main_grad(w1 + w2)
        comm = comm_for(q)
        if mode == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
                out = call(q, x, p, w1, w2, comm)
        else:
            out = torch.utils.checkpoint.checkpoint(
                lambda x, p, w1=w1, w2=w2, comm=comm: call(q, x, p, w1, w2, comm),
                x,
                p,
                use_reentrant=mode == "reentrant",
            )
        out.backward(q.dy)
        assert torch.equal(x.grad, want["dx"]) and torch.equal(p.grad, want["dp"])
        for i, w in enumerate(w1):
            assert torch.equal(w.main_grad, want["dw1"][i]), mode


# ---- input forms ----


@pytest.mark.parametrize(
    "form", ["strided", "transposed", "ids", "probs", "expanded-dy"], ids="B22-{}".format
)
def test_non_contiguous_inputs(form):
    q = problem(tokens=24, hidden=16)
    want = step(q)
    if form == "strided":
        big = torch.full((24, 32), float("nan"))
        big[:, ::2] = q.x
        q.x = big[:, ::2]
    elif form == "transposed":
        q.x = q.x.view(4, 6, 16).transpose(0, 1).contiguous().transpose(0, 1).reshape(24, 16)
        q.x = q.x.T.contiguous().T
    elif form == "ids":
        q.ids = q.ids.T.contiguous().T
    elif form == "probs":
        q.p = torch.rand(24, 1).expand(24, 2)
        want = step(q)
        q.p = q.p.contiguous().T.contiguous().T
    else:
        q.dy = torch.ones(1).expand(24, 16)
        want = step(problem_with(q, dy=torch.ones(24, 16)))
        x, p, w1, w2 = leaves(q)
        call(q, x, p, w1, w2).sum().backward()
        assert torch.equal(x.grad, want["dx"])
    x, p, w1, w2 = q.x.detach().requires_grad_(), q.p.detach().requires_grad_(), *leaves(q)[2:]
    out = call(q, x, p, w1, w2)
    out.backward(q.dy)
    got = {"out": out, "dx": x.grad, "dp": p.grad, "dw1": torch.stack([w.grad for w in w1])}
    assert_equal_bits(got, {name: want[name] for name in got})


def problem_with(q, **changes):
    return type(q)(**{**vars(q), **changes})


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.int8, torch.uint8], ids="B22-{}".format)
def test_index_dtypes(dtype):
    q = problem()
    want = step(q)
    q.ids = q.ids.to(dtype)
    assert_equal_bits(step(q), want)


def test_B08_ids_beyond_32_bits_do_not_alias_an_expert():
    q = problem()
    q.ids = q.ids.long()
    absent, foreign = q.ids.clone(), q.ids.clone()
    absent[3, 0], foreign[3, 0] = -1, 2**32 + 1
    q.ids = absent
    want = step(q)
    q.ids = foreign
    assert_equal_bits(step(q), want)


def test_B08_check_mode_refuses_foreign_ids():
    q = problem()
    q.ids[0, 0] = 4
    with pytest.raises(ValueError, match=r"outside \[-1, 4\)"):
        call(q, *leaves(q), comm_for(q, check_every=1))
    q.ids[0, 0] = -1
    call(q, *leaves(q), comm_for(q, check_every=1))


def test_check_every_compares_one_layer_with_the_reference(monkeypatch):
    """Every second training forward of the layer that called first; evaluation does not count."""
    from megatron_mok.runtime import layer as layer_module

    q = problem(dtype=torch.bfloat16)
    comm = comm_for(q, check_every=2)

    def broken(*arguments):
        out, h, table = ops.moe_forward(*arguments)
        return out * 1.05, h, table

    values = leaves(q)
    call(q, *values, comm, layer=3)
    call(q, *values, comm, layer=3)  # compared, and right
    monkeypatch.setattr(layer_module, "moe_forward", broken)
    call(q, *values, comm, layer=3)
    with torch.no_grad():
        call(q, *values, comm, layer=3)
    call(q, *values, comm, layer=4)
    with pytest.raises(RuntimeError, match="check_every: .*{0: '0.0[45].*another dispatcher"):
        call(q, *values, comm, layer=3)


def test_wrong_dtypes_are_type_errors():
    q = problem()
    comm = comm_for(q)
    w1, w2 = list(q.w1), list(q.w2)
    with pytest.raises(TypeError, match="ids: got torch.float32"):
        runtime.moe(q.x, q.ids.float(), q.p, w1, w2, comm=comm, num_experts=4)
    with pytest.raises(TypeError, match="probs: got torch.int64"):
        runtime.moe(q.x, q.ids, q.p.long(), w1, w2, comm=comm, num_experts=4)
    with pytest.raises(TypeError, match=r"w1\[2\]: got torch.float64"):
        runtime.moe(q.x, q.ids, q.p, [*w1[:2], w1[2].double(), w1[3]], w2, comm=comm, num_experts=4)
    with pytest.raises(TypeError, match="x: got torch.float16"):
        ops.moe_forward(q.x.half(), q.ids, q.p, w1, w2, comm.handle, 4, 24, 1, -1, 0, 0.0)
    with pytest.raises(TypeError, match="ids: got torch.int64"):
        ops.moe_forward(q.x, q.ids.long(), q.p, w1, w2, comm.handle, 4, 24, 1, -1, 0, 0.0)


def test_B16_wrong_shapes_are_value_errors_that_name_the_argument():
    q = problem()
    comm = comm_for(q)
    w1, w2 = list(q.w1), list(q.w2)
    for bad, match in (
        ({"x": q.x[:, :15]}, r"x: got \(24, 15\)"),
        ({"x": q.x.double()}, "x: got .*torch.float64"),
        ({"ids": q.ids[:23]}, r"ids: got \(23, 2\)"),
        ({"ids": q.ids[:, :1]}, r"ids: got \(24, 1\)"),
        ({"probs": q.p[:23]}, r"probs: got \(23, 2\)"),
        ({"w1": w1[:3]}, "w1: got 3 of"),
        ({"w2": [w[:, :11] for w in w2]}, r"w1: got .* need 4 of \[22, 16\]"),
        ({"w2": [w[:15] for w in w2]}, r"w2: got .* need 4 of \[16, 12\]"),
        ({"act_limit": -1.0}, "act_limit: got -1.0"),
        ({"activation": "relu"}, "activation: got 'relu'"),
    ):
        arguments = {"x": q.x, "ids": q.ids, "probs": q.p, "w1": w1, "w2": w2, "num_experts": 4} | bad
        with pytest.raises(ValueError, match=match):
            runtime.moe(**arguments, comm=comm)
    call(q, q.x, q.p, w1, w2, comm)  # and the communicator still works


def test_B23_B24_bf16_probabilities_are_widened_once_and_their_gradient_is_bf16():
    q = problem()
    narrow = q.p.bfloat16()
    x, _, w1, w2 = leaves(q)
    p = narrow.clone().requires_grad_()
    out = call(q, x, p, w1, w2)
    out.backward(q.dy)
    q.p = narrow.float()
    want = step(q)
    assert torch.equal(out, want["out"]) and p.grad.dtype == torch.bfloat16
    assert torch.equal(p.grad, want["dp"].bfloat16())


def test_B06_more_tokens_than_the_workspace_was_made_for():
    q = problem()
    comm = comm_for(q, max_tokens=8)
    with pytest.raises(WorkspaceTooSmall, match="got 24, need at most 8.*reserve") as error:
        call(q, *leaves(q), comm)
    assert (error.value.got, error.value.max_tokens) == (24, 8)
    runtime.reserve(24)
    assert comm.max_tokens == 24
    call(q, *leaves(q), comm)


# ---- state between calls ----


def other_routing(q, seed, tokens):
    fresh = problem(tokens=tokens, seed=seed)
    return problem_with(fresh, w1=q.w1, w2=q.w2)


def test_B70_a_call_from_another_thread():
    q = problem()
    comm = comm_for(q)
    want = step(q, comm)
    with ThreadPoolExecutor(1) as pool:
        assert_equal_bits(pool.submit(step, q, comm).result(timeout=60), want)


@pytest.mark.parametrize("order", ["012", "210", "102"], ids="B74-B{}".format)
def test_micro_batches_in_flight(order):
    q = problem()
    batches = [other_routing(q, seed, tokens) for seed, tokens in ((1, 24), (2, 5), (3, 17))]
    comm = comm_for(q)
    want = [step(b, comm) for b in batches]
    inputs = [leaves(b) for b in batches]
    outs = [call(b, *values, comm) for b, values in zip(batches, inputs, strict=True)]
    for i in map(int, order):
        outs[i].backward(batches[i].dy)
    for (x, p, w1, _), w in zip(inputs, want, strict=True):
        got = {"dx": x.grad, "dp": p.grad, "dw1": torch.stack([v.grad for v in w1])}
        assert_equal_bits(got, {name: w[name] for name in got})


@pytest.mark.parametrize("reentrant", [True, False], ids="B39-B40-reentrant={}".format)
def test_recomputation_gives_the_same_bits(reentrant):
    """Router logits on a grid of 1/8, so that ties are common; the router is recomputed too."""
    q = problem(tokens=64, experts=8)
    router = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    comm = comm_for(q)

    def layer(x, w1, w2):
        p, ids = (8 * (x @ router)).round().div(8).softmax(1).topk(2)
        return runtime.moe(x, ids, p, [w1], [w2], comm=comm, num_experts=8)

    results = []
    for recompute in (False, True):
        x, w1, w2 = (t.clone().requires_grad_() for t in (q.x, q.w1, q.w2))
        if recompute:
            out = torch.utils.checkpoint.checkpoint(layer, x, w1, w2, use_reentrant=reentrant)
        else:
            out = layer(x, w1, w2)
        out.backward(q.dy)
        results.append({"out": out.detach(), "dx": x.grad, "dw1": w1.grad, "dw2": w2.grad})
    assert_equal_bits(*results)


def test_B78_evaluation_keeps_nothing_and_changes_nothing():
    q, held_out = problem(), problem(tokens=11, seed=4)
    comm = comm_for(q)
    want = step(q, comm)
    values = leaves(problem_with(held_out, w1=q.w1, w2=q.w2))
    trained = call(held_out, *values, comm)
    with torch.no_grad():
        quiet = call(held_out, *values, comm)
    with torch.inference_mode():
        faster = call(held_out, *values, comm)
    assert torch.equal(trained, quiet) and torch.equal(trained, faster)
    assert trained.requires_grad and not quiet.requires_grad
    assert_equal_bits(step(q, comm), want)


def test_B57_nothing_is_kept_after_backward():
    q = problem()
    comm = comm_for(q)
    x, p, w1, w2 = leaves(q)
    ids = q.ids.clone()
    out = runtime.moe(x, ids, p, w1, w2, comm=comm, num_experts=4)
    out.backward(q.dy)
    watched = [weakref.ref(t) for t in (x, ids, p, out, *w1, *w2)]
    del x, ids, p, out, w1, w2
    gc.collect()
    assert not any(ref() is not None for ref in watched)


def test_B77_two_models_in_one_process():
    a, b = problem(hidden=16, top_k=2), problem(hidden=32, top_k=1, experts=6)
    want = [step(a), step(b)]
    comms = comm_for(a), comm_for(b)
    assert comms[0] is not comms[1] and comms[0] is comm_for(a)
    values = [leaves(a), leaves(b)]
    outs = [call(q, *v, c) for q, v, c in zip((a, b), values, comms, strict=True)]
    for q, out in zip((a, b), outs, strict=True):
        out.backward(q.dy)
    for (x, *_), w in zip(values, want, strict=True):
        assert torch.equal(x.grad, w["dx"])
    comms[0].close()  # the first model goes
    assert_equal_bits(step(b, comms[1]), want[1])


def test_backward_after_release_says_what_happened():
    q = problem()
    out = call(q, *leaves(q))
    runtime.release()
    with pytest.raises(ValueError, match="not released; run forward again"):
        out.backward(q.dy)


def test_backward_of_a_forward_without_saved_context_is_refused():
    q = problem()
    x = q.x.clone().requires_grad_()
    comm = comm_for(q)
    out, _, _ = ops.moe_forward(x, q.ids, q.p, [q.w1], [q.w2], comm.handle, 4, 24, 1, -1, 0, 0.0)
    with pytest.raises(RuntimeError, match="save_rows = -1"):
        out.backward(q.dy)


def test_B51_a_backward_that_cannot_be_prepared_aborts_a_backward_of_the_kernels():
    from megatron_mok.native import communicator, structs
    from megatron_mok.ops import definitions

    aborted = []

    class Rank:
        aborting = communicator.Communicator.aborting

        def abort(self, cause, kind):
            aborted.append((str(cause), kind))

    handle = communicator.register(Rank())
    try:
        with pytest.raises(MemoryError, match="no memory"), definitions.aborting_backward(handle):
            raise MemoryError("no memory")
    finally:
        communicator._communicators.pop(handle)
    assert aborted == [("no memory", structs.CallKind.BACKWARD)]


def test_backward_names_the_layer_of_its_forward():
    q = problem()
    comm = comm_for(q)
    ranks = exchange.lookup(comm.handle)
    first, second = (call(q, *leaves(q), comm, layer=number) for number in (3, 4))
    for out, number in ((first, 3), (second, 4)):
        out.backward(q.dy)
        assert ranks.last_layer == number


def test_second_derivatives_are_refused():
    q = problem()
    x, p, w1, w2 = leaves(q)
    dy = q.dy.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(call(q, x, p, w1, w2), x, dy, create_graph=True)


# ---- dispatch keys, fakes, torch.compile ----


def test_cuda_without_the_library_says_what_to_build(monkeypatch):
    """The CUDA implementation, reached without a GPU: handles of the kernels count from 0."""
    from megatron_mok.ops import definitions

    monkeypatch.setitem(sys.modules, "megatron_mok.native", None)  # importing it now fails
    with pytest.raises(LibraryMissing, match="make build"):
        definitions._cuda_forward(*[None] * 5, 0)
    with pytest.raises(LibraryMissing, match="make build"):
        definitions._cuda_backward(*[None] * 9, 0)


def test_opcheck():
    q = problem()
    handle = exchange.register()
    x, p, w1, w2 = leaves(q)
    forward = (x, q.ids, p, w1, w2, handle, 4, 24, 1, 16, 0, 0.0)
    torch.library.opcheck(ops.moe_forward, forward)
    torch.library.opcheck(
        ops.moe_forward, (*forward[:9], -1, *forward[10:]), test_utils=("test_schema", "test_faketensor")
    )
    with torch.no_grad():
        _, h, table = ops.moe_forward(*forward)
    dw1 = [torch.zeros_like(w) for w in q.w1]
    for needs, first, second in ((3, dw1, [t.clone() for t in q.w2]), (1, [], []), (2, dw1, [])):
        torch.library.opcheck(
            ops.moe_backward,
            (
                q.dy,
                q.x,
                q.ids,
                list(q.w1),
                list(q.w2),
                h,
                table,
                first,
                second,
                handle,
                4,
                2,
                24,
                1,
                0,
                needs,
                0,
                0.0,
            ),
        )
    exchange.close(handle)


def has_compiler():
    import shutil

    return shutil.which("c++") is not None or shutil.which("g++") is not None


@pytest.fixture
def no_compiler_cache():
    """inductor's cache does not know the operators' schemas: a graph of an older version would come back."""
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"], ids="B61-{}".format)
def test_compile_fullgraph(backend, no_compiler_cache):
    import torch._dynamo as dynamo

    if backend == "inductor" and not has_compiler():
        pytest.skip("no C++ compiler")
    if dynamo.config.disable:
        pytest.skip("TORCHDYNAMO_DISABLE is set")
    dynamo.reset()
    big = problem(tokens=32)
    comm = comm_for(big, max_tokens=32)
    router = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))

    def layer(x, w1, w2):
        p, ids = (x @ router).softmax(1).topk(2)
        return runtime.moe(x.tanh(), ids, p, w1, w2, comm=comm, num_experts=4) + x

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for tokens in (16, 32) if backend == "aot_eager" else (16,):
        results = []
        for function in (layer, compiled):
            x, _, w1, w2 = leaves(problem_with(big, x=big.x[:tokens]))
            out = function(x, w1, w2)
            out.backward(big.dy[:tokens])
            assert out.shape == x.shape
            results.append([out.detach(), x.grad, *(w.grad for w in w1), *(w.grad for w in w2)])
        for eager, traced in zip(*results, strict=True):
            assert relative_error(traced, eager) < 1e-6
    dynamo.reset()
