"""Compilers, cache and the search for kernels: what they make, what they say when they cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from ctypes import c_int32
from dataclasses import replace
from pathlib import Path

import launching
import numpy as np
import pytest
from launching import CONFORMANCE, DTYPES, cuda_available, launch

from kernels_cuda import audit, build, cache, host_build, modules, nvrtc, sources
from kernels_cuda.forward import SHARED_LIMIT
from kernels_cuda.instances import instances

PRODUCTS = tuple(f"product<{name},32,24,48,{form}>" for name in DTYPES for form in ("NT", "TN"))

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="no NVRTC library")
needs_nvcc = pytest.mark.skipif(build._nvcc() is None, reason="no nvcc")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERIKDA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_memory() -> Iterator[None]:
    """Forget which compiler was found, before and after."""
    host_build.compiler.cache_clear()
    yield
    host_build.compiler.cache_clear()


# ---- GPU code ------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("arch", build.ARCHES)
def test_products_compile_for_every_architecture_without_spills(arch: str) -> None:
    for instance in PRODUCTS:
        made = build.build(instance, arch, source=CONFORMANCE)
        assert made.path.read_bytes()[:4] == b"\x7fELF"
        assert "product" in made.symbol
        assert made.resources is not None
        assert 0 < made.resources.registers <= 255
        assert made.resources.spill_stores == made.resources.spill_loads == made.resources.stack == 0
        assert made.resources.shared == 0, "static shared memory is not poisoned on the host"


@needs_nvrtc
def test_every_conformance_kernel_compiles_for_the_gpu() -> None:
    for instance in launching.INSTANCES:
        if not instance.startswith("product"):
            build.build(instance, "sm_90a", source=CONFORMANCE)


@pytest.mark.parametrize("arch", build.ARCHES)
def test_launch_plans_fit_every_architecture(arch: str) -> None:
    found = instances(arch)
    for kernel, shared in found.kernels.items():
        assert sources.source_of(kernel).suffix == ".cu"
        assert shared <= SHARED_LIMIT[arch], kernel
    assert found.refused == ()
    every = {name for path in sources.kernel_files() for name in sources.kernels_in(path)}
    assert {sources.base_name(kernel) for kernel in found.kernels} == every, "a kernel that no plan launches"


def test_no_lambda_is_generic() -> None:
    """NVRTC 13.0 takes a generic lambda for a host function and refuses it; later ones compile it."""
    generic = re.compile(r"\[[&=\w, ]*\]\s*\([^)]*\bauto\b")
    assert generic.search("auto f = [&](int i, auto g) { g(i); };")
    for path in (*sources.kernel_files(), *sources.headers()):
        assert not generic.search(path.read_text()), path.name


@needs_nvrtc
@pytest.mark.parametrize("arch", build.ARCHES)
def test_usual_instances_keep_to_the_rules(arch: str) -> None:
    """Every kernel at K = V = 128 and chunk 64: no spill, stack, static shared memory or forbidden instruction."""
    names = audit.usual(arch)
    assert {sources.base_name(name) for name in names} == {
        name for path in sources.kernel_files() for name in sources.kernels_in(path)
    }
    assert set(audit.SPILLS.get(arch, {})) <= set(names), "a listed instance that is no longer there"
    assert audit.audit(arch, names) == []


FORBIDDEN = {  # planted in a kernel of its own: what is found
    "x[tid()] = __fdividef(x[tid()], 3.f);": "is approximate",
    'asm("add.ftz.f32 %0, %0, %0;" : "+f"(x[tid()]));': "flushes subnormal numbers",
    "x[tid()] = __sinf(x[tid()]);": "is approximate",
    'u32 a[4] = {}, b[2] = {}; asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, '
    '{%8,%9}, {%0,%1,%2,%3};" : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), '
    '"r"(a[3]), "r"(b[0]), "r"(b[1]));': "rounds operands to TF32",
    'u32 c[2] = {}, a[4] = {}; asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, '
    '{%0,%1};" : "+r"(c[0]), "+r"(c[1]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[0]), "r"(a[1])); '
    "x[tid()] = as_float(c[0] + c[1]);": "does not add in float32",
    "atomicAdd(x, 1.f);": "adds in an order of its own",
    "float y[64]; for (int i = 0; i < 64; ++i) y[i] = x[i * 7]; x[tid()] = y[n % 64];": "uses local memory",
    "x[i32(n * n) + tid()] = 1.f;": "cut to 32 bits",
    "__shared__ float s[32]; s[tid()] = x[tid()]; sync(); x[tid()] = s[31 - tid()];": "static shared memory",
    "float y[400];\n#pragma unroll\nfor (int i = 0; i < 400; ++i) y[i] = x[i * n];\n#pragma unroll 1\n"
    "for (int k = 0; k < n; ++k) {\n#pragma unroll\n"
    "for (int i = 0; i < 400; ++i) y[i] = fma(y[i], y[(i + 1) % 400], 1.f);\n}\n"
    "#pragma unroll\nfor (int i = 0; i < 400; ++i) x[i * n] = y[i];": "bytes, 0 are allowed",
}  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("statement", [*FORBIDDEN, "x[tid() + n * n] = exp(x[tid()]) / sqrt_rn(x[n]);"])
def test_what_kernels_must_not_contain_is_found(statement: str, tmp_path: Path) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(
        f'#include "vk.cuh"\nnamespace vk {{ VK_KERNEL void planted(float* x, i64 n) {{ {statement} }} }}\n'
    )
    found = audit.problems(build.build("planted", "sm_90a", source=source), {})
    expected = FORBIDDEN.get(statement)
    assert any(expected in problem for problem in found) if expected else found == [], found


@needs_nvrtc
@pytest.mark.parametrize(
    ("instance", "found"),
    [("bf16,64,3,true", 0), ("f16,16,1,false", 0), ("bf16,64,0,true", 1), ("float,64,3,true", 1)],
)
def test_tf32_is_for_decayed_rows_of_16_bits_only(instance: str, found: int) -> None:
    made = replace(build.build("position", "sm_90a", source=CONFORMANCE), instance=f"prepare<{instance}>")
    assert len(audit.problems(replace(made, opcodes={audit.TF32: 4}), {})) == found


@needs_nvrtc
def test_allowed_spills_can_only_shrink() -> None:
    made = build.build("position", "sm_90a", source=CONFORMANCE)
    assert made.resources is not None
    spilling = replace(
        made, compiler=audit.COMPILER, resources=replace(made.resources, spill_stores=8, spill_loads=4, stack=8)
    )
    assert audit.problems(spilling, {"position": 12}) == []
    (less,) = audit.problems(spilling, {"position": 11})
    assert less == "position on sm_90a: spills 12 bytes, 11 are allowed"
    (more,) = audit.problems(spilling, {"position": 16})
    assert more.endswith("spills 12 bytes and 16 are allowed: lower the number in SPILLS")
    with pytest.raises(ValueError, match="reports neither registers nor PTX of position; use NVRTC"):
        audit.problems(replace(made, opcodes=None), {})


@needs_nvrtc
def test_subnormals_are_kept_and_the_flags_say_so() -> None:
    kept = build.build("math", "sm_90a", source=CONFORMANCE)
    assert "--ftz=false" in kept.flags
    assert not any("fast_math" in flag for flag in kept.flags)
    fresh = cache.uncached(build.compiler())
    lost = build.build("math", "sm_90a", source=CONFORMANCE, flags=("--ftz=true", *fresh))
    assert kept.path.read_bytes() != lost.path.read_bytes(), "the flag reaches the compiler"
    again = build.build("math", "sm_90a", source=CONFORMANCE, flags=(*build.NUMERICS, *fresh))
    assert kept.path.read_bytes() == again.path.read_bytes(), "what keeps a compiler from its cache changes no code"


@pytest.mark.parametrize(
    ("compiler", "flags"),
    [("NVRTC 12.8", ()), ("NVRTC 12.9", ("--no-cache",)), ("NVRTC 13.0", ("--no-cache",)), ("nvcc release 13.0", ())],
)
def test_only_compilers_that_know_the_flag_are_kept_from_their_cache(compiler: str, flags: tuple[str, ...]) -> None:
    assert cache.uncached(compiler) == flags


@needs_nvrtc
@needs_nvcc
def test_nvcc_stands_in_for_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    by_nvrtc = [build.build(i, "sm_90a", source=CONFORMANCE) for i in ("position", "product<bf16,16,8,16,NN>")]
    monkeypatch.setattr(nvrtc, "version", lambda: "")
    for other in by_nvrtc:
        made = build.build(other.instance, "sm_90a", source=CONFORMANCE)
        assert made.compiler.startswith("nvcc")
        assert made.symbol == other.symbol
        assert made.resources is not None


def test_no_gpu_compiler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: "")
    monkeypatch.setattr(build, "_nvcc", lambda: None)
    with pytest.raises(host_build.CompileError, match="needs NVRTC or nvcc; install nvidia-cuda-nvrtc"):
        build.build("position", "sm_90a", source=CONFORMANCE)


@needs_nvrtc
def test_an_instance_that_the_compiler_is_silent_about_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver NVRTC hands out what it has compiled before, with neither a log nor PTX."""
    silent = build.Cubin(Path(), "chunk_table", "", "sm_90a", build.NUMERICS, "NVRTC 13.5", None, None)
    asked: list[tuple[str, ...]] = []

    def again(instance: str, arch: str, *, flags: tuple[str, ...]) -> build.Cubin:
        asked.append(flags)
        return replace(silent, flags=flags, resources=build.Resources(8, 0, 0, 8, 0), opcodes={})

    monkeypatch.setattr(audit, "compile_all", lambda *_, workers: [silent])
    monkeypatch.setattr(audit, "build", again)
    monkeypatch.setattr(audit, "compiler", lambda: silent.compiler)
    assert audit.audit("sm_90a", ["chunk_table"]) == ["chunk_table on sm_90a: has 8 bytes of stack"]
    assert asked == [(*build.NUMERICS, "--no-cache")]
    monkeypatch.setattr(audit, "compiler", lambda: "nvcc release 13.0")
    with pytest.raises(ValueError, match="reports neither registers nor PTX of chunk_table"):
        audit.audit("sm_90a", ["chunk_table"])


def test_a_refused_kernel_carries_the_compilers_words() -> None:
    with pytest.raises(host_build.CompileError, match="M and K are multiples of 16, N of 8"):
        build.build("product<bf16,16,8,17,NN>", "sm_90a", source=CONFORMANCE)
    with pytest.raises(host_build.CompileError, match="sm_12345"):
        build.build("position", "sm_12345", source=CONFORMANCE)


def test_ptxas_log() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1av' for 'sm_90a'
ptxas info    : Function properties for _Z1av
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    found = build.parse_resources(log)
    assert found["_Z1av"] == build.Resources(registers=255, spill_stores=8, spill_loads=12, stack=16, shared=1024)
    assert found["_Z1bv"] == build.Resources(registers=8, spill_stores=0, spill_loads=0, stack=0, shared=0)


@pytest.mark.skipif(cuda_available(), reason="there is a device")
def test_no_device() -> None:
    pytest.importorskip("cupy")
    with pytest.raises(modules.LaunchError, match=r"no CUDA device is available; use load\('host'\)"):
        modules.load("cuda")


# ---- host code -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize(("cxx", "path"), [("no-such-compiler", None), (None, "")])
def test_no_host_compiler(monkeypatch: pytest.MonkeyPatch, cxx: str | None, path: str | None) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if cxx:
        monkeypatch.setenv("CXX", cxx)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    found = "CXX=no-such-compiler is not a C" if cxx else r"neither g\+\+ nor clang\+\+ is on PATH"
    with pytest.raises(host_build.CompileError, match=rf"needs a C\+\+17 compiler, and {found}"):
        host_build.compiler()


def test_a_refused_host_kernel_carries_the_compilers_words() -> None:
    with pytest.raises(host_build.CompileError, match="M and K are multiples of 16, N of 8"):
        host_build.build(["product<bf16,16,8,17,NN>"], source=CONFORMANCE)


def test_unknown_sanitizer() -> None:
    with pytest.raises(ValueError, match="sanitize is 'thread'; allowed: None or 'address'"):
        host_build.build(["position"], source=CONFORMANCE, sanitize="thread")


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'tpu'; allowed: 'cuda', 'host'"):
        modules.load("tpu")  # type: ignore[arg-type]


def test_importing_is_light() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, kernels_cuda.modules as m; print({'cupy', 'torch'} & {*sys.modules})"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == "set()"


# ---- cache ---------------------------------------------------------------------------------------


def counted(text: str) -> tuple[list[int], object]:
    calls: list[int] = []

    def make(artifact: Path) -> dict[str, int]:
        calls.append(1)
        artifact.write_text(text)
        return {"answer": 42}

    return calls, make


def test_built_once_per_key(empty_cache: Path) -> None:
    calls, make = counted("x")
    first = cache.fetch({"a": 1}, "file", make)  # type: ignore[arg-type]
    again = cache.fetch({"a": 1}, "file", make)  # type: ignore[arg-type]
    assert first == again == (first[0], {"answer": 42})
    assert first[0].is_relative_to(empty_cache)
    assert len(calls) == 1
    other = cache.fetch({"a": 2}, "file", make)  # type: ignore[arg-type]
    assert other[0] != first[0]
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["artifact", "truncated", "meta", "missing"])
def test_damaged_entries_are_rebuilt(empty_cache: Path, damage: str) -> None:
    calls, make = counted("sound")
    path, _ = cache.fetch({}, "file", make)  # type: ignore[arg-type]
    if damage == "artifact":
        path.write_text("sOund")
    elif damage == "truncated":
        path.write_text("")
    elif damage == "meta":
        (path.parent / "meta.json").write_text("{")
    else:
        path.unlink()
    path, kept = cache.fetch({}, "file", make)  # type: ignore[arg-type]
    assert path.read_text() == "sound"
    assert kept == {"answer": 42}
    assert len(calls) == 2
    assert len(list(empty_cache.iterdir())) == 1, "nothing is left lying about"


def test_failed_builds_leave_nothing(empty_cache: Path) -> None:
    def fail(artifact: Path) -> dict[str, int]:
        artifact.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.fetch({}, "file", fail)
    assert list(empty_cache.iterdir()) == []


def test_a_faster_process_wins(empty_cache: Path) -> None:
    def slow(artifact: Path) -> dict[str, int]:
        cache.fetch({}, "file", counted("first")[1])  # type: ignore[arg-type]
        artifact.write_text("second")
        return {"answer": 0}

    path, kept = cache.fetch({}, "file", slow)
    assert path.read_text() == "first"
    assert kept == {"answer": 42}
    assert len(list(empty_cache.iterdir())) == 1


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIKDA_CACHE", str(tmp_path / "chosen"))
    assert cache.cache_dir() == tmp_path / "chosen"
    monkeypatch.delenv("VERIKDA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "verikda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_dir() == tmp_path / "home" / ".cache" / "verikda"
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("VERIKDA_CACHE", str(tmp_path / "taken"))
    with pytest.raises(OSError, match="set VERIKDA_CACHE to a writable directory"):
        cache.cache_dir()


def test_a_changed_header_is_compiled_anew(empty_cache: Path, tmp_path: Path) -> None:
    source, header = tmp_path / "twice.cu", tmp_path / "factor.cuh"
    source.write_text(
        '#include "factor.cuh"\nnamespace vk { VK_KERNEL void scaled(float* x, i32 n) { x[tid()] *= factor * n; } }\n'
    )
    for factor in (2, 3):
        header.write_text(f'#pragma once\n#include "vk.cuh"\nnamespace vk {{ constexpr float factor = {factor}; }}\n')
        (x,) = launch(modules.Host(source=source), "scaled", np.ones(32, np.float32), c_int32(1))
        assert (x == factor).all()


# ---- sources -------------------------------------------------------------------------------------


def test_kernels_are_found_by_name(tmp_path: Path) -> None:
    source = tmp_path / "some.cu"
    source.write_text(
        "VK_KERNEL void one(int a) {}\n"
        "template <class T, int N>\nVK_KERNEL_BOUNDS(N * 32, (Shape<T, N>::blocks())) void two(T* a) {}\n"
        "VK_KERNEL_BOUNDS(128, 1)\nvoid three() {}\n"
        "VK_DEVICE void helper(int a) {}\n"
    )
    assert sources.kernels_in(source) == ("one", "two", "three")


@pytest.mark.parametrize(
    ("instance", "name"), [("a", "a"), ("a<bf16,64>", "a"), ("vk::a<vk::bf16, 64>", "a"), (" a<b<c>> ", "a")]
)
def test_base_names(instance: str, name: str) -> None:
    assert sources.base_name(instance) == name


def test_names_that_are_none() -> None:
    with pytest.raises(ValueError, match="'a b' is no kernel name"):
        sources.base_name("a b")
    with pytest.raises(ValueError, match="no kernel named nothing; known kernels: "):
        sources.source_of("nothing<float>")


def test_one_name_in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.cu", "b.cu"):
        (tmp_path / name).write_text("VK_KERNEL void same() {}")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "_directory", sources._directory.__wrapped__)
    with pytest.raises(ValueError, match=r"kernel same is defined in a.cu and in b.cu; rename one"):
        sources.source_of("same")


def test_the_hash_follows_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources.source_hash()
    assert re.fullmatch(r"[0-9a-f]{16}", before)
    for folder in ("include", "host", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
    files = ("a.cu", "b.cuh", "include/c.cuh", "host/d.hpp", "host/e.cpp", *sources.PLANS)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "INCLUDE", tmp_path / "include")
    monkeypatch.setattr(sources, "HOST", tmp_path / "host")
    for name in files:
        (tmp_path / name).write_text("1")
    seen = {before, sources.source_hash()}
    for name in files:
        (tmp_path / name).write_text("2")
        seen.add(sources.source_hash())
    assert len(seen) == 2 + len(files)


def test_the_hash_covers_what_a_launch_imports() -> None:
    """Every module of the package that a launch loads is hashed, but for those that only find, keep or run files."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, kernels_cuda.forward, kernels_cuda.backward, kernels_cuda.instances\n"
         "print(*(m.split('.')[1] + '.py' for m in sys.modules if m.startswith('kernels_cuda.')))"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert set(done.stdout.split()) - set(sources.PLANS) == {"cache.py", "host_build.py", "ptx.py", "sources.py"}


def test_texts_follow_includes() -> None:
    found = sources.texts(CONFORMANCE)
    expected = {"conformance.cu", "include/tile.cuh", "include/vk.cuh", "include/device.cuh", "host/twin.hpp"}
    assert expected <= set(found)
