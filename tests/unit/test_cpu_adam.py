"""CPUAdam: the bits of all kernels, and their accuracy."""

import functools
import itertools
import math

import pytest
import torch

from deepzero.offload import adam_kernels
from deepzero.offload.adam_kernels import ChunkedAdam, CompiledAdam, Numbers, Segment, adam_lines, exact_root
from deepzero.ops import CPUAdam
from deepzero.utils.compile import why_not_compiled

SIZES = (0, 1, 7, 63, 64, 65, 1000, 4095)
NARROW = (torch.bfloat16, torch.float16, torch.float64)
COMPILED = pytest.param(
    "compiled", marks=[pytest.mark.exhaustive, pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())]
)
MODES = (
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "adamw_mode": False, "betas": (0.8, 0.9)},
    {"bias_correction": False, "eps": 1e-3},
    {"betas": (0.3, 0.95)},
    {"betas": (0.0, 0.0)},
)


@pytest.fixture(params=["chunked", COMPILED])
def kernel(request):
    """Each kernel; the C++ compiler takes a minute for all dtypes."""
    return str(request.param)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def forget_compiled(monkeypatch):
    monkeypatch.setattr(adam_kernels, "compiled", functools.cache(adam_kernels.compiled.__wrapped__))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaves(*extents, dtype=torch.float32):
    return [randn(n, seed=n).to(dtype).requires_grad_() for n in extents]


def gradients(params, step, dtype=torch.float32):
    return [randn(*p.shape, seed=100 * step + i).to(dtype) for i, p in enumerate(params)]


def same(one, other):
    pairs = zip(one.param_groups, other.param_groups, strict=True)
    params = [pq for a, b in pairs for pq in zip(a["params"], b["params"], strict=True)]
    states = [(one.state[p][k], other.state[q][k]) for p, q in params for k in ("step", "exp_avg", "exp_avg_sq")]
    return all(torch.equal(a, b) for a, b in params + states)


def of_torch(params, mode):
    """Torch's fused class for the same settings."""
    settings = {"weight_decay": 0.0, **mode}
    cls = torch.optim.AdamW if settings.pop("adamw_mode", True) else torch.optim.Adam
    return cls(params, fused=True, **settings)


class TestBits:
    @pytest.mark.parametrize("mode", [mode for mode in MODES if "bias_correction" not in mode], ids=str)
    @pytest.mark.parametrize("scale", [1.0, 3.0])
    def test_chunked_gives_the_bits_of_torch(self, mode, scale):
        mine, theirs = leaves(*SIZES, 300_001), leaves(*SIZES, 300_001)
        ours, torchs = CPUAdam(mine, kernel="chunked", **mode), of_torch(theirs, mode)
        for step in range(3):
            for p, grad in zip(theirs, gradients(theirs, step), strict=True):
                p.grad = grad
            torchs.grad_scale, torchs.found_inf = torch.tensor(scale), None
            ours.step(gradients(mine, step), scale=scale)
            torchs.step()
        assert same(ours, torchs)

    @pytest.mark.parametrize("mode", MODES, ids=str)
    def test_compiled_gives_the_bits_of_its_lines(self, mode, monkeypatch):
        """The lines stand in for C++; that both have the same bits is asked whenever something is compiled."""
        monkeypatch.setattr(adam_kernels, "_by_torch", lambda variant, _sample: adam_kernels.line_by_line(variant[3]))
        monkeypatch.setattr(adam_kernels, "why_not_compiled", lambda: "")
        forget_compiled(monkeypatch)
        (mine,), (theirs,) = leaves(1000), leaves(1000)
        ours = CPUAdam([mine], kernel="compiled", **mode)
        m, v = torch.zeros(1000), torch.zeros(1000)
        for step in range(1, 4):
            (grad,) = gradients([mine], step)
            ours.step([grad], scale=3.0)
            numbers = Numbers.of(ours.param_groups[0], step, 3.0)
            adam_lines(exact_root, numbers.beta1 > 0.5, theirs.detach(), m, v, grad, None, numbers.tensor())
        assert torch.equal(mine, theirs)
        assert torch.equal(ours.state[mine]["exp_avg"], m) and torch.equal(ours.state[mine]["exp_avg_sq"], v)

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    @pytest.mark.parametrize("scale", [1.0, 3.0])
    def test_gradients_of_any_dtype_are_cast_first(self, kernel, dtype, scale):
        narrow, cast = (CPUAdam(leaves(7, 4095), kernel=kernel) for _ in range(2))
        for step in range(3):
            grads = gradients(narrow.param_groups[0]["params"], step, dtype)
            kept = [grad.clone() for grad in grads]
            narrow.step(grads, scale=scale)
            cast.step([grad.to(torch.float32) for grad in grads], scale=scale)
            assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True)), "gradients are only read"
        assert same(narrow, cast)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("of_params", [torch.float32, torch.bfloat16], ids=str)
    def test_out_is_the_cast_parameter_and_changes_no_bit(self, kernel, dtype, of_params):
        ours, plain = (CPUAdam(leaves(*SIZES, dtype=of_params), kernel=kernel, lr=0.1) for _ in range(2))
        params = ours.param_groups[0]["params"]
        out = [torch.full(p.shape, math.nan, dtype=dtype) for p in params]
        for step in range(2):
            ours.step(gradients(params, step, torch.bfloat16), out)
            plain.step(gradients(params, step, torch.bfloat16))
            assert all(torch.equal(o, p.detach().to(dtype)) for o, p in zip(out, params, strict=True))
        assert same(ours, plain)

    def test_an_elements_bits_do_not_depend_on_where_it_lies(self, kernel, threads):
        numbers = Numbers(3.0, 0.01, 0.9, 0.99, 1e-8, 0.1, True, True, 3.0)
        whole = segment(100_000)
        make(kernel).update(whole, numbers)
        for count, chunk in itertools.product((1, 2, 4), (64, 4096, 1 << 20)):
            torch.set_num_threads(count)
            again = segment(100_000)
            made = make(kernel)
            made.chunk = chunk  # of the chunked one
            made.update(again, numbers)
            assert equal(again, whole, slice(None))
        if kernel != "chunked":
            for lo, hi in ((1, 1000), (7, 8), (50_001, 99_998)):
                part = cut(segment(100_000), lo, hi)
                make(kernel).update(part, numbers)
                assert equal(part, whole, slice(lo, hi))

    def test_scale_is_a_division_before_the_step(self, kernel):
        by_scale, before, by_attribute = (CPUAdam(leaves(1000), kernel=kernel) for _ in range(3))
        for step in range(3):
            (grad,) = gradients(leaves(1000), step)
            by_scale.step([grad], scale=torch.tensor([3.7]))
            before.step([grad / torch.tensor(3.7)])
            by_attribute.grad_scale, by_attribute.found_inf = torch.tensor(3.7), torch.tensor(0.0)
            by_attribute.step([grad])
            del by_attribute.grad_scale, by_attribute.found_inf
        assert same(by_scale, before)
        assert same(by_scale, by_attribute)

    def test_narrow_parameters_stand_alone(self, kernel):
        (narrow,), (wide,) = leaves(1000, dtype=torch.bfloat16), leaves(1000, dtype=torch.bfloat16)
        wide = wide.detach().float().requires_grad_()
        ours, reference = CPUAdam([narrow], kernel=kernel), CPUAdam([wide], kernel=kernel)
        for step in range(3):
            grads = gradients([narrow], step, torch.bfloat16)
            ours.step(grads)
            reference.step(grads)
            assert torch.equal(narrow.detach(), wide.detach().to(torch.bfloat16))
            wide.detach().copy_(narrow)
        assert ours.state[narrow]["exp_avg"].dtype == torch.float32
        assert torch.equal(ours.state[narrow]["exp_avg"], reference.state[wide]["exp_avg"])

    def test_sub_group_by_sub_group_is_the_whole_step(self, kernel):
        ours, whole = (CPUAdam(leaves(64, 65, 7), kernel=kernel) for _ in range(2))
        params = ours.param_groups[0]["params"]
        for step in range(2):
            grads, out = gradients(params, step), [torch.empty(p.shape, dtype=torch.bfloat16) for p in params]
            ours.step([grads[2], grads[0]], [out[2], None], only=[params[2], params[0]])
            ours.step(grads[1:2], only=iter(params[1:2]))
            whole.step(grads)
            assert torch.equal(out[2], params[2].detach().to(torch.bfloat16))
        assert same(ours, whole)


def segment(n, grad=torch.bfloat16):
    """In the middle of training."""
    param, m, v, g = (randn(n, seed=s) for s in range(4))
    return Segment(param, m, v.square_(), g.to(grad), torch.empty(n, dtype=torch.bfloat16))


def make(kernel):
    made = ChunkedAdam() if kernel == "chunked" else CompiledAdam(True)
    made.ready([])
    return made


def cut(one, lo, hi):
    return Segment(*(t[lo:hi].clone() for t in one if t is not None))


def equal(one, other, part):
    return all(torch.equal(a, b[part]) for a, b in zip(one, other, strict=True) if a is not None and b is not None)


def wild_gradients(n, steps, kind):
    """From 1e-18 to 1e+18: another magnitude for each element, or for each element in each step; or all near 1e-2."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.rand(n, generator=generator) * 36 - 18
    for _ in range(steps):
        if kind == "every step":
            exponents = torch.rand(n, generator=generator) * 36 - 18
        if kind == "flat":
            exponents = torch.full((n,), -2.0)
        yield (torch.randn(n, generator=generator).double() * 10.0 ** exponents.double()).float()


def start(n):
    """Parameter and both moments in float64, as :func:`leaves` begins."""
    return torch.stack([leaves(n)[0].detach().double(), torch.zeros(n), torch.zeros(n)])


def reference_step(state, grad, settings, step):
    """One step in float64 on ``state``; chunk by chunk, in cache."""
    lr, (beta1, beta2), eps, decay = (settings[k] for k in ("lr", "betas", "eps", "weight_decay"))
    correction = math.sqrt(1 - beta2**step)
    for piece, narrow in zip(state.split(1 << 16, dim=1), grad.split(1 << 16), strict=True):
        exact, m, v = piece
        wide = narrow.double()
        if settings["decoupled_weight_decay"]:
            exact *= 1 - lr * decay
        else:
            wide += decay * exact
        m.lerp_(wide, 1 - beta1)
        v.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
        exact.addcdiv_(m, v.sqrt().div_(correction).add_(eps), value=-lr / (1 - beta1**step))


def errors_of(optimizer, exact):
    """Mean and largest absolute error of the parameter, and of both moments relative to their own size."""
    param, found = optimizer.param_groups[0]["params"][0], {}
    for row, name in enumerate(("param", "exp_avg", "exp_avg_sq")):
        error = ((optimizer.state[param][name] if row else param.detach()).double() - exact[row]).abs()
        if row:
            error /= exact[row].abs().clamp_min(1e-300)
        found |= {f"{name} mean": error.mean().item(), f"{name} largest": error.max().item()}
    return found


def errors(kernel, n, steps, kind, mode):
    ours, torchs, exact = CPUAdam(leaves(n), kernel=kernel, **mode), of_torch(leaves(n), mode), start(n)
    for step, grad in enumerate(wild_gradients(n, steps, kind), 1):
        ours.step([grad])
        torchs.param_groups[0]["params"][0].grad = grad.clone()
        torchs.step()
        reference_step(exact, grad, ours.defaults, step)
    return errors_of(ours, exact), errors_of(torchs, exact)


ACCURACY_MODES = [mode for mode in MODES if "bias_correction" not in mode and mode.get("betas") != (0.0, 0.0)]


@pytest.mark.parametrize("kind", ["every element", "every step", "flat"])
@pytest.mark.parametrize("mode", ACCURACY_MODES, ids=str)
def test_no_less_accurate_than_torch(kernel, kind, mode):
    check_errors(*errors(kernel, 4095, 100, kind, mode))


def check_errors(mine, theirs, slack=0.0):
    for name in ("param mean", "param largest"):
        assert mine[name] <= 1.05 * theirs[name] + slack


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernel", ["chunked", pytest.param("compiled", marks=COMPILED.marks[1])])
@pytest.mark.parametrize(("n", "kind"), [(1, "flat"), (7, "flat"), (4095, "every step")])
@pytest.mark.parametrize("mode", ACCURACY_MODES, ids=str)
def test_no_less_accurate_than_torch_after_a_thousand_steps(kernel, n, kind, mode):
    # One element, or seven, are no sample: there an error may be larger by a rounding of the parameter.
    check_errors(*errors(kernel, n, 1000, kind, mode), slack=2.0**-24 if n < 100 else 0.0)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_no_less_accurate_than_torch_on_ten_million_elements(capsys):
    """Every option on its own part of 10,000,019 elements, 1,000 steps, one float64 reference for all kernels."""
    total, steps, count = 10_000_019, 1000, len(ACCURACY_MODES)
    extents = [total // count] * (count - 1) + [total - total // count * (count - 1)]
    kernels = ["chunked", *([] if why_not_compiled() else ["compiled"])]
    ours = {kernel: [CPUAdam(leaves(n), kernel=kernel, **m) for n, m in zip(extents, ACCURACY_MODES, strict=True)]
            for kernel in kernels}  # fmt: skip
    torchs = [of_torch(leaves(n), mode) for n, mode in zip(extents, ACCURACY_MODES, strict=True)]
    exact = [start(n) for n in extents]
    for step, gradient in enumerate(wild_gradients(total, steps, "every step"), 1):
        for part, (grad, state) in enumerate(zip(gradient.split(extents), exact, strict=True)):
            for kernel in kernels:
                ours[kernel][part].step([grad])
            torchs[part].param_groups[0]["params"][0].grad = grad.clone()
            torchs[part].step()
            reference_step(state, grad, ours[kernels[0]][part].defaults, step)
    for part, state in enumerate(exact):
        theirs = errors_of(torchs[part], state)
        for kernel in kernels:
            mine = errors_of(ours[kernel][part], state)
            ratios = {key: round(mine[key] / theirs[key], 4) for key in mine}
            with capsys.disabled():
                print(f"\n{kernel} {ACCURACY_MODES[part]}: error / torch's", ratios)
            check_errors(mine, theirs)
