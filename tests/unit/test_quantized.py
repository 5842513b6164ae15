"""Quantised messages: every block's error within its bound, NaN and infinity, ranges, sizes, and the kernels' bits."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from deepzero.comm import quantization
from deepzero.comm.quantization import TINY, Format, PlainKernel, Quantizer, Variant, compiled, levels
from deepzero.utils.compile import CompilationError, why_not_compiled
from tests.distributed.pool import sampled

BITS = (8, 4)
BLOCKS = (64, 256, 2048)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS_AND_DTYPES = list(itertools.product(BITS, BLOCKS, DTYPES))


def randn(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def one_hot(numel, dtype):
    """One element in 64, so that every block has some."""
    x = torch.zeros(numel)
    x[17::64] = -5.0
    return x


INPUTS = {
    "random": lambda n, dtype: randn(n),
    "constant": lambda n, dtype: torch.full((n,), -0.3),
    "zero": lambda n, dtype: torch.zeros(n),
    "one-hot": one_hot,
    "denormal": lambda n, dtype: randn(n).clamp(-1, 1) * torch.finfo(dtype).tiny,
    "huge": lambda n, dtype: torch.finfo(dtype).max * torch.where(randn(n) < 0, -1.0, torch.rand(n)),
    "mixed": lambda n, dtype: randn(n) * torch.logspace(-37, 4, n)[torch.randperm(n)],
}


def sizes(block):
    """Whole blocks, and where there can be one, a short last block; one block only; less than one."""
    return [3 * block] + ([block + 64, 64] if block > 64 else [])


def message(form, numel):
    """Filled with ones in every bit, which no kernel may leave."""
    return form.open(torch.full((form.message_bytes(numel),), 255, dtype=torch.uint8), numel)


def of(form, values, quantizer=None):
    packed = message(form, values.numel())
    (quantizer or Quantizer(form)).pack(values, packed)
    return packed


def bound(values, packed):
    """What the format promises for each element, in float64."""
    block = packed.format.block
    tops = torch.stack([part.abs().amax() for part in values.to(torch.float64).split(block)])
    scales = (tops / levels(packed.format.bits)).clamp_min(2.0**-126)
    return (scales / 2 * (1 + 2.0**-14)).repeat_interleave(block)[: values.numel()]


def same_bits(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def unpacked(form, packed, like=None):
    values = torch.empty(packed.numel) if like is None else torch.empty_like(like)
    Quantizer(form).unpack(packed, values)
    return values


@pytest.mark.parametrize(("bits", "block", "dtype"), BLOCKS_AND_DTYPES, ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_every_element_is_within_half_a_step_of_its_block(bits, block, dtype, kind):
    torch.manual_seed(0)
    form = Format(bits, block)
    for numel in sizes(block):
        values = INPUTS[kind](numel, dtype).to(dtype)
        packed = of(form, values)
        wide, narrow = unpacked(form, packed), unpacked(form, packed, values)
        assert torch.isfinite(narrow).all()
        assert ((wide.double() - values.double()).abs() <= bound(values, packed)).all()
        assert same_bits(narrow, wide.to(dtype))
        assert kind != "zero" or not wide.any()
        assert kind != "constant" or torch.allclose(wide, values.float(), rtol=2.0**-22, atol=0)
        assert kind != "one-hot" or torch.equal(wide == 0, values == 0)


@pytest.mark.parametrize(("bits", "given", "back"), [
    (4, [7.0, 0.5, 1.5, 2.5, -0.5], [7.0, 0.0, 2.0, 2.0, 0.0]),  # halves go to the even code
    (8, [0.49 * TINY, 0.51 * TINY], [0.0, TINY]),  # what is below half the smallest normal number becomes 0
    (8, [], []),
])  # fmt: skip
def test_rounding(bits, given, back):
    values = torch.zeros(64 if given else 0)
    values[: len(given)] = torch.tensor(given)
    assert unpacked(Format(bits, 64), of(Format(bits, 64), values))[: len(given)].tolist() == back


@pytest.mark.parametrize(("bits", "block", "dtype"), BLOCKS_AND_DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_element_spoils_its_whole_block_and_no_other(bits, block, dtype, bad):
    form, numel = Format(bits, block), 3 * block + (64 if block > 64 else 0)
    values = randn(numel).to(dtype)
    clean = unpacked(form, of(form, values))
    values[block + 5] = values[-1] = bad
    spoiled = unpacked(form, of(form, values))
    for start, part in zip(range(0, numel, block), spoiled.split(block), strict=True):
        if start in (block, (numel - 1) // block * block):
            assert not torch.isfinite(part).any()
        else:
            assert same_bits(part, clean[start : start + block])


@pytest.mark.parametrize(("bits", "block"), [*itertools.product(BITS, BLOCKS)])
def test_a_message_holds_nothing_else_and_a_range_is_that_range_of_the_whole(bits, block):
    form, numel = Format(bits, block), 5 * block + (64 if block > 64 else 0)
    for size in (0, *sizes(block)):
        payload, blocks = size * bits // 8, -(-size // block)
        assert form.message_bytes(size) == -(-(payload + 4 * blocks) // 16) * 16
        packed = message(form, size)
        assert (packed.codes.numel(), packed.scales.numel()) == (payload, blocks)
    packed = of(form, randn(numel).to(torch.bfloat16))
    whole = unpacked(form, packed)
    for start, stop in ((0, block), (2 * block, 4 * block), (3 * block, numel), (5 * block, numel), (block, block)):
        part = torch.empty(stop - start)
        Quantizer(form).unpack(packed, part, start)
        assert same_bits(part, whole[start:stop])


def test_places_of_four_bits():
    """Element i in the low half of byte i, element i + m/2 in the high half."""
    values = torch.zeros(64)
    values[0], values[1], values[32], values[33] = 7.0, -1.0, 2.0, -7.0
    assert of(Format(4, 64), values).codes[:3].tolist() == [0x27, 0x9F, 0]
    assert [Format(8, 2048).message_bytes(n) for n in (4096, 2112)] == [4096 + 16, 2112 + 16]


FORM, ROOM, X = Format(8, 64), torch.zeros(144, dtype=torch.uint8), randn(256)
KIND, FLOATS = "must be 1-D, contiguous and uint8", "must be 1-D, contiguous and of a float dtype"
ODD_VALUES = (X.view(4, 64), torch.zeros(512)[::2], X.to(torch.int32))


def unpack(values, start=0, form=FORM):
    Quantizer(form).unpack(of(FORM, X), values.clone() if values.dim() == 1 else values, start)


@pytest.mark.parametrize(("refused", "said"), [
    *((lambda given=given: Format(*given), said) for given, said in (
        ((2, 64), "bits=2"), ((8, 0), "block=0"), ((8, 100), "block=100"), ((4, 32), "block=32"))),
    (lambda: FORM.open(ROOM, 100), "a message of 100 elements: their number must be a multiple of 64"),
    (lambda: FORM.open(ROOM, 192), "144 bytes is too short: 192 elements in 8 bits, blocks of 64, take 208"),
    *((lambda m=m: FORM.open(m, 64), KIND) for m in (ROOM.view(torch.int8), ROOM.view(2, 72), ROOM[::2])),
    (lambda: Quantizer(FORM).pack(X[:128], of(FORM, X)), "128 values do not fit a message of 256 elements"),
    *((lambda v=v: Quantizer(FORM).pack(v, of(FORM, X)), FLOATS) for v in ODD_VALUES),
    *((lambda v=v: Quantizer(FORM).unpack(of(FORM, X), v), FLOATS) for v in ODD_VALUES),
    *((lambda start=start: unpack(X[:128], start), "are not all in a message of 256 elements") for start in (192, -64)),
    (lambda: unpack(X[:64], 32), "elements 32 to 96 of 256 are not whole blocks of 64"),
    *((lambda form=form: unpack(X, form=form), r"a message of Format\(bits=8, block=64\).*quantizer of Format")
      for form in (Format(4, 64), Format(8, 128))),
    (lambda: Quantizer(FORM, "fast"), r"kernel='fast'\) must be one of auto, plain, compiled"),
])  # fmt: skip
def test_refused(refused, said):
    with pytest.raises(ValueError, match=said):
        refused()


def encode(values, codes, scales, bits):
    """The truth: a line for each step, every temporary fresh memory. Every kernel is compared with it."""
    x = values.to(torch.float32)
    scale = (x.abs().amax(1, keepdim=True) * (1.0 / levels(bits))).clamp_min(TINY)
    q = (x * (1.0 / scale)).round()
    scales.copy_(scale)
    if bits == 8:
        codes.copy_(q)
    else:
        low, high = q.to(torch.int32).chunk(2, 1)
        codes.copy_((low & 15) | ((high & 15) << 4))


def decode(codes, scales, values, bits):
    if bits == 8:
        values.copy_(codes.to(torch.float32) * scales)
    else:
        wide, half = codes.to(torch.int32), values.shape[1] // 2
        # A shift to the left and back to the right spreads the sign of a half byte.
        values[:, :half].copy_(((wide << 28) >> 28).to(torch.float32) * scales)
        values[:, half:].copy_(((wide << 24) >> 28).to(torch.float32) * scales)


def agree(form, values, kernel):
    """The kernel and the truth give the same bits, both ways, for rows of finite values."""
    rows = values.view(-1, form.block)
    ours, truth = message(form, values.numel()), message(form, values.numel())
    (_, codes, scales), *_ = ours.rows(0, values.numel())
    (_, true_codes, true_scales), *_ = truth.rows(0, values.numel())
    kernel.encode(rows, codes, scales, form.bits)
    encode(rows, true_codes, true_scales, form.bits)
    assert same_bits(codes, true_codes)
    assert same_bits(scales, true_scales)
    back, true_back = torch.full_like(rows, torch.nan), torch.empty_like(rows)
    kernel.decode(codes, scales, back, form.bits)
    decode(codes, scales, true_back, form.bits)
    assert same_bits(back, true_back)


@pytest.mark.parametrize(("bits", "dtype"), [*itertools.product(BITS, (*DTYPES, torch.float64))], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_the_plain_kernel_gives_the_bits_of_the_truth(bits, dtype, kind, monkeypatch):
    monkeypatch.setattr(quantization, "CHUNK", 512)  # two rows, then one
    torch.manual_seed(0)
    of_input = torch.float32 if dtype == torch.float64 else dtype
    agree(Format(bits, 256), INPUTS[kind](5 * 256, of_input).to(dtype), PlainKernel())


def test_scratch_serves_long_and_short_rows_and_several_threads(monkeypatch):
    monkeypatch.setattr(quantization, "CHUNK", 256)
    kernel = PlainKernel()
    for block in (64, 2048, 256):
        agree(Format(4, block), randn(4 * block).to(torch.bfloat16), kernel)

    def work(seed):
        for _ in range(20):
            agree(Format(4, 256), randn(16 * 256, seed).to(torch.bfloat16), kernel)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


class TestChoice:
    FORM = Format(8, 64)

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch):
        """Nothing is compiled yet, and everything is large enough to be."""
        quantization.compiled.cache_clear()
        monkeypatch.setattr(quantization, "COMPILE_FROM", 5)
        self.monkeypatch = monkeypatch
        yield
        quantization.compiled.cache_clear()

    def compiler(self, compile):
        self.monkeypatch.setattr(quantization, "why_not_compiled", lambda kind: "")
        self.monkeypatch.setattr(quantization, "_lines", compile)

    def lines(self, variant):
        return getattr(quantization, f"{variant.direction}{variant.bits}_lines")

    def broken(self, variant):
        raise OSError("cc1plus: killed")

    def test_a_block_too_wide_for_a_gpu(self):
        """Its kernel holds a block in registers: it would be compiled for minutes."""
        device, wide = torch.device("cuda", 0), quantization.WIDEST_ON_GPU
        self.monkeypatch.setattr(quantization, "why_not_compiled", lambda kind: "no compiler for a " + kind)
        assert quantization._why_not_compiled(device, wide) == "no compiler for a cuda"
        with pytest.raises(CompilationError, match=r"blocks of 32,768 elements are too wide .* above 16,384"):
            compiled(Variant("pack", torch.float32, 8, 2 * wide, device))

    def test_too_few_elements(self):
        quantizer = Quantizer(self.FORM)
        assert quantizer.describe() == "Quantizer: 8 bits, blocks of 64: plain kernel, not prepared"
        quantizer.prepare(4, [torch.float32])
        reason = "4 elements a step are too few to compile for, below 5"
        assert quantizer.describe() == f"Quantizer: 8 bits, blocks of 64: plain kernel, {reason}"

    def test_no_compiler(self):
        self.monkeypatch.setenv("CXX", "/no/such/compiler")
        quantizer = Quantizer(self.FORM)
        quantizer.prepare(5, [torch.float32])
        assert (quantizer.kernel, quantizer.reason[:15]) == ("plain", "no C++ compiler")
        with pytest.raises(RuntimeError, match=r"kernel='compiled'\): no C\+\+ compiler.*kernel='plain'"):
            Quantizer(self.FORM, "compiled").prepare(5, [torch.float32])

    def test_no_kernel_for_other_devices(self):
        quantizer = Quantizer(self.FORM)
        quantizer.prepare(5, [torch.float32], "meta")
        assert quantizer.reason == "nothing is compiled for devices of type meta"

    def test_as_asked_for(self):
        self.compiler(self.lines)
        for kernel in ("plain", "compiled"):
            quantizer = Quantizer(self.FORM, kernel)
            quantizer.prepare(1, [torch.float32])
            assert quantizer.describe() == f"Quantizer: 8 bits, blocks of 64: {kernel} kernel, as asked for"

    @pytest.mark.parametrize("bits", BITS)
    def test_compiled_before_training(self, bits):
        """Here the lines stand in for the compiled; so their arithmetic is checked where there is no compiler."""
        self.compiler(self.lines)
        quantizer, values = Quantizer(Format(bits, 128)), randn(3 * 128 + 64)
        quantizer.prepare(5, DTYPES)
        assert (quantizer.kernel, quantizer.reason) == ("compiled", "5 elements a step and a C++ compiler")
        self.compiler(self.broken)  # nothing is left to compile
        for dtype in DTYPES:
            ours, theirs = message(quantizer.format, 448), of(quantizer.format, values.to(dtype))
            quantizer.pack(values.to(dtype), ours)
            assert same_bits(ours.codes, theirs.codes)
            assert same_bits(ours.scales, theirs.scales)
            mine, plain = torch.empty(448, dtype=dtype), torch.empty(448, dtype=dtype)
            quantizer.unpack(ours, mine)
            Quantizer(quantizer.format).unpack(ours, plain)
            assert same_bits(mine, plain)

    def test_compiling_fails_at_first(self):
        self.compiler(self.broken)
        quantizer = Quantizer(self.FORM)
        with pytest.warns(RuntimeWarning, match="cc1plus: killed. Using the plain kernel"):
            quantizer.prepare(5, [torch.float32])
        assert quantizer.describe().endswith("compiling failed (the compiler failed: OSError: cc1plus: killed)")
        of(self.FORM, randn(64))

    def test_nothing_is_compiled_later(self):
        """What comes in a dtype that nobody has told takes the plain kernel."""
        self.compiler(self.lines)
        quantizer, packed = Quantizer(self.FORM, "compiled"), message(self.FORM, 64)
        quantizer.prepare(5, [torch.float32])
        self.compiler(self.broken)
        self.monkeypatch.setattr(quantization.CompiledKernel, "encode", None)
        quantizer.pack(randn(64).to(torch.bfloat16), packed)
        with pytest.raises(TypeError):
            quantizer.pack(randn(64), packed)

    @pytest.mark.parametrize(("direction", "which"), [("pack", 1), ("unpack", 2)])
    def test_code_that_gives_other_bits_is_not_used(self, direction, which):
        def off_by_one(variant):
            right = self.lines(variant)

            def lines(*tensors):
                result = right(*tensors)
                if variant.direction == direction:
                    tensors[which].view(-1)[0] += 1
                return result

            return lines

        self.compiler(off_by_one)
        with pytest.raises(RuntimeError, match=f"to {direction} 8 bits gives other bits than plain torch"):
            Quantizer(self.FORM, "compiled").prepare(5, [torch.float32])


COMPILED_KINDS = sampled([], BITS, (64, 2048), DTYPES, slow=[(4, 64, torch.bfloat16)])


@pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())
@pytest.mark.parametrize(("bits", "block", "dtype"), COMPILED_KINDS, ids=str)
def test_compiled_gives_the_bits_of_the_truth_and_never_recompiles(bits, block, dtype):
    form = Format(bits, block)
    quantizer = Quantizer(form, "compiled")
    quantizer.prepare(1, [dtype])
    pack, unpack = (compiled(Variant(d, dtype, bits, block, torch.device("cpu"))) for d in ("pack", "unpack"))
    kernel = SimpleNamespace(encode=pack.encode, decode=unpack.decode)
    torch.manual_seed(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows, kind in itertools.product((1, 2, 7, 64), INPUTS):
            agree(form, INPUTS[kind](rows * block, dtype).to(dtype), kernel)
        values = randn(5 * block + (64 if block > 64 else 0)).to(dtype)
        values[2 * block + 1] = torch.inf
        ours, theirs = of(form, values, quantizer), of(form, values)
        back, plain = torch.empty_like(values), torch.empty_like(values)
        quantizer.unpack(ours, back)
        Quantizer(form).unpack(theirs, plain)
        assert not torch.isfinite(back[2 * block : 3 * block]).any()
        for part in (slice(0, 2 * block), slice(3 * block, None)):
            assert same_bits(back[part], plain[part])
        piece = torch.empty(2 * block, dtype=dtype)
        quantizer.unpack(ours, piece, 3 * block)
        assert same_bits(piece, back[3 * block : 5 * block])
