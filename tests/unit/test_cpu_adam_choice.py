"""Which kernel CPUAdam steps with, what it says about it, and what it does when compiling fails."""

import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepzero.offload import adam_kernels
from deepzero.offload.adam_kernels import line_by_line
from deepzero.ops import CPUAdam
from deepzero.utils import compile as compiling
from deepzero.utils.compile import CompilationError, why_not_compiled
from tests.unit.test_cpu_adam import forget_compiled, leaves, same

BF16 = torch.bfloat16


class TestChoice:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch):
        """Nothing is compiled yet, and everything is large enough to be."""
        forget_compiled(monkeypatch)
        monkeypatch.setattr(adam_kernels, "COMPILE_FROM", 5)
        self.monkeypatch = monkeypatch

    def broken(self):
        self.monkeypatch.setattr(adam_kernels, "why_not_compiled", lambda: "")
        self.monkeypatch.setattr(adam_kernels, "_by_torch", mock.Mock(side_effect=OSError("cc1plus: killed")))

    def lines(self):
        self.monkeypatch.setattr(adam_kernels, "why_not_compiled", lambda: "")
        self.monkeypatch.setattr(adam_kernels, "_by_torch", lambda variant, _sample: line_by_line(variant[3]))

    def test_too_few_elements(self):
        optimizer = CPUAdam(leaves(4))
        assert optimizer.describe() == "CPUAdam: kernel auto, chosen at the first step"
        optimizer.prepare(BF16, BF16)
        assert optimizer.describe() == "CPUAdam: chunked kernel, 4 elements are too few to compile for, below 5"

    def test_no_compiler(self):
        self.monkeypatch.setenv("CXX", "/no/such/compiler")
        missing = "no C++ compiler (/no/such/compiler is not there; the environment variable CXX can name another)"
        optimizer = CPUAdam(leaves(5))
        optimizer.step([torch.ones(5)])
        assert optimizer.describe() == f"CPUAdam: chunked kernel, {missing}"
        with pytest.raises(RuntimeError, match=r"kernel='compiled'\): no C\+\+ compiler.*kernel='chunked'"):
            CPUAdam(leaves(5), kernel="compiled").step([torch.ones(5)])

    def test_switched_off(self):
        self.monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        self.monkeypatch.setenv("CXX", "true")
        assert "switched off" in why_not_compiled()
        optimizer = CPUAdam(leaves(5))
        optimizer.prepare()
        assert optimizer.kernel == "chunked" and "switched off by TORCHDYNAMO_DISABLE" in optimizer.describe()

    def test_compiling_fails_at_first(self):
        self.broken()
        optimizer, chunked = CPUAdam(leaves(5)), CPUAdam(leaves(5), kernel="chunked")
        with pytest.warns(RuntimeWarning, match="the compiled kernel is not used: .*OSError: cc1plus: killed"):
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


def test_an_older_torch_is_not_imported_again_to_look_for_vector_instructions(monkeypatch):
    """The probe of torch 2.11 and 2.12, as it is written there, in a class that has no probe of its own."""
    isa = SimpleNamespace(_avx_py_load='\nimport torch\nfrom ctypes import cdll\ncdll.LoadLibrary("__lib_path__")\n')
    monkeypatch.setattr(compiling.importlib, "import_module", lambda _name: SimpleNamespace(VecISA=isa))
    for _ in range(2):
        compiling._probe_without_torch()
    program = isa._avx_py_load.replace("__lib_path__", torch.__path__[0] + "/lib/libtorch_cpu.so")
    assert program.count("CDLL(") == 1
    program += "\nimport sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
