"""chunk_cumsum's CUDA code, its lanes run as threads of the CPU: loads, shuffles and stores, which the tile tests do not see."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_cumsum import LIMITS, expected, steps_about_limits
from helpers_tile import COMPILER, SCALARS, Guarded, _folder

from tileops import catalog, expr
from tileops.compiler.lower import lower

#: What the kernel uses of CUDA. A warp's exchange is two meetings of its lanes around a shared array.
CUDA = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>
using std::max;
using std::min;
#define __device__
#define __forceinline__ inline
#define __shared__ static
struct Index { int x; };
thread_local Index threadIdx, blockIdx;
struct alignas(16) float4 { float x, y, z, w; };
alignas(16) static float memory[1 << 14];
static float sent[THREADS];
static std::barrier<> cta(THREADS);
static std::vector<std::barrier<>*> warps;
inline void __syncthreads() { cta.arrive_and_wait(); }
inline float from(float v, int source) {
  std::barrier<>& warp = *warps[threadIdx.x / 32];
  sent[threadIdx.x] = v;
  warp.arrive_and_wait();
  float r = sent[source];
  warp.arrive_and_wait();
  return r;
}
inline float __shfl_up_sync(unsigned, float v, int o, int width) {
  return from(v, threadIdx.x % width >= o ? threadIdx.x - o : threadIdx.x);
}
inline float __shfl_sync(unsigned, float v, int lane, int width) { return from(v, threadIdx.x / width * width + lane % width); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
"""
LAUNCH = r"""
extern "C" int launch(int grid, PARAMETERS) {
  warps.clear();
  for (int i = 0; i < THREADS; i += 32) warps.push_back(new std::barrier<>(32));
  for (int b = 0; b < grid; b++) {
    std::vector<std::thread> lanes;
    for (int t = 0; t < THREADS; t++) lanes.emplace_back([=] { threadIdx.x = t; blockIdx.x = b; NAME(ARGUMENTS); });
    for (auto& lane : lanes) lane.join();
  }
  return 0;
}
"""
#: PTX -> C++
ASSEMBLY = {
    r"ex2\.approx": "u = exp2f(y);",
    r"max\.NaN": "v = v < low ? low : v;",
    r"min\.NaN": "v = v > high ? high : v;",
    r"ld\.global": "if (real) v = *p;",
}
TYPES = {"pointer": "float*", "int32": "int", "int64": "int64_t", "float32": "float"}


@functools.cache
def build(Q: int) -> tuple[Any, Any]:
    if COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++) on PATH")
    made = lower(catalog.config("chunk_cumsum", "sm_90a", Q=Q, out_dtype="float32"))
    code = made.source[made.source.index("#define LANES") :]
    code = re.sub(r'extern "C" __global__ void \w+\([^{]*?\);', "", code)
    code = re.sub(r'extern "C" __global__ void __launch_bounds__\([^)]*\)', "void", code)
    code = re.sub(r"^#include.*$|__restrict__", "", code, flags=re.M)
    code = re.sub(r"extern __shared__ __align__\(\d+\) float (\w+)\[\];", r"float* \1 = memory;", code)
    code = code.replace("#define OVERLAP 1", "#define OVERLAP 0")  # nothing runs beside it
    for ptx, cpp in ASSEMBLY.items():
        code, count = re.subn(rf'asm(?: volatile)?\("[^"]*{ptx}[^"]*"[^;]*;', cpp, code)
        assert count == 1, ptx
    names = ", ".join(p.name for p in made.params)
    parameters = ", ".join(f"{TYPES[p.kind]} {p.name}" for p in made.params)
    call = LAUNCH.replace("PARAMETERS", parameters).replace("ARGUMENTS", names).replace("NAME", made.symbol)
    source = Path(_folder.name) / f"lanes{Q}.cpp"
    source.write_text(f"#define THREADS {made.block[0]}\n{CUDA}{code}{call}")
    library = source.with_suffix(".so")
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-pthread", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library)), made


def run(
    Q: int, dt: np.ndarray, A: np.ndarray, bias: np.ndarray | None, softplus: bool = True, low: float = 0.0, high: float = np.inf
) -> tuple[np.ndarray, np.ndarray]:
    B, S, H = dt.shape
    C = -(-S // Q)
    library, made = build(Q)
    out, cumsum = Guarded((B, H, C, Q)), Guarded((B, H, C, Q))
    tensors = {"dt": dt, "A": A, "dt_bias": bias, "dt_out": out.array, "dA_cumsum": cumsum.array}
    sizes = {"B": B, "S": S, "H": H, "C": C, "dt.stride0": S * H, "dt.stride1": H}
    floats = {"dt_min": low, "dt_max": high, "softplus": float(softplus), "lowest": -1e30}
    values: list[Any] = []
    for p in made.params:
        if p.kind == "pointer":
            tensor = tensors[p.bind]
            values.append(ctypes.c_void_p(0 if tensor is None else tensor.ctypes.data))
        else:
            values.append(SCALARS[p.kind](floats[p.bind] if p.kind == "float32" else expr.evaluate(p.bind, sizes)))
    assert library.launch(ctypes.c_int(int(expr.evaluate(made.grid[0], sizes))), *values) == 0
    return out.check(), cumsum.check()


@pytest.mark.parametrize(("Q", "S"), [(16, 21), (64, 33), (64, 100), (128, 67), (256, 129), (256, 300)])
def test_values_and_sums_that_are_flat_behind_the_last_token(Q: int, S: int) -> None:
    rng = np.random.default_rng(Q + S)
    H, C = 5, -(-S // Q)
    dt = rng.normal(-2, 2, (1, S, H)).astype(np.float32)
    A, bias = -np.exp(rng.normal(size=H)).astype(np.float32), rng.normal(size=H).astype(np.float32)
    out, cumsum = run(Q, dt, A, bias)
    v = np.zeros((C * Q, H))
    v[:S] = np.log1p(np.exp((dt + bias)[0].astype(np.float64)))
    np.testing.assert_allclose(out[0].transpose(1, 2, 0).reshape(C * Q, H), v, rtol=1e-6)
    np.testing.assert_allclose(cumsum[0].transpose(1, 2, 0), (v * A).reshape(C, Q, H).cumsum(1), rtol=2e-6)
    flat = cumsum.reshape(H, C * Q)[:, S - 1 :]
    assert (flat == flat[:, :1]).all()
    # What is behind a sequence's end changes no bit of it.
    longer = np.concatenate([dt, rng.normal(size=(1, Q, H)).astype(np.float32)], 1)
    again = run(Q, longer, A, bias)
    for one, other in zip((out, cumsum), again):
        assert (one.reshape(H, -1)[:, :S] == other.reshape(H, -1)[:, :S]).all()


def test_softplus_keeps_its_digits_over_its_range_and_is_the_step_above_20() -> None:
    v = np.concatenate([np.arange(-80, 20.25, 0.125), [19.999, 20.001, 200, np.inf, -np.inf, np.nan]]).astype(np.float32)
    out, _ = run(16, v.reshape(1, -1, 1), np.float32([0]), None)
    v64 = v.astype(np.float64)
    np.testing.assert_allclose(out.reshape(-1)[: v.size], np.where(v64 > 20, v64, np.log1p(np.exp(np.minimum(v64, 20)))), rtol=6e-7)
    assert (out.reshape(-1)[: v.size][v > 20] == v[v > 20]).all()


@pytest.mark.parametrize("case", LIMITS)
def test_each_limit_by_itself(case: str) -> None:
    softplus, low, high = LIMITS[case]
    dt, A = steps_about_limits(), -np.ones(3, np.float32)
    got, want = run(16, dt, A, None, softplus, low, high), expected(dt, A, None, 16, softplus, low, high)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)


def test_no_bias_no_softplus_and_an_infinite_rate() -> None:
    dt = np.float32([0.5, 0, 0, 1, 0, np.nan, 1]).reshape(1, 7, 1)
    out, cumsum = run(16, dt, np.float32([-np.inf]), None, softplus=False)
    np.testing.assert_array_equal(out[0, 0, 0, :7], dt.ravel())
    np.testing.assert_array_equal(cumsum[0, 0, 0, :5], np.float32([-1e30] * 3 + [-2e30] * 2))
    assert np.isnan(cumsum[0, 0, 0, 5:]).all()
