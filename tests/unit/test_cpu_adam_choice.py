"""Which kernel CPUAdam steps with, what it says about it, and what it does when compiling fails."""

import pytest
import torch

from deepzero.offload import adam_kernels
from deepzero.offload.adam_kernels import line_by_line
from deepzero.ops import CPUAdam
from deepzero.utils.compile import CompilationError, why_not_compiled
from tests.unit.test_cpu_adam import forget_compiled, leaves, same

BF16 = torch.bfloat16
NEEDS_NUMBA = pytest.mark.skipif(bool(adam_kernels.why_not("numba")), reason=adam_kernels.why_not("numba"))


class TestChoice:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch):
        """Nothing is compiled yet, and everything is large enough to be."""
        forget_compiled(monkeypatch)
        monkeypatch.setattr(adam_kernels, "COMPILE_FROM", 5)
        self.monkeypatch = monkeypatch

    def broken(self):
        """From here on nothing compiles."""

        def fail(*_given):
            raise OSError("cc1plus: killed")

        self.monkeypatch.setattr(adam_kernels, "why_not_compiled", lambda: "")
        for compiler in ("_by_torch", "_by_numba"):
            self.monkeypatch.setattr(adam_kernels, compiler, fail)

    def lines(self):
        """Everything compiles, at once."""
        self.monkeypatch.setattr(adam_kernels, "why_not_compiled", lambda: "")
        self.monkeypatch.setattr(adam_kernels, "_by_torch", lambda variant, _sample: line_by_line(variant[3]))

    def without_numba(self):
        self.monkeypatch.setattr(adam_kernels, "find_spec", lambda name: None)

    def test_too_few_elements(self):
        optimizer = CPUAdam(leaves(4))
        assert optimizer.describe() == "CPUAdam: kernel auto, chosen at the first step"
        optimizer.prepare(BF16, BF16)
        assert optimizer.describe() == "CPUAdam: chunked kernel, 4 elements are too few to compile for, below 5"

    @NEEDS_NUMBA
    def test_no_cpp_compiler(self):
        self.monkeypatch.setenv("CXX", "/no/such/compiler")
        missing = "no C++ compiler (/no/such/compiler is not there; the environment variable CXX can name another)"
        optimizer, numba = CPUAdam(leaves(5)), CPUAdam(leaves(5), kernel="numba")
        for one in (optimizer, numba):
            one.step([torch.ones(5)])
        assert optimizer.describe() == f"CPUAdam: numba kernel, 5 elements and Numba; {missing}"
        assert numba.describe() == "CPUAdam: numba kernel, as asked for"
        assert same(optimizer, numba)
        with pytest.raises(RuntimeError, match=r"kernel='compiled'\): no C\+\+ compiler.*kernel='chunked'"):
            CPUAdam(leaves(5), kernel="compiled").step([torch.ones(5)])

    def test_no_compiler_at_all(self):
        self.monkeypatch.setenv("CXX", "/no/such/compiler")
        self.without_numba()
        optimizer = CPUAdam(leaves(5))
        optimizer.step([torch.ones(5)])
        assert optimizer.describe() == (
            "CPUAdam: chunked kernel, no C++ compiler (/no/such/compiler is not there; the environment variable CXX "
            "can name another); no Numba (pip install 'deepzero[numba]')"
        )
        with pytest.raises(RuntimeError, match=r"kernel='numba'\): no Numba.*kernel='chunked'"):
            CPUAdam(leaves(5), kernel="numba").step([torch.ones(5)])

    @NEEDS_NUMBA
    def test_numba_takes_over_when_the_cpp_compiler_fails(self):
        by_numba = adam_kernels._by_numba
        self.broken()
        self.monkeypatch.setattr(adam_kernels, "_by_numba", by_numba)
        with pytest.warns(RuntimeWarning, match="the compiled kernel is not used: .*cc1plus: killed"):
            optimizer = CPUAdam(leaves(5))
            optimizer.prepare(BF16, BF16)
        assert optimizer.kernel == "numba"
        assert "compiling failed" in optimizer.describe()

    def test_switched_off(self):
        self.monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        self.monkeypatch.setenv("CXX", "true")
        assert "switched off" in why_not_compiled()
        self.monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
        optimizer = CPUAdam(leaves(5))
        optimizer.prepare()
        assert optimizer.kernel == "chunked" and "off by NUMBA_DISABLE_JIT" in optimizer.describe()

    @NEEDS_NUMBA
    def test_compiling_fails_at_first(self):
        self.broken()
        optimizer, chunked = CPUAdam(leaves(5)), CPUAdam(leaves(5), kernel="chunked")
        killed = "kernel is not used: .*OSError: cc1plus: killed"
        with (
            pytest.warns(RuntimeWarning, match=f"the compiled {killed}"),
            pytest.warns(RuntimeWarning, match=f"the numba {killed}"),
        ):
            optimizer.step([torch.ones(5)])
        chunked.step([torch.ones(5)])
        assert same(optimizer, chunked)
        assert "compiling failed" in optimizer.describe()
        optimizer.step([torch.ones(5)])  # one warning, not one a step
        (weight,) = leaves(5)
        with pytest.raises(RuntimeError, match="cc1plus: killed"):
            CPUAdam([weight], kernel="compiled").step([torch.ones(5)])
        assert torch.equal(weight, leaves(5)[0])

    def test_compiling_fails_later_and_the_bits_stay(self):
        self.lines()
        optimizer, always = CPUAdam(leaves(5)), CPUAdam(leaves(5), kernel="compiled")
        for one in (optimizer, always):
            one.step([torch.ones(5)])
        always.step([torch.ones(5, dtype=BF16)])
        adam_kernels.compiled.cache_clear()
        self.broken()
        with pytest.warns(RuntimeWarning, match="run uncompiled for these dtypes: slower, with the same bits"):
            optimizer.step([torch.ones(5, dtype=BF16)])
        optimizer.step([torch.ones(5, dtype=BF16)])
        assert optimizer.kernel == "compiled"
        with pytest.raises(CompilationError, match="cc1plus"):
            always.step([torch.ones(5, dtype=torch.float16)])

    def test_code_that_gives_other_bits_is_not_used(self):
        self.lines()
        self.without_numba()

        def contracted(variant, _sample):
            right = line_by_line(variant[3])

            def lines(*tensors):
                right(*tensors)
                tensors[1].view(torch.int32)[-1] += 1

            return lines

        self.monkeypatch.setattr(adam_kernels, "_by_torch", contracted)
        with pytest.warns(RuntimeWarning, match="gives other bits than the same lines in torch"):
            optimizer = CPUAdam(leaves(5))
            optimizer.prepare()
        assert optimizer.kernel == "chunked"

    def test_a_choice_is_kept_when_parameters_are_added(self):
        self.lines()
        optimizer = CPUAdam(leaves(4))
        optimizer.prepare()
        optimizer.add_param_group({"params": leaves(100)})
        optimizer.step([torch.ones(4), torch.ones(100)])
        assert optimizer.kernel == "chunked"
        assert CPUAdam(leaves(100)).kernel == "auto"

    def test_large_enough(self):
        self.lines()
        optimizer = CPUAdam(leaves(5))
        optimizer.prepare(BF16, BF16)
        assert optimizer.describe() == "CPUAdam: compiled kernel, 5 elements and a C++ compiler"


@NEEDS_NUMBA
class TestNumbersOf16Bits:
    """Numba has none: what reads and writes them is our own."""

    def test_every_one_is_read_as_torch_does(self):
        from deepzero.offload import adam_numba

        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
        for dtype in (BF16,) if adam_numba._lacks_fp16() else (BF16, torch.float16):
            room = torch.empty(1 << 16)
            adam_numba._READ[dtype](bits.numpy(), room.numpy())
            expected = bits.view(dtype).to(torch.float32)
            number = ~expected.isnan()
            assert torch.equal(room.isnan(), expected.isnan())
            assert torch.equal(room[number].view(torch.int32), expected[number].view(torch.int32))

    def test_every_rounding_is_torchs(self):
        """All signs, exponents and leading bits, with what decides: just below, at, and just above one half."""
        from deepzero.offload import adam_numba

        high = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
        low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
        wide = (high | low).flatten().to(torch.uint32).view(torch.float32)
        for dtype in (BF16,) if adam_numba._lacks_fp16() else (BF16, torch.float16):
            target = torch.empty(wide.numel(), dtype=torch.uint16)
            adam_numba._WRITE[dtype](wide.numpy(), target.numpy())
            expected = wide.to(dtype)
            number = ~wide.isnan()
            assert target.view(dtype)[~number].isnan().all()
            assert torch.equal(target[number].to(torch.int32), expected.view(torch.uint16)[number].to(torch.int32))

    def test_a_processor_that_cannot_convert_fp16(self, monkeypatch):
        from deepzero.offload import adam_numba

        monkeypatch.setattr(adam_numba, "_lacks_fp16", lambda: True)
        forget_compiled(monkeypatch)
        with pytest.raises(RuntimeError, match="Numba failed: RuntimeError: this processor has no instructions"):
            CPUAdam(leaves(5), kernel="numba").step([torch.ones(5, dtype=torch.float16)])
        CPUAdam(leaves(5), kernel="numba").step([torch.ones(5, dtype=BF16)])
