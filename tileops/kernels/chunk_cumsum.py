"""dt_out = clamp(softplus?(dt + dt_bias)), dA_cumsum = inclusive sum over each chunk of dt * A, from float32 dt.

dt (B,S,H) float32 strided, A (H) float32, dt_bias (H) float32, optional; softplus where ``softplus`` is not 0; dt_min, dt_max,
lowest float32 -> dt_out (B,H,C,Q) out_dtype, dA_cumsum (B,H,C,Q) float32. A term dt * A below ``lowest`` counts as that. Past S
dt_out is 0 and dA_cumsum stays as it is.
A CTA takes some heads of one chunk, turned in shared memory, so that loads run along heads and stores along tokens: a thread has four
tokens in a row (Q = 256: twice), LANES threads a head. Sums of four are summed over the lanes by shuffles: a result has at most 11
roundings, and their order never varies.

From sm_90 on the kernel waits for the one before it by itself (catalog.OVERLAPPING), so that its launch may overlap that one's end.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

OPTIONAL = ("dt_bias",)

SOURCE = r"""
// Limits that leave NaN as it is.
static __device__ __forceinline__ float tileops_at_least(float v, float low) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(low));
  return v;
}
static __device__ __forceinline__ float tileops_at_most(float v, float high) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(high));
  return v;
}
// max(v, 0) + log1p(exp(-|v|)): above 20 that is v, to the bit.
static __device__ __forceinline__ float tileops_softplus(float v) {
  // u = exp(-|v|) = 2**y exp(rest), rest = -|v| - y ln 2: what rounding took from y is put back, so that u keeps its digits where it is
  // small, to 3e-9 |v|, which is ln 2 as a float32.
  float a = fminf(fabsf(v), 120.f), y = a * -1.44269502f, u;
  float rest = __fmaf_rn(y, -0.693147182f, -a);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(u) : "f"(y));
  u = __fmaf_rn(u, rest, u);
  float r = LOG7;
  r = __fmaf_rn(__fmaf_rn(__fmaf_rn(__fmaf_rn(r, u, LOG6), u, LOG5), u, LOG4), u, LOG3);
  r = __fmaf_rn(__fmaf_rn(__fmaf_rn(__fmaf_rn(r, u, LOG2), u, LOG1), u, LOG0), u, 1.f);
  return __fmaf_rn(u, r, tileops_at_least(v, 0.f));
}
// The CTA may be there while the kernel before it in the stream still runs: nothing is read before that one has ended, and not through the
// read-only path.
static __device__ __forceinline__ void tileops_begin() {
#if OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel's CTAs may come where there is room. Not earlier: they would fill up some SMs, which then have more to do than others.
static __device__ __forceinline__ void tileops_next() {
#if OVERLAP
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// *p, or 0 where it is not ``real``: predicated, no branch.
static __device__ __forceinline__ float tileops_value(const float* p, bool real) {
  float v = 0.f;
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.f32 %0, [%1]; }" : "+f"(v) : "l"(p), "r"((int)real));
  return v;
}
static __device__ __forceinline__ float tileops_of_head(const float* p, int h) { return tileops_value(p + h, p != nullptr); }
// A kernel's first loads: COUNT, ROWS tokens apart, all in flight together; 0 from ``left`` tokens on.
static __device__ __forceinline__ void tileops_column(float* v, const float* p, long long pitch, int left) {
  tileops_begin();
#pragma unroll
  for (int i = 0; i < COUNT; i++, p += ROWS * pitch) v[i] = tileops_value(p, i * ROWS < left);
}
// The sum of v over a thread's own lane and those before it, of LANES.
static __device__ __forceinline__ float tileops_sum(float v, int lane) {
#pragma unroll
  for (int o = 1; o < LANES; o *= 2) {
    float up = __shfl_up_sync(0xffffffffu, v, o, LANES);
    if (lane >= o) v += up;
  }
  return v;
}
static __device__ __forceinline__ float tileops_before(float v, int lane) {
  float up = __shfl_up_sync(0xffffffffu, v, 1, LANES);
  return lane > 0 ? up : 0.f;
}
template <typename E> static __device__ __forceinline__ void tileops_put(E* p, long long at, const float* v) {
  struct alignas(4 * sizeof(E)) Four { E e[4]; };
#pragma unroll
  for (int i = 0; i < FOURS; i++)
    *reinterpret_cast<Four*>(p + at + i * 4 * LANES) = Four{{(E)v[4 * i], (E)v[4 * i + 1], (E)v[4 * i + 2], (E)v[4 * i + 3]}};
}
static __device__ __forceinline__ float tileops_of(float v, int lane) { return __shfl_sync(0xffffffffu, v, lane, LANES); }
"""

#: (log1p(u) / u - 1) / u for u in [0, 1] in powers of u; log1p(u) is then within 6e-8 of its value.
LOG = (-0.499996483, 0.333213389, -0.248572811, 0.191540837, -0.137546584, 0.0792141184, -0.0300714243, 0.0053661787)


def schedule(arch: str, **fields: Any) -> dict[str, int]:
    """``heads`` of a CTA; registers for ``ctas`` CTAs an SM."""
    return {"heads": 8, "ctas": 1}


def candidates(arch: str, **fields: Any) -> list[dict[str, int]]:
    return [{"heads": 4}, {"heads": 4, "ctas": 12}, {"ctas": 6}]


def program(*, arch: str, Q: int, out_dtype: str, heads: int, ctas: int) -> Any:
    B, S, H, C = k.dims("B S H C")
    lanes = min(32, Q // 4)  # threads of a head
    fours = Q // (4 * lanes)  # of a thread
    threads = heads * lanes
    count = Q * heads // threads
    names = {
        "LANES": lanes,
        "COUNT": count,
        "FOURS": fours,
        "ROWS": threads // heads,
        "OVERLAP": int(arch not in ("sm_80", "sm_86", "sm_89")),
        **{f"LOG{i}": f"{c!r}f" for i, c in enumerate(LOG)},
    }
    source = "".join(f"#define {name} {value}\n" for name, value in names.items()) + SOURCE

    def softplus_of(v):
        return T.Select(v > 20.0, v, k.log1p(T.exp(v))) if k._cpu else T.call_extern("float32", "tileops_softplus", v)

    def at_least(v, low):
        return T.Select(v < low, low, v) if k._cpu else T.call_extern("float32", "tileops_at_least", v, low)

    def at_most(v, high):
        return T.Select(v > high, high, v) if k._cpu else T.call_extern("float32", "tileops_at_most", v, high)

    @T.macro
    def stored(part, out, at, b, h, c, lane):
        """A thread's fours, of which the first is element ``at`` of ``out``."""
        if h < H:
            if k._cpu:
                for i in T.unroll(fours):
                    for e in T.vectorized(4):
                        out[b, h, c, (i * lanes + lane) * 4 + e] = part[i * 4 + e]
            else:
                T.evaluate(T.call_extern("handle", "tileops_put", T.address_of(out[0, 0, 0, 0]), at, T.address_of(part[0])))

    @T.macro
    def made(part, values, given, bias, dt_min, dt_max, softplus, limited, lowest, dt_out, at, first, b, c, h, lane):
        """A thread's dt_out, and in ``part`` the sums over each of its fours."""
        # A rate of -inf becomes a finite one: a dt of 0 adds nothing, and 0 * -inf is NaN.
        rate = T.alloc_var("float32", init=at_least(given, k.LOWEST))
        for i in T.unroll(fours):
            for e in T.vectorized(4):
                part[i * 4 + e] = values[h, (i * lanes + lane) * 4 + e]
        for i in T.unroll(fours * 4):
            part[i] = part[i] + bias
        if softplus != 0.0:
            for i in T.unroll(fours * 4):
                part[i] = softplus_of(part[i])
        if limited:
            for i in T.unroll(fours * 4):
                part[i] = at_most(at_least(part[i], dt_min), dt_max)
        if c * Q + Q > S:
            for i in T.unroll(fours * 4):
                part[i] = T.Select(c * Q + (i // 4 * lanes + lane) * 4 + i % 4 < S, part[i], 0.0)
        stored(part, dt_out, at, b, first + h, c, lane)
        for i in T.unroll(fours * 4):
            part[i] = at_least(part[i] * rate, lowest)
        for i in T.unroll(fours):
            for e in T.unroll(3):
                part[i * 4 + e + 1] = part[i * 4 + e] + part[i * 4 + e + 1]

    @T.macro
    def put(part, before, dA_cumsum, at, first, b, c, h, lane):
        for i in T.unroll(fours):
            for e in T.unroll(4):
                part[i * 4 + e] = before[i] + part[i * 4 + e]
        if not k._cpu:
            if c * Q + Q > S:
                # Sums behind the last token must be its own, not others of the same terms: its four ends in it.
                last = T.alloc_var("int32", init=S - 1 - c * Q)
                final = T.alloc_var("float32", init=part[3])
                if fours > 1:
                    if last >= 4 * lanes:
                        final = part[4 * fours - 1]
                final = T.call_extern("float32", "tileops_of", final, last // 4 % lanes)
                for i in T.unroll(fours * 4):
                    part[i] = T.Select((i // 4 * lanes + lane) * 4 + i % 4 > last, final, part[i])
        stored(part, dA_cumsum, at, b, first + h, c, lane)

    @T.prim_func
    def chunk_cumsum(
        dt: k.strided("dt", (B, S, H), "float32"),
        A: T.Tensor((H,), "float32"),
        dt_bias: T.Tensor((H,), "float32"),
        dt_min: T.float32,
        dt_max: T.float32,
        softplus: T.float32,
        lowest: T.float32,
        dt_out: T.Tensor((B, H, C, Q), out_dtype),
        dA_cumsum: T.Tensor((B, H, C, Q), "float32"),
    ):
        parts = T.ceildiv(H, heads)
        with k.grid(B * C * parts, threads=threads) as block:
            if not k._cpu:
                T.import_source(source)
            if ctas > 1:
                k.at_least(ctas)
            # Two divisions that do not wait for one another, unsigned ones being shorter.
            bc = T.alloc_var("int32", init=T.cast(T.truncdiv(T.cast(block, "uint32"), T.cast(parts, "uint32")), "int32"))
            b = T.alloc_var("int32", init=T.cast(T.truncdiv(T.cast(block, "uint32"), T.cast(C * parts, "uint32")), "int32"))
            c = T.alloc_var("int32", init=bc - b * C)
            first = T.alloc_var("int32", init=(block - bc * parts) * heads)
            # Four floats of padding a head: fours stay aligned, and eight heads by four tokens are in different banks.
            values = k.shared((heads, Q + 4), "float32")
            raw = T.alloc_local((count,), "float32")
            part = T.alloc_local((fours * 4,), "float32")
            before = T.alloc_local((fours,), "float32")
            rate = T.alloc_var("float32", init=0.0)
            bias = T.alloc_var("float32", init=0.0)
            at = T.alloc_var("int64", init=0)
            # softplus is not below 0
            limited = T.alloc_var("bool", init=T.Or(dt_max <= -k.LOWEST, T.Or(dt_min > 0.0, softplus == 0.0)))
            total = T.alloc_var("float32", init=0.0)
            whole = T.alloc_var("float32", init=0.0)
            if k._cpu:
                # No lanes to sum over: what they would hold is made first.
                totals = k.shared((fours * lanes,), "float32")
                for l, h in T.grid(Q, heads):
                    values[h, l] = T.if_then_else(c * Q + l < S, dt[b, T.min(c * Q + l, S - 1), T.min(first + h, H - 1)], 0.0)
                for h in T.serial(heads):
                    rate = A[T.min(first + h, H - 1)]
                    if T.Not(T.isnullptr(dt_bias.data)):
                        bias = dt_bias[T.min(first + h, H - 1)]
                    for lane in T.serial(lanes):
                        made(part, values, rate, bias, dt_min, dt_max, softplus, limited, lowest, dt_out, at, first, b, c, h, lane)
                        for i in T.unroll(fours):
                            totals[i * lanes + lane] = part[i * 4 + 3]
                    for lane in T.serial(lanes):
                        made(part, values, rate, bias, dt_min, dt_max, softplus, limited, lowest, dt_out, at, first, b, c, h, lane)
                        for i in T.unroll(fours):
                            before[i] = 0.0
                            for j in T.serial(i * lanes + lane):
                                before[i] = before[i] + totals[j]
                        put(part, before, dA_cumsum, at, first, b, c, h, lane)
            else:
                for t in T.Parallel(threads):
                    T.evaluate(
                        T.call_extern(
                            "handle",
                            "tileops_column",
                            T.address_of(raw[0]),
                            T.address_of(dt[b, c * Q + t // heads, T.min(first + t % heads, H - 1)]),
                            dt.strides[1],
                            S - c * Q - t // heads,
                        )
                    )
                    rate = T.call_extern("float32", "tileops_of_head", A.data, T.min(first + t // lanes, H - 1))
                    bias = T.call_extern("float32", "tileops_of_head", dt_bias.data, T.min(first + t // lanes, H - 1))
                    for i in T.unroll(count):
                        values[t % heads, i * (threads // heads) + t // heads] = raw[i]
                for t in T.Parallel(threads):
                    at = ((T.cast(b, "int64") * H + first + t // lanes) * C + c) * Q + t % lanes * 4
                    made(
                        part, values, rate, bias, dt_min, dt_max, softplus, limited, lowest, dt_out, at, first, b, c, t // lanes, t % lanes
                    )
                    T.evaluate(T.call_extern("handle", "tileops_next"))
                    whole = 0.0
                    for i in T.unroll(fours):
                        total = T.call_extern("float32", "tileops_sum", part[i * 4 + 3], t % lanes)
                        before[i] = whole + T.call_extern("float32", "tileops_before", total, t % lanes)
                        if i + 1 < fours:
                            whole = T.call_extern("float32", "tileops_of", total, lanes - 1)
                    put(part, before, dA_cumsum, at, first, b, c, t // lanes, t % lanes)

    return k.complete(chunk_cumsum)
