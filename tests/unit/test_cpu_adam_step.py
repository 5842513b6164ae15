"""CPUAdam as an optimizer among torch's: hooks, state dicts, GradScaler, what is refused, what is compiled when."""

import copy
import itertools
import pickle

import pytest
import torch

from deepzero.comm.chaos import Chaos
from deepzero.comm.collectives import DryRunCommunicator, DryRunRank
from deepzero.comm.ledger import Ledger
from deepzero.config.engine import ChaosConfig, OptimizerConfig
from deepzero.config.strict import ConfigError
from deepzero.layout import plan_layout
from deepzero.ops import CPUAdam
from deepzero.placement import GroupPlan
from deepzero.runtime.elementwise_check import check_elementwise
from deepzero.runtime.optimizer_state import moment_bytes
from deepzero.runtime.optimizers import build_optimizer
from deepzero.runtime.zero.optimizer_shard import OptimizerShard
from deepzero.runtime.zero.stage_1_and_2 import ParamGroup
from tests.unit.test_cpu_adam import COMPILED, gradients, leaves, of_torch, same

BF16 = torch.bfloat16


def values(optimizer):
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


class TestTorchsMachinery:
    def test_gradients_are_those_of_the_parameters_if_none_are_given(self):
        ours, given = CPUAdam(leaves(5, 6)), CPUAdam(leaves(5, 6))
        params = ours.param_groups[0]["params"]
        (params[1].grad,) = gradients(params[1:], 0)
        ours.step()
        given.step([None, params[1].grad])
        assert not ours.state[params[0]]
        assert torch.equal(params[0], leaves(5)[0])
        assert torch.equal(params[1], given.param_groups[0]["params"][1])

    @pytest.mark.parametrize("named", [False, True])
    def test_closure(self, named):
        (weight,) = leaves(5)
        optimizer = CPUAdam([weight])

        def closure():
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss.item()

        losses = [optimizer.step(closure=closure) if named else optimizer.step(closure) for _ in range(3)]
        assert losses[0] > losses[1] > losses[2]
        with pytest.raises(TypeError, match="two closures"):
            optimizer.step(closure, closure=closure)

    def test_hooks_schedulers_and_the_profiler_see_the_step(self):
        (weight,) = leaves(5)
        optimizer = CPUAdam([weight], lr=0.5)
        scheduler, seen = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), []
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append((len(args), sorted(kwargs))))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        with torch.profiler.profile(acc_events=True) as profiler:  # torch 2.11 warns without
            optimizer.step([torch.ones(5)], scale=2.0)
        scheduler.step()  # warns, and a warning is an error here, unless the optimizer's step was called
        assert seen == [(2, ["scale"]), "after"]
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert any("CPUAdam.step" in event.name for event in profiler.events())

    def test_grad_scaler_divides_and_skips(self):
        (weight,), (plain,) = leaves(5), leaves(5)
        optimizer, reference = CPUAdam([weight]), CPUAdam([plain])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if factor < 10.0:
                reference.step([torch.full((5,), factor)])
        assert same(optimizer, reference)
        assert optimizer.state[weight]["step"].item() == 2

    def test_the_shard_divides_with_the_same_bits(self):
        (reference,), weight = leaves(64), torch.nn.Parameter(leaves(64)[0].detach())
        comm = DryRunCommunicator(DryRunRank(0, 1, "cpu", 1), Ledger(), Chaos(ChaosConfig(), 0), device="cpu")
        planned = GroupPlan([weight], plan_layout([64], 1, 64), 0, partitioned=False, own_masters=True)
        group = ParamGroup(["weight"], planned, torch.float32, comm)
        optimizer, other = CPUAdam(group.masters), CPUAdam([reference])
        (grad,) = gradients([reference], 0)
        shard = OptimizerShard(optimizer, [group], torch.float32, 0, one_pass=optimizer.step)
        shard.grad_S[0].copy_(grad)
        shard.step(6.0)
        other.step([grad], scale=6.0)
        assert same(optimizer, other)

    def test_every_group_has_its_numbers_and_a_schedule_changes_them(self):
        ours, torchs = (
            cls([{"params": leaves(5)}, {"params": leaves(6), "lr": 0.1, "betas": (0.5, 0.6)}], **more)
            for cls, more in ((CPUAdam, {}), (torch.optim.AdamW, {"fused": True, "weight_decay": 0.0}))
        )
        for step, optimizer in itertools.product(range(3), (ours, torchs)):
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1 / (step + 1)) if optimizer is ours else 0.1 / (step + 1)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for p, grad in zip(params, gradients(params, step), strict=True):
                p.grad = grad
            optimizer.step()
        for p, q in zip(values(ours), values(torchs), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        assert torch.equal(values(ours)[1], values(torchs)[1])

    def test_state_dicts_go_to_adamw_and_come_back(self):
        ours, torchs, back = CPUAdam(leaves(65)), torch.optim.AdamW(leaves(65), fused=True), CPUAdam(leaves(65))
        ours.step(gradients(leaves(65), 0))
        torchs.load_state_dict(copy.deepcopy(ours.state_dict()))
        torchs.param_groups[0]["fused"] = True
        with torch.no_grad():
            torchs.param_groups[0]["params"][0].copy_(values(ours)[0])
            back.param_groups[0]["params"][0].copy_(values(ours)[0])
        back.load_state_dict(copy.deepcopy(torchs.state_dict()))
        for optimizer in (ours, torchs, back):
            (param,) = optimizer.param_groups[0]["params"]
            (param.grad,) = gradients([param], 1)
            optimizer.step()
        assert same(ours, torchs)
        assert same(ours, back)

    def test_loading_keeps_the_moments_of_narrow_parameters_wide(self):
        ours, back = CPUAdam(leaves(5, dtype=BF16)), CPUAdam(leaves(5, dtype=BF16))
        back.load_state_dict(ours.state_dict())  # before a step there are none
        ours.step(gradients(leaves(5), 0))
        back.load_state_dict(ours.state_dict())
        loaded, saved = (optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in (back, ours))
        assert torch.equal(loaded, saved)

    def test_a_twin_keeps_the_settings_of_its_moment(self):
        rate = torch.tensor(0.5)
        optimizer = CPUAdam(leaves(5), lr=rate, kernel="chunked")
        twin = optimizer.twin()
        rate.fill_(0.25)  # a schedule changes numbers that are tensors where they are
        optimizer.param_groups[0]["weight_decay"] = 9.0
        assert twin.param_groups[0]["lr"] == 0.5 and twin.param_groups[0]["weight_decay"] != 9.0
        assert twin.param_groups[0]["params"][0] is optimizer.param_groups[0]["params"][0]
        assert twin.state is optimizer.state

    def test_a_twin_of_a_derived_class_needs_none_of_its_arguments(self):
        class Named(CPUAdam):
            def __init__(self, params, name):
                super().__init__(params)
                self.name = name

        assert type(Named(leaves(5), "x").twin()) is CPUAdam

    def test_a_state_dict_that_asks_for_what_is_not_there(self):
        for word in ("amsgrad", "maximize"):
            saved = torch.optim.AdamW(leaves(5), **{word: True}).state_dict()
            with pytest.raises(ValueError, match=f"{word}=True is not implemented"):
                CPUAdam(leaves(5)).load_state_dict(saved)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
    def test_copies_go_on_by_themselves(self, copied):
        optimizer = CPUAdam(leaves(5), kernel="chunked")
        optimizer.step(gradients(leaves(5), 0))
        other = copied(optimizer)
        for one in (optimizer, other):
            one.step(gradients(leaves(5), 1))
        assert same(optimizer, other)
        assert other.kernel == "chunked"


class TestInDeepzero:
    @pytest.mark.parametrize("name", ["CPUAdam", "cpuadam", "DeepSpeedCPUAdam", "deepzero.ops.CPUAdam"])
    def test_built_by_name(self, name):
        params = {"lr": "1e-4", "betas": [0.9, 0.95], "adam_w_mode": False, "fp32_optimizer_states": True}
        built = build_optimizer(OptimizerConfig(name, {**params, "bias_correction": False}), leaves(5))
        assert type(built) is CPUAdam
        group = built.param_groups[0]
        assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.95), 0.0)
        assert (group["decoupled_weight_decay"], group["bias_correction"]) == (False, False)

    @pytest.mark.parametrize(("params", "message"), [
        ({"amsgrad": True}, "amsgrad=True is not implemented"),
        ({"fp32_optimizer_states": False}, "fp32_optimizer_states=False.*is not implemented"),
        ({"adam_w_mode": True, "adamw_mode": True}, "both adam_w_mode and adamw_mode"),
        ({"kernel": "cuda"}, r"kernel='cuda'\) must be one of auto, chunked, compiled"),
        ({"maximize": True}, "unknown config key 'optimizer.params.maximize'"),
    ])  # fmt: skip
    def test_refused_by_name(self, params, message):
        with pytest.raises(ConfigError, match=message):
            build_optimizer(OptimizerConfig("CPUAdam", params), leaves(5))

    def test_the_trial_leaves_no_trace(self):
        optimizer = CPUAdam(leaves(5), weight_decay=0.1)
        check_elementwise(optimizer)
        assert optimizer.kernel == "auto"
        assert moment_bytes(optimizer, torch.device("cpu"), 0).per_element == 8


def sparse():
    return torch.ones(5).to_sparse()


NAME = r"param_groups\[0\]\['params'\]\[1\]"
GRAD = f"the gradient of {NAME}"


class TestRefused:
    @pytest.mark.parametrize(("arguments", "message"), [
        ({"betas": (0.9, 1.0)}, r"param_groups\[0\]: betas\[1\]=1.0 must be at least 0 and below 1"),
        ({"betas": (0.9,)}, r"must be two numbers"),
        ({"eps": -1e-8}, r"eps=-1e-08 must be finite and not negative"),
        ({"lr": float("nan")}, r"lr=nan must be finite"),
        ({"weight_decay": float("inf")}, r"weight_decay=inf"),
        ({"amsgrad": True}, r"amsgrad=True is not implemented by CPUAdam; torch.optim.AdamW has it"),
        ({"fp32_optimizer_states": False}, r"both moments are kept in fp32"),
        ({"kernel": "fast"}, r"must be one of auto, chunked, compiled"),
    ])  # fmt: skip
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            CPUAdam(leaves(5), **arguments)

    def test_parameters(self):
        for other in (torch.zeros(3, 2).t(), torch.full((), torch.nan).expand(2, 3)):  # what zero.Init leaves
            placeholder = CPUAdam([other.requires_grad_()])  # a master may take its place
            with pytest.raises(ValueError, match=r"param_groups\[0\]\['params'\]\[0\] of shape \[2, 3\] is not contig"):
                placeholder.step([torch.ones(2, 3)])
        with pytest.raises(ValueError, match=r"has dtype torch.float64; CPUAdam takes float32, bfloat16, float16"):
            CPUAdam([torch.zeros(2, dtype=torch.float64, requires_grad=True)])
        optimizer = CPUAdam(leaves(5))
        with pytest.raises(ValueError, match=r"param_groups\[1\]\['params'\]\[0\] has dtype"):
            optimizer.add_param_group({"params": [torch.zeros(2, dtype=torch.float64, requires_grad=True)]})
        assert len(optimizer.param_groups) == 1

    @pytest.mark.parametrize(("arguments", "error", "message"), [
        ({"grads": [torch.ones(5)]}, ValueError, r"grads=...\) has 1 entries for the 2 parameters of the optimizer"),
        ({"grads": torch.ones(2, 5)}, TypeError, r"grads=...\) must be a list of tensors, not Tensor"),
        ({"out": [None]}, ValueError, r"out=...\) has 1 entries for the 2 parameters"),
        ({"grads": [None, 1.0]}, TypeError, f"{GRAD} is float, not a tensor"),
        ({"grads": [None, torch.ones(6)]}, ValueError, rf"{GRAD} has shape \[6\], the parameter has \[5\]"),
        ({"grads": [None, torch.ones(10)[::2]]}, ValueError, f"{GRAD} of shape .* is not contiguous"),
        ({"grads": [None, torch.ones(5).int()]}, ValueError, f"{GRAD} has dtype torch.int32; CPUAdam takes bf"),
        ({"grads": [None, sparse()]}, ValueError, rf"{GRAD} is sparse .*to_dense\(\)"),
        ({"grads": [None, torch.ones(5, device="meta")]}, ValueError, f"{GRAD} lies on meta, the parameter on cpu"),
        ({"out": [None, torch.ones(4)]}, ValueError, f"the output for {NAME} has shape"),
        ({"out": [None, torch.ones(5).double()]}, ValueError, f"the output for {NAME} has dtype torch.float64"),
        ({"scale": 0.0}, ValueError, "scale=0.0, but gradients are divided by it"),
        ({"scale": float("nan")}, ValueError, "scale=nan"),
        ({"scale": 1e-60}, ValueError, "positive and finite in fp32"),
        ({"scale": -1.0}, ValueError, "scale=-1.0"),
        ({"scale": torch.ones(2)}, ValueError, r"scale has shape \[2\]; give a number or a one-element tensor"),
        ({"scale": "two"}, TypeError, "scale='two' is not a number"),
        ({"only": [torch.ones(5)], "grads": [torch.ones(5)]}, ValueError, r"only\[0\] is not a parameter"),
    ])  # fmt: skip
    def test_before_anything_is_written(self, arguments, error, message):
        params = leaves(5, 5)
        optimizer = CPUAdam(params)
        before = values(optimizer)
        for param in params:
            param.grad = torch.ones(5)
        with pytest.raises(error, match=message):
            optimizer.step(**arguments)
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        assert not any(optimizer.state[p] for p in params)

    @pytest.mark.parametrize(("spoil", "arguments", "message"), [
        (lambda o, weight: None, {"times": 2}, "names a parameter twice"),
        (lambda o, weight: o.param_groups[0].update(lr=float("nan")), {}, r"param_groups\[0\]: lr=nan"),
        (lambda o, weight: setattr(o, "grad_scale", torch.tensor(2.0)), {"scale": 2.0}, "use one of them"),
        (lambda o, weight: o.state[weight].update(momentum_buffer=torch.zeros(5)), {},
         "it needs step, exp_avg, exp_avg_sq"),
    ])  # fmt: skip
    def test_what_went_wrong_since(self, spoil, arguments, message):
        (weight,) = leaves(5)
        optimizer = CPUAdam([weight])
        spoil(optimizer, weight)
        times = arguments.get("times", 1)
        with pytest.raises(ValueError, match=message):
            optimizer.step([torch.ones(5)] * times, only=[weight] * times, scale=arguments.get("scale", 1.0))


class TestCompiled:
    pytestmark = COMPILED.marks

    def test_nothing_is_compiled_twice(self):
        optimizer = CPUAdam(leaves(3000, 70_000), kernel="compiled")
        optimizer.prepare(BF16, BF16)
        numbers, optimizer.param_groups[0]["betas"] = optimizer.param_groups[0]["betas"], [torch.tensor(0.9)] * 2
        before = torch.get_num_threads()
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                for step, count in enumerate((1, 2, 1)):
                    torch.set_num_threads(count)
                    for group in optimizer.param_groups:
                        group["lr"] = 0.1 / (step + 1)
                    params = optimizer.param_groups[0]["params"]
                    optimizer.step(gradients(params, step, BF16), [torch.empty_like(p, dtype=BF16) for p in params])
                    optimizer.param_groups[0]["betas"] = numbers
                more = CPUAdam(leaves(2, 9, 16, 64, 100_001), kernel="compiled", weight_decay=0.1, adamw_mode=False)
                params = more.param_groups[0]["params"]
                more.step(gradients(params, 0, BF16), [torch.empty_like(p, dtype=BF16) for p in params], scale=3.0)
        finally:
            torch.set_num_threads(before)

    def test_views_of_one_arena(self):
        """Parameter, moments, gradient and output may be slices of one buffer, as an arena lays them."""
        arena = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
        weight = arena[0].detach().requires_grad_()
        optimizer, apart = CPUAdam([weight], kernel="compiled"), CPUAdam([arena[0].clone()], kernel="compiled")
        for one, moments in ((optimizer, arena[1:3].zero_()), (apart, torch.zeros(2, 1000))):
            (param,) = one.param_groups[0]["params"]
            one.state[param] = {"step": torch.zeros(()), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
            for _ in range(2):
                one.step([arena[3].clone() if one is apart else arena[3]], [arena[4]])
        assert same(optimizer, apart)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [{}, {"adamw_mode": False, "weight_decay": 0.1}], ids=str)
def test_parameters_on_a_gpu_get_torchs_bits(mode):
    mine, theirs = ([p.detach().cuda().requires_grad_() for p in leaves(7, 1000)] for _ in range(2))
    ours, torchs = CPUAdam(mine, **mode), of_torch(theirs, mode)
    out = [torch.empty_like(p, dtype=BF16) for p in mine]
    for step in range(3):
        grads = [grad.cuda().bfloat16() for grad in gradients(leaves(7, 1000), step)]
        ours.step(grads, out, scale=4.0)
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad.float() / 4.0
        torchs.step()
        assert all(torch.equal(o, p.detach().bfloat16()) for o, p in zip(out, mine, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))
