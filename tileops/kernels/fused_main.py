"""The full forward in one pass: v = clamp(softplus?(dt + dt_bias?)), state = exp(v A) state + v x B, y = (C . state + D? x) silu(z?);
g = h // (H / G).

x (B,S,H,P), Bm, Cm (B,S,G,N) dtype, through tensor maps; dt (B,S,H) float32; A, dt_bias (H), D (H,P), initial_states (M,H,P,N)
float32; z (B,S,H,P) dtype -> y (B,S,H,P) float32 or dtype, final_states (M,H,P,N) float32. What ``flags`` leaves out (bits below) is
not read. M is B; with PACKED, B is 1 and sequence m is the tokens cu_seqlens[m] .. cu_seqlens[m + 1] - 1 of S.

A CTA takes 64 rows (d_head; all 80 of P = 80, see ``tile_rows``) of one head of one sequence (a chain), or a segment of it, and goes
through it in chunks of 64 tokens with the state in registers. Its warpgroups are joined by mbarriers only:

    0            one thread starts all bulk copies: x, B, C in, ``stages`` chunks ahead (and AHEAD chunks before that, into the L2), and
                 y out; ``nf`` warps make the per-token factors from dt, and w x
    1 .. SW      hold the state: leave a rounded copy of it in a ring, then state = 2^end state + (w x)^T B
    SW+1 ..      take chunks in turn: y = 2^cum C state^T + (C B^T . decays . dt) x

With ``parts`` > 1 a chain is several CTAs: its segments, the first of ``first_chunks`` chunks and the others of ``seg_chunks``, and with
SCOUTS one that goes ahead and makes the state only. The state at a segment's start comes through ``carry`` from the scout, else from
the segment before; ``sync`` (zero at launch) holds a ticket, which orders CTAs, and a flag for each warp that holds state. The bits do
not depend on it. float16 operands made here are scaled by powers of two, so that large ones keep float32's range; those below 2^-14
lose digits, as any float16 does. docs/kernels.md has the measurements behind these choices.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = {**k.PASS_CONFIGS, "tl.disable_shared_memory_reuse": True}

#: Read only where ``flags`` says that they are given.
OPTIONAL = ("D", "carry", "cu_seqlens", "dt_bias", "initial_states", "sync", "z")


def regs(name: str, count: int, start: int = 0) -> str:
    return ", ".join(f'"+f"({name}[{i}])' for i in range(start, start + count))


def operands(count: int, start: int = 0) -> str:
    return "{" + ", ".join(f"%{i}" for i in range(start, start + count)) + "}"


def mma(n: int, ty: str) -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ty}.{ty} {operands(n // 2)}"


def wgmma_ss(n: int, ty: str, ta: int, tb: int) -> str:
    """d (64 x n) (+)= A (64 x 16, shared) B (16 x n, shared)."""
    c = n // 2
    return f"""
DI void ssd_wgmma_ss_{n}_{ta}{tb}(float* d, unsigned long long a, unsigned long long b, int acc) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{c + 2}, 0; {mma(n, ty)}, %{c}, %{c + 1}, p, 1, 1, {ta}, {tb}; }}"
    : {regs("d", c)} : "l"(a), "l"(b), "r"(acc));
}}"""


def wgmma_rs(n: int, ty: str, tb: int) -> str:
    """d (64 x n) += A (64 x 16, registers) B (16 x n, shared)."""
    c = n // 2
    return f"""
DI void ssd_wgmma_rs_{n}_{tb}(float* d, unsigned* a, unsigned long long b) {{
  asm volatile("{mma(n, ty)}, {{%{c}, %{c + 1}, %{c + 2}, %{c + 3}}}, %{c + 4}, 1, 1, 1, {tb};"
    : {regs("d", c)} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}"""


COMMON = r"""
#define DI static __device__ __forceinline__
DI unsigned ssd_smem(void* p) { return (unsigned)__cvta_generic_to_shared(p); }
DI void ssd_bar_init(unsigned bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}
DI void ssd_bars_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); __syncthreads(); }
DI void ssd_wait(unsigned bar, int parity) {
  unsigned done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
DI void ssd_arrive(unsigned bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
// One arrival per warp; what its lanes did before is ordered by the warp barrier.
DI void ssd_arrive_times(unsigned bar, int times) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(times) : "memory");
}
DI void ssd_arrive_warp(unsigned bar) { __syncwarp(); if ((threadIdx.x & 31) == 0) ssd_arrive(bar); }
// Plain stores use the generic proxy, wgmma and bulk copies the async one.
DI void ssd_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DI void ssd_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DI void ssd_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
#define SSD_WAIT(n) asm volatile("wgmma.wait_group.sync.aligned " #n ";" ::: "memory")
// After a wait: keeps the compiler from reading sums, or reusing operands, of a product that was still running.
DI void ssd_landed(float* d, int n) {
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
// A use (never made: never is 0) of an A operand after the wait: ptxas may hand its registers out while the product still reads them.
DI void ssd_held(unsigned* a, int n, int never) {
#pragma unroll
  for (int i = 0; i < n; i += 4)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; @p st.shared.v4.b32 [%5], {%0, %1, %2, %3}; }"
      :: "r"(a[i]), "r"(a[i + 1]), "r"(a[i + 2]), "r"(a[i + 3]), "r"(never), "r"(0) : "memory");
}
// v where ``real``, else 0, by a selection and not by a branch around v.
DI float ssd_if(bool real, float v) {
  float r;
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; selp.f32 %0, %2, 0f00000000, p; }" : "=f"(r) : "r"((int)real), "f"(v));
  return r;
}
DI float ssd_exp2(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
// 128-byte swizzle; lead: bytes between 64-element panels (MN-major operands); 8-row groups are 1024 bytes apart.
DI unsigned ssd_desc_low(unsigned addr, unsigned lead) { return (addr >> 4) | ((lead >> 4) << 16); }
DI unsigned long long ssd_desc(unsigned low, unsigned bytes) {
  return (unsigned long long)(low + (bytes >> 4)) | ((unsigned long long)(64u | (1u << 30)) << 32);
}
// x and w x, tokens 16 kk to 16 kk + 15: one panel of 64 columns; with 80 rows panels of 16, 32-byte swizzle, 8-row groups 256 bytes apart.
#if TAIL
DI unsigned ssd_lead() { return 2048; }
DI unsigned long long ssd_desc_x(unsigned low, int kk) {
  return (unsigned long long)(low + kk * 32) | ((unsigned long long)(16u | (3u << 30)) << 32);
}
#else
DI unsigned ssd_lead() { return 8192; }
DI unsigned long long ssd_desc_x(unsigned low, int kk) { return ssd_desc(low, kk * 2048); }
#endif
DI float4 ssd_lds4(unsigned a) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a));
  return v;
}
DI float ssd_lds(unsigned a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a)); return v; }
// Global memory, 0 where not real. Not through the read-only path, which takes memory for constant as long as a kernel lasts: this one
// may be there before the one that writes its inputs has ended.
DI unsigned ssd_word(const void* p, bool real) {
  unsigned v = 0;
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.b32 %0, [%1]; }" : "+r"(v) : "l"(p), "r"((int)real));
  return v;
}
DI float ssd_get(const float* p, bool real = true) { return __uint_as_float(ssd_word(p, real)); }
DI int ssd_get(const int* p) { return (int)ssd_word(p, true); }
DI float2 ssd_get2(const float* p) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}
// Waits until what is before this kernel in the stream has ended and its writes are seen; then the next kernel may come.
DI void ssd_begin() { asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory"); }
DI void ssd_sts2(unsigned a, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(a), "f"(x), "f"(y) : "memory"); }
DI void ssd_sts4(unsigned a, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
DI uint4 ssd_ldsu(unsigned a) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
DI void ssd_stsu(unsigned a, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DI void ssd_sts1(unsigned a, unsigned v) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(a), "r"(v) : "memory"); }
DI void ssd_ldsm(unsigned* a, unsigned addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(addr) : "memory");
}
// v, but not known to be: what is computed from it stays where it is needed, in no register before.
DI int ssd_here(int v) { asm volatile("" : "+r"(v)); return v; }
DI long long ssd_here64(long long v) { asm volatile("" : "+l"(v)); return v; }
// With 80 rows or N > 128 registers are short: no address is kept that can be made from the lane.
#if TAIL || NT > 128
#define SSD_LANE ssd_here(threadIdx.x & 31)
#else
#define SSD_LANE (threadIdx.x & 31)
#endif
DI int ssd_warp() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
DI void ssd_zero(float* a, int n) {
#pragma unroll
  for (int i = 0; i < n; i++) a[i] = 0.f;
}
"""

BF16 = r"""
DI float ssd_lo(unsigned v) { return __uint_as_float(v << 16); }
DI float ssd_hi(unsigned v) { return __uint_as_float(v & 0xffff0000u); }
DI unsigned ssd_pack(float lo, float hi) { unsigned r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
"""

FP16 = r"""
DI float ssd_lo(unsigned v) { float r; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(r) : "r"(v)); return r; }
DI float ssd_hi(unsigned v) { float r; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(v)); return r; }
DI unsigned ssd_pack(float lo, float hi) { unsigned r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
"""

BODY = r"""
// fp16 ends at 65504: products' operands made here are scaled by powers of two where they would not fit.
// 2^-e with |v| 2^-e < 2^15, 1 where v is small.
DI float ssd_down(float v) {
  int e = (__float_as_int(v) >> 23) & 255;
  return e < 127 + 15 ? 1.f : __int_as_float((127 + 127 + 14 - e) << 23);
}
// Whether a lane of the warp has a value that does not fit as it is, or NaN.
DI bool ssd_large(float v) { return __any_sync(0xffffffffu, !(v < 32768.f)); }
// The largest magnitude of n values (a multiple of 4), in four chains.
DI float ssd_top(const float* v, int n) {
  float t[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < n; i++) t[i % 4] = fmaxf(t[i % 4], fabsf(v[i]));
  return fmaxf(fmaxf(t[0], t[1]), fmaxf(t[2], t[3]));
}
DI float ssd_inverse(float p) { return __int_as_float((254 << 23) - __float_as_int(p)); }
// ---- loader: 64 rows x 64 columns by the bulk copy engine, zeros past the tensor's end
template <typename D>
DI void ssd_tile(const D& map, unsigned dst, unsigned bar, int column, int head, int row, int batch, unsigned long long policy) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
    :: "r"(dst), "l"((unsigned long long)&map), "r"(bar), "r"(column), "r"(head), "r"(row), "r"(batch), "l"(policy) : "memory");
}
// the same of ROWS columns of x, in panels of 16
template <typename D>
DI void ssd_panels(const D& map, unsigned dst, unsigned bar, int head, int row, int batch, unsigned long long policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1, {%3, %4, %3, %5, %6}], [%2], %7;"
    :: "r"(dst), "l"((unsigned long long)&map), "r"(bar), "r"(0), "r"(row), "r"(head), "r"(batch), "l"(policy) : "memory");
}
// into the L2 only, so that a load of it later takes less
template <typename D>
DI void ssd_tile_ahead(const D& map, int column, int head, int row, int batch, unsigned long long policy) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.L2::cache_hint [%0, {%1, %2, %3, %4}], %5;"
    :: "l"((unsigned long long)&map), "r"(column), "r"(head), "r"(row), "r"(batch), "l"(policy) : "memory");
}
template <typename D> DI void ssd_panels_ahead(const D& map, int head, int row, int batch, unsigned long long policy) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.L2::cache_hint [%0, {%1, %2, %1, %3, %4}], %5;"
    :: "l"((unsigned long long)&map), "r"(0), "r"(row), "r"(head), "r"(batch), "l"(policy) : "memory");
}
DI void ssd_expect(unsigned bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
DI int ssd_done(unsigned bar, int parity) {
  unsigned done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
    : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
#define SSD_ONCE 0x12F0000000000000ull  // L2 policy evict_first
// ---- factor warps: a lane holds tokens 2*lane, 2*lane+1; rows: tokens that exist
DI void ssd_dt_load(float* v, const float* dt, long long pitch, int rows) {
  int lane = threadIdx.x & 31;
  v[0] = ssd_get(dt + (2 * lane) * pitch, 2 * lane < rows);
  v[1] = ssd_get(dt + (2 * lane + 1) * pitch, 2 * lane + 1 < rows);
}
DI float ssd_dt_value(float v, float bias, float lo, float hi, int softplus) {
  v += bias;
  if (softplus) v = v > 20.f ? v : log1pf(expf(v));
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}
// f: cum, dt of both tokens, w = dt * 2^(end-cum) of both, 2^end, with fp16, from ssd_fit, what w was scaled by and its inverse, and
// for y's warps w = 1, 2, 3 dt * 2^(cum_16w - cum) of both.
DI void ssd_factors(float* f, const float* raw, float bias, float a, float lo, float hi, int softplus, int rows) {
  int lane = threadIdx.x & 31;
  float d0 = 2 * lane < rows ? ssd_dt_value(raw[0], bias, lo, hi, softplus) : 0.f;
  float d1 = 2 * lane + 1 < rows ? ssd_dt_value(raw[1], bias, lo, hi, softplus) : 0.f;
  // 2^-160 is 0 in float32 already: a larger magnitude changes no decay, but would cost the cumsum its digits (or be inf).
  float a0 = d0 == 0.f ? 0.f : fmaxf(d0 * a, -160.f), a1 = d1 == 0.f ? 0.f : fmaxf(d1 * a, -160.f);
  float sum = a0 + a1;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    float up = __shfl_up_sync(0xffffffffu, sum, o);
    if (lane >= o) sum += up;
  }
  float before = __shfl_up_sync(0xffffffffu, sum, 1);
  float c0 = (lane == 0 ? 0.f : before) + a0, c1 = sum, end = __shfl_sync(0xffffffffu, sum, 31);
  float w0 = d0 * ssd_exp2(fminf(end - c0, 0.f)), w1 = d1 * ssd_exp2(fminf(end - c1, 0.f));
  f[6] = ssd_exp2(fminf(end, 0.f));
  f[0] = c0; f[1] = d0; f[2] = c1; f[3] = d1; f[4] = w0; f[5] = w1;
#pragma unroll
  for (int w = 1; w < 4; w++) {
    float from = __shfl_sync(0xffffffffu, c0, 8 * w);
    f[7 + 2 * w] = d0 * ssd_exp2(fminf(from - c0, 0.f)); f[8 + 2 * w] = d1 * ssd_exp2(fminf(from - c1, 0.f));
  }
}
#if SAFE
DI float ssd_largest(float m, uint4 v) {
  m = fmaxf(m, fmaxf(fmaxf(fabsf(ssd_lo(v.x)), fabsf(ssd_hi(v.x))), fmaxf(fabsf(ssd_lo(v.y)), fabsf(ssd_hi(v.y)))));
  return fmaxf(m, fmaxf(fmaxf(fabsf(ssd_lo(v.z)), fabsf(ssd_hi(v.z))), fmaxf(fabsf(ssd_lo(v.w)), fabsf(ssd_hi(v.w)))));
}
// Scales w by a power of two so that w and w x fit. Where every |w| < 1 they do; else the rows of x say how large w x is, so that a
// token that adds nothing does not cost the others their digits.
DI void ssd_fit(float* f, unsigned xs) {
  int lane = threadIdx.x & 31;
  f[7] = f[8] = 1.f;
  if (!__any_sync(0xffffffffu, !(fmaxf(fabsf(f[4]), fabsf(f[5])) < 1.f))) return;
  float top = 0.f;
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    int row = 2 * lane + i;
    float m = 0.f;
#pragma unroll 1
    for (int k = 0; k < ROWS / 8; k++)
      m = ssd_largest(m, ssd_ldsu(TAIL ? xs + k / 2 * 2048 + row * 32 + k % 2 * 16 : xs + row * 128 + ((k ^ (lane & 7)) << 4)));
    float w = i ? f[5] : f[4];
    if (m == 0.f) w *= 0.f;
    if (i) f[5] = w; else f[4] = w;
    top = fmaxf(top, fabsf(w) * fminf(fmaxf(m, 1.f), 65504.f));  // inf in x is no reason to make the others 0
  }
#pragma unroll
  for (int o = 1; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
  float down = ssd_down(top);
  f[4] *= down; f[5] *= down;
  f[7] = down; f[8] = ssd_inverse(down);
}
#endif
// v * w in two steps, with w = high + low: rounded once, as if w had the digits of both.
DI unsigned ssd_scaled(unsigned v, unsigned high, unsigned low) {
  unsigned r;
  asm("{ .reg .b32 t; mul.rn." SSD_PAIR " t, %1, %3; fma.rn." SSD_PAIR " %0, %1, %2, t; }" : "=r"(r) : "r"(v), "r"(high), "r"(low));
  return r;
}
DI void ssd_keep(unsigned dst, const float* f) {
  int lane = threadIdx.x & 31;
  ssd_sts4(dst + 16 * lane, f[0], f[1], f[2], f[3]);
  if (lane == 0) ssd_sts4(dst + 512, f[6], SAFE ? f[7] : 0.f, SAFE ? f[8] : 0.f, 0.f);
  // For y's warp w, tokens s < 16w: 16k+2t, +1, +8, +9 side by side, as a lane takes them.
  unsigned place = dst + 528 + lane / 8 * 64 + (lane & 3) * 16 + (lane & 4) * 2;
#pragma unroll
  for (int w = 1; w < 4; w++)
    if (lane < 8 * w) ssd_sts2(place + w * (w - 1) * 32, f[7 + 2 * w], f[8 + 2 * w]);
}
#if TAIL
// w x, in panels of 16 columns like x. Lanes take the 16-byte pieces of their rows in different orders, for the banks.
DI void ssd_weigh(unsigned xs, unsigned xw, const float* f) {
  int lane = threadIdx.x & 31, order = lane >> 1 & 3;
  unsigned high[2], low[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float w = i == order / 2 ? f[4] : f[5];
    high[i] = ssd_pack(w, w); low[i] = ssd_pack(w - ssd_lo(high[i]), w - ssd_lo(high[i]));
  }
#pragma unroll
  for (int k = 0; k < ROWS / 16; k++) {
    unsigned at = k * 2048 + lane * 64;
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = ssd_ldsu(xs + at + ((j ^ order) << 4));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned h = high[j / 2], l = low[j / 2];
      ssd_stsu(xw + at + ((j ^ order) << 4),
        make_uint4(ssd_scaled(v[j].x, h, l), ssd_scaled(v[j].y, h, l), ssd_scaled(v[j].z, h, l), ssd_scaled(v[j].w, h, l)));
    }
  }
}
#else
// w x beside x, all loads before the first store. Lanes take the 16-byte pieces of their rows in different orders, for the banks.
DI void ssd_weigh(unsigned xs, unsigned xw, const float* f) {
  int lane = threadIdx.x & 31;
  uint4 v[16];
#pragma unroll
  for (int k = 0; k < 16; k++) v[k] = ssd_ldsu(xs + (2 * lane + k / 8) * 128 + ((k % 8 ^ (lane & 7)) << 4));
#pragma unroll
  for (int k = 0; k < 16; k++) {
    float w = f[4 + k / 8];
    unsigned high = ssd_pack(w, w), low = ssd_pack(w - ssd_lo(high), w - ssd_lo(high));
    uint4 o = make_uint4(ssd_scaled(v[k].x, high, low), ssd_scaled(v[k].y, high, low), ssd_scaled(v[k].z, high, low),
                         ssd_scaled(v[k].w, high, low));
    ssd_stsu(xw + (2 * lane + k / 8) * 128 + ((k % 8 ^ (lane & 7)) << 4), o);
  }
}
#endif
// Rows of x and B from ``rows`` on belong to the next sequence: whatever is there (NaN) must not be multiplied, not even by 0.
DI void ssd_absent(unsigned xs, unsigned bs, int rows) {
  for (int i = rows * 8 + (threadIdx.x & 31); i < 512; i += 32) {
    if (!TAIL) ssd_stsu(xs + i * 16, make_uint4(0, 0, 0, 0));
#pragma unroll
    for (int j = 0; j < NT / 64; j++) ssd_stsu(bs + j * 8192 + i * 16, make_uint4(0, 0, 0, 0));
  }
#if TAIL
  for (int i = rows * 2 + (threadIdx.x & 31); i < 128; i += 32)
    for (int j = 0; j < ROWS / 16; j++) ssd_stsu(xs + j * 2048 + i * 16, make_uint4(0, 0, 0, 0));
#endif
  __syncwarp();
}
// ---- state warps: thread (g, t) of warp w holds state[16w+g (+8)][8j+2t (+1)]. Rows 64 to 79 (the tail) are made transposed, as
// B^T (w x): behind the others it holds state[64+8j+2t (+1)][64i+16w+g (+8)].
// The state, rounded, for the y warps; with fp16 each warp's 16 rows are scaled by a power of two, whose inverse goes to scales[w].
DI void ssd_state_handoff(unsigned slot, float* acc, int w, float held, unsigned scales, unsigned shared_tops, int part) {
  int lane = threadIdx.x & 31;
  int p = 16 * w + ((lane >> 3) & 1) * 8 + (lane & 7), hi = lane >> 4;
  unsigned row = slot + p * 128;
  float f = 1.f;
#if SAFE
  float top = ssd_top(acc, NS / 2);
  if (SW > 1 || ssd_large(top))
#pragma unroll
    for (int o = 1; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
#if SW > 1
  // Every part of a row takes the same scale. Two barriers: the tops are read before the next chunk's are written.
  if (lane == 0) asm volatile("st.shared.f32 [%0], %1;" :: "r"(shared_tops + (part * 4 + w) * 4), "f"(top) : "memory");
  asm volatile("bar.sync 1, %0;" :: "n"(SW * 128) : "memory");
  for (int i = 0; i < SW; i++) top = fmaxf(top, ssd_lds(shared_tops + (i * 4 + w) * 4));
  asm volatile("bar.sync 1, %0;" :: "n"(SW * 128) : "memory");
#endif
  f = ssd_down(top);
  if (lane == 0 && part == 0) asm volatile("st.shared.f32 [%0], %1;" :: "r"(scales + w * 4), "f"(ssd_inverse(f) * held) : "memory");
#endif
#pragma unroll
  for (int i = 0; i < NS / 16; i++) {
    int ch = 2 * i + hi;
    unsigned addr = row + (ch >> 3) * (ROWS * 128) + (((ch & 7) ^ (p & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(addr),
      "r"(ssd_pack(acc[8 * i] * f, acc[8 * i + 1] * f)), "r"(ssd_pack(acc[8 * i + 2] * f, acc[8 * i + 3] * f)),
      "r"(ssd_pack(acc[8 * i + 4] * f, acc[8 * i + 5] * f)), "r"(ssd_pack(acc[8 * i + 6] * f, acc[8 * i + 7] * f)) : "memory");
  }
}
#if TAIL
// The same for the tail, whose rows every warp has a part of: with fp16 one scale for all of them, after the others' in scales.
DI void ssd_tail_handoff(unsigned slot, float* acc, int w, float held, unsigned scales, unsigned shared_tops) {
  int lane = threadIdx.x & 31, p = 64 + (lane >> 4) * 8 + (lane & 7);
  unsigned row = slot + p * 128 + (((2 * w + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  float f = 1.f;
#if SAFE
  float top = ssd_top(acc, NS / 8);
#pragma unroll
  for (int o = 1; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
  // One barrier is enough: each copy in the ring has tops of its own.
  if (lane == 0) asm volatile("st.shared.f32 [%0], %1;" :: "r"(shared_tops + w * 4), "f"(top) : "memory");
  asm volatile("bar.sync 1, 128;" ::: "memory");
  float4 tops = ssd_lds4(shared_tops);
  f = ssd_down(fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w)));
  if (lane == 0 && w == 0) asm volatile("st.shared.f32 [%0], %1;" :: "r"(scales + 16), "f"(ssd_inverse(f) * held) : "memory");
#endif
#pragma unroll
  for (int i = 0; i < NS / 64; i++)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(row + i * (ROWS * 128)),
      "r"(ssd_pack(acc[8 * i] * f, acc[8 * i + 1] * f)), "r"(ssd_pack(acc[8 * i + 2] * f, acc[8 * i + 3] * f)),
      "r"(ssd_pack(acc[8 * i + 4] * f, acc[8 * i + 5] * f)), "r"(ssd_pack(acc[8 * i + 6] * f, acc[8 * i + 7] * f)) : "memory");
}
DI int ssd_tail_row(int i) { return 2 * (i & 4) + 2 * (threadIdx.x & 3) + (i & 1); }
DI int ssd_tail_column(int w, int i) { return 64 * (i / 8) + 16 * w + 4 * (i & 2) + (threadIdx.x & 31) / 4; }
DI void ssd_tail_read(float* acc, const float* src, int w, int rows, int cols) {
#pragma unroll
  for (int i = 0; i < NS / 8; i++) {
    int p = ssd_tail_row(i), n = ssd_tail_column(w, i);
    if (p < rows && n < cols) acc[i] = ssd_get(src + p * NREAL + n);
  }
}
DI void ssd_tail_write(float* dst, float* acc, int w, int rows, int cols) {
#pragma unroll
  for (int i = 0; i < NS / 8; i++) {
    int p = ssd_tail_row(i), n = ssd_tail_column(w, i);
    if (p < rows && n < cols) dst[p * NREAL + n] = acc[i];
  }
}
#endif
// v[0]: what the state is to be multiplied by, 2^end. With fp16 it is held times what w of the chunk before was scaled by, whose
// inverse is v[1], and comes to that of this one.
DI void ssd_ends(float* v, unsigned scal) {
#if SAFE
  float4 f = ssd_lds4(scal + 512);
  v[0] = f.x * (f.y * v[1]); v[1] = f.z;
#else
  v[0] = ssd_lds(scal + 512);
#endif
}
DI void ssd_scale(float* acc, float v, int n) {
#pragma unroll
  for (int i = 0; i < n; i++) acc[i] *= v;
}
DI void ssd_state_update(float* acc, unsigned xw, unsigned bs) {
  unsigned la = ssd_desc_low(xw, ssd_lead()), lb = ssd_desc_low(bs, 8192);
  ssd_wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; kk++) SSD_STATE_MMA(acc, ssd_desc_x(la, kk), ssd_desc(lb, kk * 2048), 1);
#if TAIL
#pragma unroll
  for (int i = 0; i < NS / 64; i++)
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
      ssd_wgmma_ss_16_11(acc + NS / 2 + 8 * i, ssd_desc(lb, i * 8192 + kk * 2048), ssd_desc_x(la + 512, kk), 1);
#endif
  ssd_wgmma_commit();
}
// rows (d_head) and columns (d_state) beyond the real ones are not touched
DI void ssd_state_read(float* acc, const float* src, int w, int rows, int cols) {
  int lane = threadIdx.x & 31, p = 16 * w + lane / 4;
#pragma unroll
  for (int j = 0; j < NS / 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (p + 8 * i < rows && 8 * j < cols) {
        float2 v = ssd_get2(src + (p + 8 * i) * NREAL + 8 * j + 2 * (lane & 3));
        acc[4 * j + 2 * i] = v.x; acc[4 * j + 2 * i + 1] = v.y;
      }
}
DI void ssd_state_write(float* dst, float* acc, int w, int rows, int cols) {
  int lane = threadIdx.x & 31, p = 16 * w + lane / 4;
#pragma unroll
  for (int j = 0; j < NS / 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (p + 8 * i < rows && 8 * j < cols)
        *(float2*)(dst + (p + 8 * i) * NREAL + 8 * j + 2 * (lane & 3)) = make_float2(acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
}
// The state goes from one segment to the next in the registers' order; one flag a warp, since a warp reads what the same warp wrote.
DI void ssd_carry_out(float* dst, float* acc, int* flag, int value) {
  float4* d = (float4*)dst + (threadIdx.x & 127);
#pragma unroll
  for (int i = 0; i < NA / 4; i++) d[i * 128] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
  __threadfence();
  __syncwarp();
  if ((threadIdx.x & 31) == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
}
DI void ssd_carry_in(float* acc, const float* src, const int* flag, int value) {
  int got;
  do { asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(got) : "l"(flag) : "memory"); } while (got < value);
  const float4* s = (const float4*)src + (threadIdx.x & 127);
#pragma unroll
  for (int i = 0; i < NA / 4; i++) {
    float4 v = __ldcg(s + i * 128);
    acc[4 * i] = v.x; acc[4 * i + 1] = v.y; acc[4 * i + 2] = v.z; acc[4 * i + 3] = v.w;
  }
}
DI int ssd_ticket(int* counter, unsigned scratch) {
  int v;
  if (threadIdx.x == 0) { v = atomicAdd(counter, 1); asm volatile("st.shared.s32 [%0], %1;" :: "r"(scratch), "r"(v) : "memory"); }
  __syncthreads();
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(scratch) : "memory");
  __syncthreads();
  return v;
}
// ---- y warps: thread (g, t) of warp w holds rows 16w+g (+8), columns 8j+2t (+1)
DI void ssd_mma_kmajor(float* d, unsigned a, unsigned b) {  // d = A B^T over NT
  unsigned la = ssd_desc_low(a, 16), lb = ssd_desc_low(b, 16);
  ssd_wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < NT / 16; kk++) {
    if (NT > 128 && kk % 4 == 0) { la = ssd_here(la); lb = ssd_here(lb); }
    int at = (kk / 4) * 8192 + (kk % 4) * 32;
    ssd_wgmma_ss_64_00(d, ssd_desc(la, at), ssd_desc(lb, at), kk > 0);
  }
  ssd_wgmma_commit();
}
#if TAIL
DI void ssd_mma_copy(float* d, unsigned a, unsigned b) {  // the same with the ROWS rows of the state's copy
  unsigned la = ssd_desc_low(a, 16), lb = ssd_desc_low(b, 16);
  ssd_wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < NT / 16; kk++)
    SSD_COPY_MMA(d, ssd_desc(la, kk / 4 * 8192 + kk % 4 * 32), ssd_desc(lb, kk / 4 * (ROWS * 128) + kk % 4 * 32), kk > 0);
  ssd_wgmma_commit();
}
#else
#define ssd_mma_copy ssd_mma_kmajor
#endif
DI void ssd_mma_mx(float* d, unsigned* a, unsigned xs) {
  unsigned low = ssd_desc_low(xs, ssd_lead());
  ssd_wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; kk++) SSD_MX_MMA(d, a + 4 * kk, ssd_desc_x(low, kk));
  ssd_wgmma_commit();
}
// cum of this thread's two rows and of its warp's first one, and cum, dt of its diagonal columns.
DI void ssd_pairs(float* q, float* l, unsigned scal, int w) {
  int lane = threadIdx.x & 31, r = 16 * w + lane / 4;
  l[0] = ssd_lds(scal + r * 8); l[1] = ssd_lds(scal + (r + 8) * 8); l[2] = ssd_lds(scal + w * 128);
#pragma unroll
  for (int j = 0; j < 2; j++) *(float4*)(q + 4 * j) = ssd_lds4(scal + (2 * w + j) * 64 + (lane & 3) * 16);
#pragma unroll
  for (int i = 0; i < 3; i++) *(float4*)(q + 8 + 4 * i) = ssd_lds4(scal + 528 + w * (w - 1) * 32 + i * 64 + (lane & 3) * 16);
}
// M = CB * 2^(cum_l - cum_s) * dt_s for s <= l, as an operand. To the left of the warp's 16 diagonal columns the decay is that to the
// warp's first row times that from there. With fp16 each row is scaled by a power of two, left in scale.
DI void ssd_weights(unsigned* a, float* cb, const float* q, const float* l, int w, float* scale) {
  int lane = threadIdx.x & 31, keep = lane / 4 - 2 * (lane & 3);
  float e0 = ssd_exp2(fminf(l[0] - l[2], 0.f)), e1 = ssd_exp2(fminf(l[1] - l[2], 0.f));
#pragma unroll
  for (int i = 0; i < 4; i++) {  // 16 columns: below the diagonal, on it or above it
    float* c = cb + 8 * i;
    if (i < 3 && i < w) {
      const float* u = q + 8 + 4 * i;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        c[4 * j] *= u[2 * j] * e0; c[4 * j + 1] *= u[2 * j + 1] * e0;
        c[4 * j + 2] *= u[2 * j] * e1; c[4 * j + 3] *= u[2 * j + 1] * e1;
      }
    } else if (i == w) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float* u = q + 4 * j;
        float d0 = u[1] * ssd_exp2(fminf(l[0] - u[0], 0.f)), d1 = u[3] * ssd_exp2(fminf(l[0] - u[2], 0.f));
        float d2 = u[1] * ssd_exp2(fminf(l[1] - u[0], 0.f)), d3 = u[3] * ssd_exp2(fminf(l[1] - u[2], 0.f));
        c[4 * j] = ssd_if(8 * j <= keep, c[4 * j] * d0); c[4 * j + 1] = ssd_if(8 * j + 1 <= keep, c[4 * j + 1] * d1);
        c[4 * j + 2] = ssd_if(8 * j <= keep + 8, c[4 * j + 2] * d2); c[4 * j + 3] = ssd_if(8 * j + 1 <= keep + 8, c[4 * j + 3] * d3);
      }
    } else {
      ssd_zero(c, 8);
    }
#if !SAFE
#pragma unroll
    for (int j = 4 * i; j < 4 * i + 4; j++) a[j] = ssd_pack(cb[2 * j], cb[2 * j + 1]);
#endif
  }
#if SAFE
  float t0 = 0.f, t1 = 0.f;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    t0 = fmaxf(t0, fmaxf(fabsf(cb[4 * j]), fabsf(cb[4 * j + 1])));
    t1 = fmaxf(t1, fmaxf(fabsf(cb[4 * j + 2]), fabsf(cb[4 * j + 3])));
  }
  scale[0] = scale[1] = 1.f;
  if (ssd_large(fmaxf(t0, t1))) {
#pragma unroll
    for (int o = 1; o < 4; o *= 2) {
      t0 = fmaxf(t0, __shfl_xor_sync(0xffffffffu, t0, o));
      t1 = fmaxf(t1, __shfl_xor_sync(0xffffffffu, t1, o));
    }
    scale[0] = ssd_down(t0); scale[1] = ssd_down(t1);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      cb[4 * j] *= scale[0]; cb[4 * j + 1] *= scale[0]; cb[4 * j + 2] *= scale[1]; cb[4 * j + 3] *= scale[1];
    }
  }
#pragma unroll
  for (int j = 0; j < 16; j++) a[j] = ssd_pack(cb[2 * j], cb[2 * j + 1]);
#endif
}
// With fp16 what each 16 rows of the state's copy were scaled by.
DI void ssd_sides(float* f, unsigned scales) {
#if SAFE
  *(float4*)f = ssd_lds4(scales);
  f[4] = TAIL ? ssd_lds(scales + 16) : 1.f;
#endif
}
// Row l of C S^T takes 2^cum_l; with fp16 also the row's scale of M, and each 16 columns what the state was scaled by.
DI void ssd_rows_scale(float* d, const float* l, const float* scale, const float* f) {
  float e0 = ssd_exp2(fminf(l[0], 0.f)), e1 = ssd_exp2(fminf(l[1], 0.f));
#if SAFE
  e0 *= scale[0]; e1 *= scale[1];
#pragma unroll
  for (int j = 0; j < ROWS / 8; j++) {
    float f0 = e0 * f[j / 2], f1 = e1 * f[j / 2];
    d[4 * j] *= f0; d[4 * j + 1] *= f0; d[4 * j + 2] *= f1; d[4 * j + 3] *= f1;
  }
#else
#pragma unroll
  for (int j = 0; j < ROWS / 8; j++) { d[4 * j] *= e0; d[4 * j + 1] *= e0; d[4 * j + 2] *= e1; d[4 * j + 3] *= e1; }
#endif
}
DI void ssd_rows_unscale(float* d, const float* scale) {
#if SAFE
  if (__any_sync(0xffffffffu, fminf(scale[0], scale[1]) < 1.f)) {
    float f0 = ssd_inverse(scale[0]), f1 = ssd_inverse(scale[1]);
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) { d[4 * j] *= f0; d[4 * j + 1] *= f0; d[4 * j + 2] *= f1; d[4 * j + 3] *= f1; }
  }
#endif
}
// y += D x; D of head h is at D, its columns dp apart (0: one value a head); cols: columns that exist from here on
DI void ssd_skip(float* d, const float* D, int dp, unsigned xs, int w, int cols) {
  int lane = ssd_here(threadIdx.x & 31), row = 16 * w + (lane & 15);
  dp = ssd_here(dp);
  D += 2 * (lane & 3) * dp;
#pragma unroll
  for (int i = 0; i < ROWS / 16; i++) {
    unsigned x[4];  // rows g, g + 8 of tile 2i, then of 2i + 1
    if (!TAIL) ssd_ldsm(x, xs + row * 128 + (((2 * i + (lane >> 4)) ^ (row & 7)) << 4));
    else ssd_ldsm(x, xs + i * 2048 + row * 32 + (((lane >> 4) ^ (row >> 2 & 1)) << 4));
#pragma unroll
    for (int k = 0; k < 2; k++, D += 8 * dp) {
      float* o = d + 8 * i + 4 * k;
      float u = 0.f, v = 0.f;
      if (16 * i < cols) { u = ssd_get(D); v = ssd_get(D + dp); }
      o[0] += u * ssd_lo(x[2 * k]); o[1] += v * ssd_hi(x[2 * k]);
      o[2] += u * ssd_lo(x[2 * k + 1]); o[3] += v * ssd_hi(x[2 * k + 1]);
    }
  }
}
DI void ssd_gate_load(unsigned* u, const void* z, long long pitch, int w, int rows, int cols) {
  int lane = ssd_here(threadIdx.x & 31), r = 16 * w + lane / 4;
  pitch = ssd_here64(pitch);
  const char* a = (const char*)z + 2 * (r * pitch + 2 * (lane & 3)); const char* b = a + 16 * pitch;
#pragma unroll
  for (int i = 0; i < ROWS / 8; i++) {
    u[2 * i] = ssd_word(a + 16 * i, r < rows && 8 * i < cols);
    u[2 * i + 1] = ssd_word(b + 16 * i, r + 8 < rows && 8 * i < cols);
  }
}
DI float ssd_silu(float v) { return __fdividef(v, 1.f + ssd_exp2(-1.4426950408889634f * v)); }
DI void ssd_gate(float* d, const unsigned* u) {
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) { d[2 * i] *= ssd_silu(ssd_lo(u[i])); d[2 * i + 1] *= ssd_silu(ssd_hi(u[i])); }
}
DI void ssd_gate_ahead(const void* z, long long pitch, int rows) {
  for (int r = threadIdx.x & 31; r < 64; r += 32)
    if (r < rows) {
      asm volatile("prefetch.global.L2 [%0];" :: "l"((const char*)z + 2 * r * pitch));
      if (TAIL) asm volatile("prefetch.global.L2 [%0];" :: "l"((const char*)z + 2 * r * pitch + 128));
    }
}
// A warp's 16 rows x 64 columns go to shared memory as swizzled boxes of 128-byte rows, and from there to y in the background; rows
// and columns outside y are dropped. In float32, lanes of odd g store tiles j and j + 2 in the other order (else two rows of a
// half-warp meet in the same banks): ssd_y_take puts a thread's values in that order.
#if Y32
DI void ssd_y_take(float* v, const float* d) {
  int odd = SSD_LANE & 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float* a = d + (i / 2 * 16 + i % 2 * 4); const float* b = a + 8;
#pragma unroll
    for (int k = 0; k < 4; k++) { v[8 * i + k] = odd ? b[k] : a[k]; v[8 * i + 4 + k] = odd ? a[k] : b[k]; }
  }
}
DI void ssd_y_stage(const float* v, unsigned mine) {
  int lane = SSD_LANE, t = lane & 3, g = lane / 4;
  unsigned at = mine + g * 128 + (t & 1) * 8 + (((t / 2) ^ g ^ (g & 1) * 4) << 4);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned o = (at ^ (i % 2) * 32) + (i / 2) * 8192;
    const float* u = v + 8 * i;
    ssd_sts2(o, u[0], u[1]); ssd_sts2(o + 1024, u[2], u[3]); ssd_sts2(o ^ 64, u[4], u[5]); ssd_sts2((o ^ 64) + 1024, u[6], u[7]);
  }
}
#else
DI void ssd_y_take(unsigned* v, const float* d) {
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = ssd_pack(d[2 * i], d[2 * i + 1]);
}
DI void ssd_y_stage(const unsigned* v, unsigned mine) {
  int lane = SSD_LANE, g = lane / 4;
#pragma unroll
  for (int i = 0; i < 16; i++) ssd_sts1(mine + (g + 8 * (i & 1)) * 128 + (((i / 2) ^ g) << 4) + (lane & 3) * 4, v[i]);
}
#endif
#if TAIL
// The tail is the first 16 columns of one box more; the others lie outside of y.
DI void ssd_tail_stage(const float* d, unsigned mine) {
  int lane = ssd_here(threadIdx.x & 31), t = lane & 3, g = lane / 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {  // rows g, g + 8 of 8 columns, then of the next 8
    unsigned at = mine + (g + 8 * (i & 1)) * 128;
    if (Y32) ssd_sts2(at + (((i & 2) + t / 2) ^ g) * 16 + (t & 1) * 8, d[2 * i], d[2 * i + 1]);
    else ssd_sts1(at + ((i / 2) ^ g) * 16 + t * 4, ssd_pack(d[2 * i], d[2 * i + 1]));
  }
}
template <typename D> DI void ssd_tail_send(const D& map, unsigned tile, int column, int head, int row, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;"
    :: "l"((unsigned long long)&map), "r"(tile), "r"(column), "r"(head), "r"(row), "r"(batch), "l"(SSD_ONCE) : "memory");
}
#endif
// The same for rows that the next sequence's follow: only ``rows`` of them are written.
DI void ssd_y_plain(unsigned mine, void* y, long long pitch, int rows, int columns) {
  __syncwarp();
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < 128 * (1 + Y32); i += 32) {
    int row = i / 8 % 16, column = i / 128 * 32 + i % 8 * (Y32 ? 4 : 8);
    unsigned at = mine + i / 128 * 8192 + row * 128 + ((i % 8 ^ (row & 7)) << 4);
    if (row < rows && column < columns) *(uint4*)((char*)y + (row * pitch + column) * (Y32 ? 4 : 2)) = ssd_ldsu(at);
  }
}
template <typename D> DI void ssd_y_send(const D& map, unsigned tile, int column, int columns, int head, int row, int batch) {
#pragma unroll
  for (int i = 0; i < 1 + Y32; i++)
    if (column + 32 * i < columns)
      asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;"
        :: "l"((unsigned long long)&map), "r"(tile + i * 8192), "r"(column + 32 * i), "r"(head), "r"(row), "r"(batch), "l"(SSD_ONCE)
        : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
DI void ssd_y_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// The four warps read the whole copy of the state, each at its own pace; after this none does.
DI void ssd_y_together(int id) { asm volatile("bar.sync %0, 128;" :: "r"(id) : "memory"); }
DI void ssd_y_finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""

#: Chunks by which what is to be loaded is fetched into the L2.
AHEAD = 4


def do(name: str, *args: Any) -> Any:
    return T.evaluate(T.call_extern("handle", name, *args))


def get(dtype: str, element: Any) -> Any:
    return T.call_extern(dtype, "ssd_get", T.address_of(element))


#: Bits of ``flags``.
SOFTPLUS, BIAS, INITIAL, SKIP, GATE, PACKED, SCOUTS, ALWAYS = (1 << i for i in range(8))


def tile_rows(P: int, N: int) -> int:
    """Rows of d_head that a CTA makes; further CTAs make the others. ops/_fused.py has the same rule."""
    return 80 if 64 < P <= 80 and N <= 128 else 64


def program(*, P: int, N: int, dtype: str, y_float32: bool) -> Any:
    NT = 64 if N <= 64 else 128 if N <= 128 else 256
    safe = dtype == "float16"
    SW = max(1, NT // 128)  # state warpgroups, each with NS columns of the state
    NS = NT // SW
    rows = tile_rows(P, N)
    wide = rows > 64  # then one CTA makes them all
    slices = k.ceildiv(P, rows)
    NA = NS * rows // 128  # sums of the state that a thread holds
    ny = {64: 2, 128: 2, 256: 1}[NT]  # y warpgroups, which take chunks in turn
    stages = {64: 4, 128: 4, 256: 2}[NT]
    nf = {64: 3, 128: 3, 256: 2}[NT]  # factor warps, which take chunks in turn; two stages let no third one wait for its own
    ring = 2  # copies of the state on their way to y
    slots = 4 if wide else {64: 4, 128: 3, 256: 2}[NT]  # chunks whose factors are kept
    # A stage: x, w x, B, C (whose rows y takes later, so it has 16384 bytes at least).
    x_bytes, C_bytes = rows * 128, max(NT * 128, 16384)
    o_xw, o_B, o_C = x_bytes, 2 * x_bytes, 2 * x_bytes + NT * 128
    stage_bytes = o_C + C_bytes
    xw_places, xw_pitch, C_places, C_pitch = stages, stage_bytes, stages, stage_bytes
    o_ring = stages * stage_bytes
    if wide:
        # Four whole stages do not fit: x and B have four places, w x and C three each. y takes the places of B (64 columns) and x.
        o_B, stage_bytes = x_bytes, x_bytes + C_bytes
        o_xw, xw_places, xw_pitch = stages * stage_bytes, 3, x_bytes
        o_C, C_places, C_pitch = o_xw + xw_places * x_bytes, 3, C_bytes
        o_ring = o_C + C_places * C_bytes
    o_y = o_B if wide else o_C
    copy_bytes = NT * 2 * rows
    SC = 912  # cum, dt of each token; 2^end and fp16's scales; decays to the first rows of y's warps
    o_scal = o_ring + ring * copy_bytes
    o_side = o_scal + slots * SC  # fp16: scales of the state's copies, then tops of the state's parts
    side_bytes = 32 if wide else 16
    o_tops = o_side + ring * side_bytes
    o_full = o_tops + 64  # mbarriers: x and B landed; C landed; factors and w x made; x, w x and B read; y in place
    o_cfull, o_made, o_free, o_staged = (o_full + 8 * stages * i for i in range(1, 5))
    o_sfull = o_staged + 8 * stages  # a copy of the state left; read
    o_sfree = o_sfull + 8 * ring
    o_cfree = o_sfree + 8 * ring  # C read, where y takes another place
    total = o_cfree + 8 * C_places * wide + 16
    ty = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    values = {
        "SAFE": int(safe),
        "SW": SW,
        "NT": NT,
        "NS": NS,
        "NREAL": N,
        "NA": NA,
        "ROWS": rows,
        "TAIL": rows - 64,
        "Y32": int(y_float32),
        "SSD_PAIR": f'"{ty}x2"',
        "SSD_STATE_MMA": f"ssd_wgmma_ss_{NS}_11",
        "SSD_COPY_MMA": f"ssd_wgmma_ss_{rows}_00",
        "SSD_MX_MMA": f"ssd_wgmma_rs_{rows}_1",
    }
    source = "".join(f"#define {name} {value}\n" for name, value in values.items()) + COMMON + (FP16 if safe else BF16)
    source += wgmma_ss(64, ty, 0, 0) + wgmma_ss(NS, ty, 1, 1) + wgmma_rs(rows, ty, 1)
    if wide:
        source += wgmma_ss(rows, ty, 0, 0) + wgmma_ss(16, ty, 1, 1)
    source += BODY
    threads = 128 * (1 + SW + ny)
    once, keep = T.uint64(0x12F0000000000000), T.uint64(0x14F0000000000000)
    B, S, H, G, M, C = k.dims("B S H G M C")

    def tiles(t: Any, inner: int, heads: Any) -> Any:
        """Descriptor of 64 x 64 tiles (tokens x inner) of one head, 128-byte swizzle, 128-byte L2 promotion, zeros outside."""
        code = 6 if safe else 9  # CUtensorMapDataType
        pitches = [t.strides[d] * 2 for d in (2, 1, 0)]
        return T.create_tma_descriptor(code, 4, t.data, inner, heads, S, B, 2, *pitches, 64, 1, 64, 1, 1, 1, 1, 1, 0, 3, 2, 0)

    def panels(t: Any) -> Any:
        """Descriptor of the same tokens' ``rows`` columns of one head, in panels of 16, 32-byte swizzle."""
        code = 6 if safe else 9
        dims, pitches = (16, S, P // 16, H, B), (2, t.strides[1] * 2, 32, t.strides[2] * 2, t.strides[0] * 2)
        return T.create_tma_descriptor(code, 5, t.data, *dims, *pitches, 16, 64, rows // 16, 1, 1, 1, 1, 1, 1, 1, 0, 1, 2, 0)

    def out_tiles(t: Any) -> Any:
        """Descriptor of boxes of 64 tokens x 128 bytes of y, 128-byte swizzle."""
        size, code = (4, 7) if y_float32 else (2, 6 if safe else 9)
        row = T.cast(H, "int64") * (P * size)
        pitches = [T.int64(P * size), row, row * S]
        return T.create_tma_descriptor(code, 4, t.data, P, H, S, B, size, *pitches, 128 // size, 1, 64, 1, 1, 1, 1, 1, 0, 3, 2, 0)

    @T.prim_func
    def fused_main(
        x: k.strided("x", (B, S, H, P), dtype, 8),
        dt: k.strided("dt", (B, S, H), "float32"),
        A: T.Tensor((H,), "float32"),
        dt_bias: T.Tensor((H,), "float32"),
        Bm: k.strided("Bm", (B, S, G, N), dtype, 8),
        Cm: k.strided("Cm", (B, S, G, N), dtype, 8),
        D: k.strided("D", (H, P), "float32", last=True),
        z: k.strided("z", (B, S, H, P), dtype, 8),
        initial_states: T.Tensor((M, H, P, N), "float32"),
        cu_seqlens: T.Tensor((M + 1,), "int32"),
        carry: T.Tensor((C, SW * 128 * NA), "float32"),
        sync: T.Tensor((1 + M * H * slices * (SW * 4),), "int32"),
        y: T.Tensor((B, S, H, P), "float32" if y_float32 else dtype),
        final_states: T.Tensor((M, H, P, N), "float32"),
        dt_min: T.float32,
        dt_max: T.float32,
        parts: T.int32,
        first_chunks: T.int32,
        seg_chunks: T.int32,
        flags: T.int32,
    ):
        with T.Kernel(M * H * slices * parts, threads=threads) as bx:
            T.import_source(source)
            smem = T.alloc_shared((total,), "uint8", scope="shared.dyn")
            tx = T.get_thread_binding()
            base = T.alloc_var("uint32")
            base = T.call_extern("uint32", "ssd_smem", smem.access_ptr("rw"))
            if tx == 0:
                for i in T.serial(stages):
                    do("ssd_bar_init", base + o_full + 8 * i, 1)
                    do("ssd_bar_init", base + o_cfull + 8 * i, 1)
                    do("ssd_bar_init", base + o_made + 8 * i, 1)
                    do("ssd_bar_init", base + o_free + 8 * i, 4 * SW + (0 if wide else 4))
                    do("ssd_bar_init", base + o_staged + 8 * i, 4)
                if wide:
                    for i in T.serial(C_places):
                        do("ssd_bar_init", base + o_cfree + 8 * i, 4)
                for i in T.serial(ring):
                    do("ssd_bar_init", base + o_sfull + 8 * i, 4 * SW)
                    do("ssd_bar_init", base + o_sfree + 8 * i, 4)
            do("ssd_bars_ready")
            do("ssd_begin")
            item = T.alloc_var("int32", init=bx)
            if parts > 1:
                # Segments of a chain wait for what came before them, so items are taken in order, whatever order CTAs start in.
                item = T.call_extern("int32", "ssd_ticket", T.address_of(sync[0]), base + total - 16)
            chains = T.alloc_var("int32", init=M * H * slices)
            scouts = T.alloc_var("int32", init=T.if_then_else((flags & SCOUTS) != 0, 1, 0))
            scout = T.alloc_var("int32", init=T.if_then_else(item < chains * scouts, 1, 0))
            item = item + (scout - scouts) * chains
            seg = T.alloc_var("int32", init=T.truncdiv(item, chains))
            chain = T.alloc_var("int32", init=item - seg * chains)
            bh = T.alloc_var("int32", init=T.truncdiv(chain, slices))
            p0 = T.alloc_var("int32", init=(chain - bh * slices) * rows) if slices > 1 else 0
            row = T.alloc_var("int32", init=T.truncdiv(bh, H))  # of the states
            h = T.alloc_var("int32", init=bh - row * H)
            g = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(H, G)))
            b = T.alloc_var("int32", init=row)
            t0 = T.alloc_var("int32", init=0)  # the sequence's tokens are t0 .. t1 - 1 of row b
            t1 = T.alloc_var("int32", init=S)
            if (flags & PACKED) != 0:
                b = 0
                # Whatever the values are, tokens are those of x.
                t0 = T.max(T.min(get("int32", cu_seqlens[row]), S), 0)
                t1 = T.max(T.min(get("int32", cu_seqlens[row + 1]), S), t0)
            chunks = T.alloc_var("int32", init=T.truncdiv(t1 - t0 + 63, 64))
            segs = T.alloc_var("int32", init=1 + T.truncdiv(T.max(chunks - first_chunks, 0) + seg_chunks - 1, seg_chunks))
            begin = T.alloc_var("int32", init=T.if_then_else(seg > 0, first_chunks + (seg - 1) * seg_chunks, 0))
            length = T.alloc_var("int32", init=T.if_then_else(seg > 0, seg_chunks, first_chunks))
            count = T.alloc_var("int32", init=T.max(T.min(length, chunks - begin), 0))
            if scout > 0:
                count = T.if_then_else(segs > 1, first_chunks + (segs - 2) * seg_chunks, 0)
            t0 = t0 + begin * 64
            last = T.alloc_var("int32", init=T.if_then_else((scout == 0) & (seg + 1 == segs), 1, 0))
            warp = T.alloc_var("int32", init=0)
            warp = T.call_extern("int32", "ssd_warp")
            wg = T.alloc_var("int32", init=warp // 4)
            w = T.alloc_var("int32", init=warp % 4)

            if wg == 0:
                if tx == 96:  # the warp beside the y warps that have most to do
                    policy = T.alloc_var("uint64", init=T.if_then_else(scout > 0, keep, once))
                    # This thread starts every bulk copy, whichever can go on: x and B in, y out, then C (or x and B) in where y was.
                    cx = T.alloc_var("int32", init=0)
                    cc = T.alloc_var("int32", init=T.if_then_else(scout > 0, count, 0))
                    cy = T.alloc_var("int32", init=0)
                    # A chunk that the sequence ends in: the rows after it may be another sequence's, so the y warps write it.
                    sends = T.alloc_var("int32", init=T.if_then_else(scout > 0, 0, T.min(count, T.truncdiv(T.max(t1 - t0, 0), 64))))
                    ready = T.alloc_var("int32", init=0)
                    while (cx < count) | (cc < count) | (cy < sends):
                        sx = cx % stages
                        ready = 0
                        if cx < count:
                            ready = T.call_extern("int32", "ssd_done", base + o_free + 8 * sx, (cx // stages + 1) % 2)
                        if wide:
                            if (scout == 0) & (cx >= stages) & (cy <= cx - stages):
                                ready = 0
                        if ready > 0:
                            at = base + sx * stage_bytes
                            if wide:
                                do("ssd_y_read")
                            do("ssd_expect", base + o_full + 8 * sx, x_bytes + NT * 128)
                            if wide:
                                do("ssd_panels", panels(x), at, base + o_full + 8 * sx, h, t0 + cx * 64, b, policy)
                            else:
                                do("ssd_tile", tiles(x, P, H), at, base + o_full + 8 * sx, p0, h, t0 + cx * 64, b, policy)
                            for i in T.unroll(NT // 64):
                                do(
                                    "ssd_tile",
                                    tiles(Bm, N, G),
                                    at + o_B + i * 8192,
                                    base + o_full + 8 * sx,
                                    64 * i,
                                    g,
                                    t0 + cx * 64,
                                    b,
                                    keep,
                                )
                            if cx + AHEAD < count:
                                s1 = t0 + (cx + AHEAD) * 64
                                if wide:
                                    do("ssd_panels_ahead", panels(x), h, s1, b, policy)
                                else:
                                    do("ssd_tile_ahead", tiles(x, P, H), p0, h, s1, b, policy)
                                if ((h + cx) & 7) == 0:  # one in eight of the heads that share B and C
                                    for i in T.unroll(NT // 64):
                                        do("ssd_tile_ahead", tiles(Bm, N, G), 64 * i, g, s1, b, keep)
                                        do("ssd_tile_ahead", tiles(Cm, N, G), 64 * i, g, s1, b, keep)
                            cx = cx + 1
                        sc = cc % C_places
                        ready = 0
                        if wide:
                            if cc < count:
                                ready = T.call_extern("int32", "ssd_done", base + o_cfree + 8 * sc, (cc // C_places + 1) % 2)
                        elif (cc < count) & ((cc < stages) | (cy > cc - stages)):
                            ready = 1
                        if ready > 0:
                            if not wide:
                                do("ssd_y_read")
                            do("ssd_expect", base + o_cfull + 8 * sc, NT * 128)
                            for i in T.unroll(NT // 64):
                                to = base + sc * C_pitch + o_C + i * 8192
                                do("ssd_tile", tiles(Cm, N, G), to, base + o_cfull + 8 * sc, 64 * i, g, t0 + cc * 64, b, keep)
                            cc = cc + 1
                        sy = cy % stages
                        ready = 0
                        if cy < sends:
                            ready = T.call_extern("int32", "ssd_done", base + o_staged + 8 * sy, cy // stages % 2)
                        if ready > 0:
                            do("ssd_proxy_fence")  # for the y warps, whose arrival this follows
                            if wide:
                                do("ssd_tail_send", out_tiles(y), base + sy * stage_bytes, p0 + 64, h, t0 + cy * 64, b)
                            do("ssd_y_send", out_tiles(y), base + sy * stage_bytes + o_y, p0, P, h, t0 + cy * 64, b)
                            cy = cy + 1
                    do("ssd_y_finish")
                elif warp < nf:
                    raw = T.alloc_local((4,), "float32")
                    f = T.alloc_local((15,), "float32")
                    rate = T.alloc_var("float32", init=get("float32", A[h]) * k.LOG2E)
                    bias = T.alloc_var("float32", init=0.0)
                    if (flags & BIAS) != 0:
                        bias = get("float32", dt_bias[h])
                    start = t0 + warp * 64
                    do("ssd_dt_load", T.address_of(raw[0]), T.address_of(dt[b, start, h]), dt.strides[1], t1 - start)
                    for i in T.serial(T.truncdiv(count - warp + (nf - 1), nf)):
                        c = i * nf + warp
                        st = c % stages
                        at = base + st * stage_bytes
                        s0 = t0 + c * 64
                        do("ssd_dt_load", T.address_of(raw[2]), T.address_of(dt[b, s0 + 64 * nf, h]), dt.strides[1], t1 - s0 - 64 * nf)
                        if (flags & GATE) != 0:
                            do("ssd_gate_ahead", T.address_of(z[b, s0, h, p0]), z.strides[1], t1 - s0)
                        do("ssd_factors", T.address_of(f[0]), T.address_of(raw[0]), bias, rate, dt_min, dt_max, flags & SOFTPLUS, t1 - s0)
                        if nf % stages != 0:
                            do("ssd_wait", base + o_free + 8 * st, (c // stages + 1) % 2)  # else the phase of 2 * stages before could pass
                        do("ssd_wait", base + o_full + 8 * st, c // stages % 2)
                        if (flags & PACKED) != 0:
                            if t1 - s0 < 64:
                                do("ssd_absent", at, at + o_B, t1 - s0)
                        if safe:
                            do("ssd_fit", T.address_of(f[0]), at)
                        if xw_places < stages:
                            if c >= xw_places:  # who used the place of w x is done with it
                                e = c - xw_places
                                do("ssd_wait", base + o_free + 8 * (e % stages), e // stages % 2)
                        do("ssd_weigh", at, base + o_xw + c % xw_places * xw_pitch, T.address_of(f[0]))
                        if slots < stages:
                            if c >= slots:  # who used the factors' place is done with it
                                e = c - slots
                                do("ssd_wait", base + o_free + 8 * (e % stages), e // stages % 2)
                        do("ssd_keep", base + o_scal + c % slots * SC, T.address_of(f[0]))
                        do("ssd_proxy_fence")
                        do("ssd_arrive_warp", base + o_made + 8 * st)
                        raw[0] = raw[2]
                        raw[1] = raw[3]
            elif wg <= SW:
                acc = T.alloc_local((NA,), "float32")
                ends = T.alloc_local((2,), "float32")
                ends[1] = 1.0
                n0 = (wg - 1) * NS
                do("ssd_zero", T.address_of(acc[0]), NA)
                if seg > 0:
                    if seg < segs:
                        do(
                            "ssd_carry_in",
                            T.address_of(acc[0]),
                            T.address_of(carry[chain * parts + seg, (wg - 1) * (128 * NA)]),
                            T.address_of(sync[1 + (chain * SW + wg - 1) * 4 + w]),
                            seg,
                        )
                elif (flags & INITIAL) != 0:
                    do("ssd_state_read", T.address_of(acc[0]), T.address_of(initial_states[row, h, p0, n0]), w, P - p0, N - n0)
                    if wide:
                        do(
                            "ssd_tail_read",
                            T.address_of(acc[NS // 2]),
                            T.address_of(initial_states[row, h, p0 + 64, n0]),
                            w,
                            P - p0 - 64,
                            N - n0,
                        )
                # A scout has no y warps, whose arrivals its first state warps make.
                times = T.alloc_var("int32", init=1 if wide else T.if_then_else(wg == 1, 1 + scout, 1))
                left = T.alloc_var("int32", init=length)
                for c in T.serial(count):
                    st = c % stages
                    at = base + st * stage_bytes
                    scal = base + o_scal + c % slots * SC
                    slot = c % ring
                    if scout == 0:
                        do("ssd_wait", base + o_sfree + 8 * slot, (c // ring + 1) % 2)
                        copy = base + o_ring + slot * copy_bytes + n0 * (2 * rows)
                        do(
                            "ssd_state_handoff",
                            copy,
                            T.address_of(acc[0]),
                            w,
                            ends[1],
                            base + o_side + slot * side_bytes,
                            base + o_tops,
                            wg - 1,
                        )
                        if wide:
                            mine = base + o_side + slot * side_bytes
                            do("ssd_tail_handoff", copy, T.address_of(acc[NS // 2]), w, ends[1], mine, base + o_tops + slot * 16)
                    do("ssd_wait", base + o_made + 8 * st, c // stages % 2)
                    do("ssd_ends", T.address_of(ends[0]), scal)
                    do("ssd_scale", T.address_of(acc[0]), ends[0], NA)
                    do("ssd_state_update", T.address_of(acc[0]), base + o_xw + c % xw_places * xw_pitch, at + o_B + n0 * 128)
                    if scout == 0:
                        do("ssd_proxy_fence")
                        do("ssd_arrive_warp", base + o_sfull + 8 * slot)
                    do("SSD_WAIT", 0)
                    do("ssd_landed", T.address_of(acc[0]), NA)
                    do("ssd_arrive_times", base + o_free + 8 * st, times)
                    left = left - 1
                    if left == 0:
                        # The end of a segment: the next one's start, unless a scout goes ahead of this CTA.
                        left = seg_chunks
                        seg = seg + 1
                        if safe:
                            do("ssd_scale", T.address_of(acc[0]), ends[1], NA)
                            ends[1] = 1.0
                        if (seg < segs) & (scout >= scouts):
                            do(
                                "ssd_carry_out",
                                T.address_of(carry[chain * parts + seg, (wg - 1) * (128 * NA)]),
                                T.address_of(acc[0]),
                                T.address_of(sync[1 + (chain * SW + wg - 1) * 4 + w]),
                                seg,
                            )
                if last > 0:
                    if safe:
                        do("ssd_scale", T.address_of(acc[0]), ends[1], NA)
                    do("ssd_state_write", T.address_of(final_states[row, h, p0, n0]), T.address_of(acc[0]), w, P - p0, N - n0)
                    if wide:
                        do(
                            "ssd_tail_write",
                            T.address_of(final_states[row, h, p0 + 64, n0]),
                            T.address_of(acc[NS // 2]),
                            w,
                            P - p0 - 64,
                            N - n0,
                        )
            else:
                cb = T.alloc_local((32,), "float32")
                out = T.alloc_local((rows // 2,), "float32")
                m = T.alloc_local((16,), "uint32")
                q = T.alloc_local((20,), "float32")
                l = T.alloc_local((3,), "float32")
                sides = T.alloc_local((5,), "float32")
                zr = T.alloc_local((rows // 4,), "uint32")
                scale = T.alloc_local((2,), "float32")
                took = T.alloc_local((32 if y_float32 else 16,), "float32" if y_float32 else "uint32")
                yw = T.alloc_var("int32", init=wg - SW - 1)
                rounds = T.alloc_var("int32", init=T.if_then_else(scout > 0, 0, T.truncdiv(count - yw + (ny - 1), ny)))
                for i in T.serial(rounds):
                    c = i * ny + yw
                    st = c % stages
                    at = base + st * stage_bytes
                    at_C = base + c % C_places * C_pitch + o_C
                    scal = base + o_scal + c % slots * SC
                    slot = c % ring
                    do("ssd_wait", base + o_full + 8 * st, c // stages % 2)
                    do("ssd_wait", base + o_cfull + 8 * (c % C_places), c // C_places % 2)
                    do("ssd_mma_kmajor", T.address_of(cb[0]), at_C, at + o_B)
                    if i > 0:
                        do("ssd_arrive_warp", base + o_staged + 8 * ((c - ny) % stages))
                    do("ssd_wait", base + o_made + 8 * st, c // stages % 2)
                    do("ssd_pairs", T.address_of(q[0]), T.address_of(l[0]), scal, w)
                    do("ssd_wait", base + o_sfull + 8 * slot, c // ring % 2)
                    do("ssd_mma_copy", T.address_of(out[0]), at_C, base + o_ring + slot * copy_bytes)
                    do("SSD_WAIT", 1)
                    do("ssd_landed", T.address_of(cb[0]), 32)
                    do(
                        "ssd_weights",
                        T.address_of(m[0]),
                        T.address_of(cb[0]),
                        T.address_of(q[0]),
                        T.address_of(l[0]),
                        w,
                        T.address_of(scale[0]),
                    )
                    do("ssd_sides", T.address_of(sides[0]), base + o_side + slot * side_bytes)
                    do("SSD_WAIT", 0)
                    do("ssd_landed", T.address_of(out[0]), rows // 2)
                    do("ssd_rows_scale", T.address_of(out[0]), T.address_of(l[0]), T.address_of(scale[0]), T.address_of(sides[0]))
                    do("ssd_arrive_warp", base + o_sfree + 8 * slot)
                    if wide:
                        do("ssd_arrive_warp", base + o_cfree + 8 * (c % C_places))
                    do("ssd_mma_mx", T.address_of(out[0]), T.address_of(m[0]), at)
                    if (flags & GATE) != 0:
                        s0 = t0 + c * 64
                        h1 = T.alloc_var("int32", init=T.call_extern("int32", "ssd_here", h))
                        b1 = T.alloc_var("int32", init=T.call_extern("int32", "ssd_here", b))
                        do("ssd_gate_load", T.address_of(zr[0]), T.address_of(z[b1, s0, h1, p0]), z.strides[1], w, t1 - s0, P - p0)
                    do("SSD_WAIT", 0)
                    do("ssd_landed", T.address_of(out[0]), rows // 2)
                    do("ssd_held", T.address_of(m[0]), 16, T.if_then_else(rounds < 0, 1, 0))
                    do("ssd_rows_unscale", T.address_of(out[0]), T.address_of(scale[0]))
                    if (flags & SKIP) != 0:
                        h2 = T.alloc_var("int32", init=T.call_extern("int32", "ssd_here", h))
                        do("ssd_skip", T.address_of(out[0]), T.address_of(D[h2, p0]), T.cast(D.strides[1], "int32"), at, w, P - p0)
                    if (flags & GATE) != 0:
                        do("ssd_gate", T.address_of(out[0]), T.address_of(zr[0]))
                    if not wide:
                        do("ssd_arrive_warp", base + o_free + 8 * st)
                    do("ssd_y_take", T.address_of(took[0]), T.address_of(out[0]))
                    if wide:
                        do("ssd_wait", base + o_free + 8 * st, c // stages % 2)
                    do("ssd_y_together", 2 + yw)
                    do("ssd_y_stage", T.address_of(took[0]), base + st * stage_bytes + o_y + w * 2048)
                    if wide:
                        do("ssd_tail_stage", T.address_of(out[32]), at + w * 2048)
                if rounds > 0:
                    c_end = (rounds - 1) * ny + yw
                    s_end = t0 + c_end * 64
                    if s_end + 64 <= t1:
                        do("ssd_arrive_warp", base + o_staged + 8 * (c_end % stages))
                    else:
                        mine = base + c_end % stages * stage_bytes + o_y + w * 2048
                        r_end = s_end + w * 16
                        do("ssd_y_plain", mine, T.address_of(y[b, r_end, h, p0]), T.cast(H, "int64") * P, t1 - r_end, P - p0)
                        if wide:
                            rest = base + c_end % stages * stage_bytes + w * 2048
                            do("ssd_y_plain", rest, T.address_of(y[b, r_end, h, p0 + 64]), T.cast(H, "int64") * P, t1 - r_end, P - p0 - 64)

    return k.complete(fused_main)
