"""The full forward in one pass: v = clamp(softplus?(dt + dt_bias)), state = exp(v A) state + v x B, y = C . state; g = h // (H / G).

x (B,S,H,P), Bm, Cm (B,S,G,N) dtype, through tensor maps; dt (B,S,H) float32; A (H), dt_bias (H), initial_states (B,H,P,N) float32
-> y (B,S,H,P) float32 (through a tensor map), final_states (B,H,P,N) float32.

A CTA takes 64 rows (d_head) of one head of one sequence, or a segment of ``seg_chunks`` chunks of it, and goes through it in
chunks of 64 tokens with the state in registers. Its warpgroups are joined by mbarriers only:

    0            one thread loads x, B, C (bulk copies, ``stages`` chunks ahead); three warps make the per-token factors from dt
    1 .. SW      hold the state: leave a rounded copy of it in a ring, then state = 2^end state + (w x)^T B
    SW+1 ..      take chunks in turn: y = 2^cum C state^T + (C B^T . decays . dt) x

Segments of a chain hand the state on through ``carry``; ``sync`` (zero at launch) holds a ticket, which orders CTAs, and a flag for
each warp that holds state. Both are untouched with one segment. float16 operands made here are scaled by powers of two, so that
they keep float32's range. docs/kernels.md has the measurements behind these choices.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = {**k.PASS_CONFIGS, "tl.disable_shared_memory_reuse": True}


def regs(name: str, count: int, start: int = 0) -> str:
    return ", ".join(f'"+f"({name}[{i}])' for i in range(start, start + count))


def operands(count: int, start: int = 0) -> str:
    return "{" + ", ".join(f"%{i}" for i in range(start, start + count)) + "}"


def mma(n: int, ty: str) -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ty}.{ty} {operands(n // 2)}"


def wgmma_ss(n: int, ty: str, tb: int) -> str:
    """d (64 x n) (+)= A (64 x 16, shared) B (16 x n, shared)."""
    c = n // 2
    return f"""
DI void ssd_wgmma_ss_{n}_{tb}(float* d, unsigned long long a, unsigned long long b, int acc) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{c + 2}, 0; {mma(n, ty)}, %{c}, %{c + 1}, p, 1, 1, 0, {tb}; }}"
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
DI void ssd_held(unsigned* a) {
#pragma unroll
  for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i]) :: "memory");
}
DI float ssd_exp2(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
// 128-byte swizzle; lead: bytes between 64-element panels (MN-major operands); 8-row groups are 1024 bytes apart.
DI unsigned ssd_desc_low(unsigned addr, unsigned lead) { return (addr >> 4) | ((lead >> 4) << 16); }
DI unsigned long long ssd_desc(unsigned low, unsigned bytes) {
  return (unsigned long long)(low + (bytes >> 4)) | ((unsigned long long)(64u | (1u << 30)) << 32);
}
DI float2 ssd_lds2(unsigned a) { float2 v; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
DI float4 ssd_lds4(unsigned a) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a));
  return v;
}
DI float ssd_lds(unsigned a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a)); return v; }
DI void ssd_sts2(unsigned a, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(a), "f"(x), "f"(y) : "memory"); }
DI void ssd_sts4(unsigned a, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
DI int ssd_warp() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
DI void ssd_copy(unsigned* a, const unsigned* b) {
#pragma unroll
  for (int i = 0; i < 16; i++) a[i] = b[i];
}
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
DI float ssd_inverse(float p) { return __int_as_float((254 << 23) - __float_as_int(p)); }
// ---- loader: 64 rows x 64 columns by the bulk copy engine, zeros past the tensor's end
template <typename D>
DI void ssd_tile(const D& map, unsigned dst, unsigned bar, int column, int head, int row, int batch, unsigned long long policy) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
    :: "r"(dst), "l"((unsigned long long)&map), "r"(bar), "r"(column), "r"(head), "r"(row), "r"(batch), "l"(policy) : "memory");
}
DI void ssd_expect(unsigned bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
#define SSD_ONCE 0x12F0000000000000ull  // L2 policy evict_first
// ---- scalar warps: a lane holds tokens 2*lane, 2*lane+1. Writes (cum, dt) pairs, w = dt*2^(end-cum), el = 2^cum.
DI void ssd_dt_load(float* v, const float* dt, long long pitch, int rows) {
  int lane = threadIdx.x & 31;
  v[0] = 2 * lane < rows ? __ldg(dt + (2 * lane) * pitch) : 0.f;
  v[1] = 2 * lane + 1 < rows ? __ldg(dt + (2 * lane + 1) * pitch) : 0.f;
}
DI float ssd_dt_value(float v, float bias, float lo, float hi) {
  v += bias;
#if SOFTPLUS
  v = v > 20.f ? v : log1pf(expf(v));
#endif
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}
DI void ssd_scalars(unsigned dst, float* raw, float bias, float a, float lo, float hi, int rows) {
  int lane = threadIdx.x & 31;
  float d0 = 2 * lane < rows ? ssd_dt_value(raw[0], bias, lo, hi) : 0.f;
  float d1 = 2 * lane + 1 < rows ? ssd_dt_value(raw[1], bias, lo, hi) : 0.f;
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
  ssd_sts4(dst + 16 * lane, c0, d0, c1, d1);
  float w0 = d0 * ssd_exp2(fminf(end - c0, 0.f)), w1 = d1 * ssd_exp2(fminf(end - c1, 0.f));
#if SAFE
  float top = fmaxf(fabsf(w0), fabsf(w1));
#pragma unroll
  for (int o = 1; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
  float down = ssd_down(top * 32768.f);  // |w| * down < 1: w x is no larger than x
  w0 *= down; w1 *= down;
  if (lane == 0) ssd_sts2(dst + 1024, down, ssd_inverse(down));
#endif
  ssd_sts2(dst + 512 + 8 * lane, w0, w1);
  ssd_sts2(dst + 768 + 8 * lane, ssd_exp2(fminf(c0, 0.f)), ssd_exp2(fminf(c1, 0.f)));
}
// ---- state warps: thread (g, t) of warp w holds state[16w+g (+8)][8j+2t (+1)]
DI void ssd_state_operand(unsigned* a, unsigned xs, unsigned scal, int w) {
  int lane = threadIdx.x & 31, t = lane & 3;
  int s = (lane >> 4) * 8 + (lane & 7), ch = 2 * w + ((lane >> 3) & 1);
  unsigned addr = xs + s * 128 + ((ch ^ (s & 7)) << 4);
  float2 u[4], v[4];
#pragma unroll
  for (int kk = 0; kk < 4; kk++) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(a[4 * kk]), "=r"(a[4 * kk + 1]), "=r"(a[4 * kk + 2]), "=r"(a[4 * kk + 3]) : "r"(addr + kk * 2048) : "memory");
    u[kk] = ssd_lds2(scal + 512 + kk * 64 + t * 8);
    v[kk] = ssd_lds2(scal + 512 + kk * 64 + 32 + t * 8);
  }
#pragma unroll
  for (int kk = 0; kk < 4; kk++) {
    a[4 * kk + 0] = ssd_pack(ssd_lo(a[4 * kk]) * u[kk].x, ssd_hi(a[4 * kk]) * u[kk].y);
    a[4 * kk + 1] = ssd_pack(ssd_lo(a[4 * kk + 1]) * u[kk].x, ssd_hi(a[4 * kk + 1]) * u[kk].y);
    a[4 * kk + 2] = ssd_pack(ssd_lo(a[4 * kk + 2]) * v[kk].x, ssd_hi(a[4 * kk + 2]) * v[kk].y);
    a[4 * kk + 3] = ssd_pack(ssd_lo(a[4 * kk + 3]) * v[kk].x, ssd_hi(a[4 * kk + 3]) * v[kk].y);
  }
}
// The state, rounded, for the y warps; with fp16 each warp's 16 rows are scaled by a power of two, whose inverse goes to scales[w].
DI void ssd_state_handoff(unsigned slot, float* acc, int w, unsigned scales, unsigned shared_tops, int part) {
  int lane = threadIdx.x & 31;
  int p = 16 * w + ((lane >> 3) & 1) * 8 + (lane & 7), hi = lane >> 4;
  unsigned row = slot + p * 128;
  float f = 1.f;
#if SAFE
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < NS / 2; i++) top = fmaxf(top, fabsf(acc[i]));
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
  if (lane == 0 && part == 0) asm volatile("st.shared.f32 [%0], %1;" :: "r"(scales + w * 4), "f"(ssd_inverse(f)) : "memory");
#endif
#pragma unroll
  for (int i = 0; i < NS / 16; i++) {
    int ch = 2 * i + hi;
    unsigned addr = row + (ch >> 3) * 8192 + (((ch & 7) ^ (p & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(addr),
      "r"(ssd_pack(acc[8 * i] * f, acc[8 * i + 1] * f)), "r"(ssd_pack(acc[8 * i + 2] * f, acc[8 * i + 3] * f)),
      "r"(ssd_pack(acc[8 * i + 4] * f, acc[8 * i + 5] * f)), "r"(ssd_pack(acc[8 * i + 6] * f, acc[8 * i + 7] * f)) : "memory");
  }
}
DI void ssd_scale(float* acc, float v, int n) {
#pragma unroll
  for (int i = 0; i < n; i++) acc[i] *= v;
}
DI void ssd_state_update(float* acc, unsigned* a, unsigned bs) {
  unsigned low = ssd_desc_low(bs, 8192);
  ssd_wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; kk++) SSD_STATE_MMA(acc, a + 4 * kk, ssd_desc(low, kk * 2048));
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
        float2 v = *(const float2*)(src + (p + 8 * i) * NREAL + 8 * j + 2 * (lane & 3));
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
  for (int i = 0; i < NS / 8; i++) d[i * 128] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
  __threadfence();
  __syncwarp();
  if ((threadIdx.x & 31) == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
}
DI void ssd_carry_in(float* acc, const float* src, const int* flag, int value) {
  int got;
  do { asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(got) : "l"(flag) : "memory"); } while (got < value);
  const float4* s = (const float4*)src + (threadIdx.x & 127);
#pragma unroll
  for (int i = 0; i < NS / 8; i++) {
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
    int at = (kk / 4) * 8192 + (kk % 4) * 32;
    ssd_wgmma_ss_64_0(d, ssd_desc(la, at), ssd_desc(lb, at), kk > 0);
  }
  ssd_wgmma_commit();
}
DI void ssd_mma_mx(float* d, unsigned* a, unsigned xs) {
  unsigned low = ssd_desc_low(xs, 8192);
  ssd_wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; kk++) ssd_wgmma_rs_64_1(d, a + 4 * kk, ssd_desc(low, kk * 2048));
  ssd_wgmma_commit();
}
// M = CB * 2^min(cum_l - cum_s, 0) * dt_s for s <= l, as an operand. With fp16 each row is scaled by a power of two, left in scale.
DI void ssd_weights(unsigned* a, float* cb, unsigned scal, int w, float* scale) {
  int lane = threadIdx.x & 31, r = 16 * w + lane / 4, keep = r - 2 * (lane & 3);
  float l0 = ssd_lds(scal + r * 8), l1 = ssd_lds(scal + (r + 8) * 8);
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    float4 q[4];  // cum, dt of this thread's two columns of a tile
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = ssd_lds4(scal + (half + i) * 64 + (lane & 3) * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int j = half + i;
      float m0 = cb[4 * j] * q[i].y * ssd_exp2(fminf(l0 - q[i].x, 0.f));
      float m1 = cb[4 * j + 1] * q[i].w * ssd_exp2(fminf(l0 - q[i].z, 0.f));
      float m2 = cb[4 * j + 2] * q[i].y * ssd_exp2(fminf(l1 - q[i].x, 0.f));
      float m3 = cb[4 * j + 3] * q[i].w * ssd_exp2(fminf(l1 - q[i].z, 0.f));
      cb[4 * j] = 8 * j <= keep ? m0 : 0.f; cb[4 * j + 1] = 8 * j + 1 <= keep ? m1 : 0.f;
      cb[4 * j + 2] = 8 * j <= keep + 8 ? m2 : 0.f; cb[4 * j + 3] = 8 * j + 1 <= keep + 8 ? m3 : 0.f;
#if !SAFE
      a[2 * j] = ssd_pack(cb[4 * j], cb[4 * j + 1]); a[2 * j + 1] = ssd_pack(cb[4 * j + 2], cb[4 * j + 3]);
#endif
    }
  }
#if SAFE
  float t0 = 0.f, t1 = 0.f;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    t0 = fmaxf(t0, fmaxf(fabsf(cb[4 * j]), fabsf(cb[4 * j + 1])));
    t1 = fmaxf(t1, fmaxf(fabsf(cb[4 * j + 2]), fabsf(cb[4 * j + 3])));
  }
#pragma unroll
  for (int o = 1; o < 4; o *= 2) {
    t0 = fmaxf(t0, __shfl_xor_sync(0xffffffffu, t0, o));
    t1 = fmaxf(t1, __shfl_xor_sync(0xffffffffu, t1, o));
  }
  scale[0] = ssd_down(t0); scale[1] = ssd_down(t1);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    a[2 * j] = ssd_pack(cb[4 * j] * scale[0], cb[4 * j + 1] * scale[0]);
    a[2 * j + 1] = ssd_pack(cb[4 * j + 2] * scale[1], cb[4 * j + 3] * scale[1]);
  }
#endif
}
// Row l of C S^T takes 2^cum_l; with fp16 also the row's scale of M, and each 16 columns what the state was scaled by.
DI void ssd_rows_scale(float* d, unsigned scal, int w, const float* scale, unsigned scales) {
  int lane = threadIdx.x & 31, r = 16 * w + lane / 4;
  float e0 = ssd_lds(scal + 768 + r * 4), e1 = ssd_lds(scal + 768 + (r + 8) * 4);
#if SAFE
  e0 *= scale[0]; e1 *= scale[1];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float f = ssd_lds(scales + (j / 2) * 4);
    d[4 * j] *= f; d[4 * j + 1] *= f; d[4 * j + 2] *= f; d[4 * j + 3] *= f;
  }
#endif
#pragma unroll
  for (int j = 0; j < 8; j++) { d[4 * j] *= e0; d[4 * j + 1] *= e0; d[4 * j + 2] *= e1; d[4 * j + 3] *= e1; }
}
// A warp's 16 rows x 64 columns go to shared memory as two swizzled 16 x 32 boxes, and from there to y in the background; rows and
// columns outside y are dropped.
DI void ssd_y_stage(float* d, unsigned mine, const float* scale) {
  int lane = threadIdx.x & 31, t = lane & 3, g = lane / 4;
  float f0 = 1.f, f1 = 1.f;
#if SAFE
  f0 = ssd_inverse(scale[0]); f1 = ssd_inverse(scale[1]);
#endif
  unsigned at = mine + g * 128 + (t & 1) * 8;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    unsigned o = (j / 4) * 2048 + (((2 * (j % 4) + t / 2) ^ g) << 4);
    ssd_sts2(at + o, d[4 * j] * f0, d[4 * j + 1] * f0);
    ssd_sts2(at + o + 1024, d[4 * j + 2] * f1, d[4 * j + 3] * f1);
  }
  ssd_proxy_fence();
  __syncwarp();
}
template <typename D> DI void ssd_y_send(const D& map, unsigned mine, int column, int columns, int head, int row, int batch) {
  if ((threadIdx.x & 31) == 0) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (column + 32 * i < columns)
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;"
          :: "l"((unsigned long long)&map), "r"(mine + i * 2048), "r"(column + 32 * i), "r"(head), "r"(row), "r"(batch), "l"(SSD_ONCE)
          : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}
DI void ssd_y_sent(unsigned bar) { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); ssd_arrive_warp(bar); }
// The four warps read the whole copy of the state, each at its own pace; after this none does.
DI void ssd_y_together(int id) { asm volatile("bar.sync %0, 128;" :: "r"(id) : "memory"); }
DI void ssd_y_finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""


def do(name: str, *args: Any) -> Any:
    return T.evaluate(T.call_extern("handle", name, *args))


def program(*, P: int, N: int, dtype: str, softplus: bool, has_bias: bool, has_initial_states: bool) -> Any:
    NT = 64 if N <= 64 else 128 if N <= 128 else 256
    safe = dtype == "float16"
    SW = max(1, NT // 128)  # state warpgroups, each with NS columns of the state
    NS = NT // SW
    slices = k.ceildiv(P, 64)  # a CTA makes 64 rows of d_head
    ny = {64: 2, 128: 2, 256: 1}[NT]  # y warpgroups, which take chunks in turn
    stages = {64: 6, 128: 4, 256: 2}[NT]
    ring = {64: 3, 128: 3, 256: 2}[NT]  # at least ny
    factors = 8  # chunks whose per-token factors are kept
    SC = 1152  # per-token factors of a chunk
    stage_bytes = 8192 + 2 * NT * 128
    ring_bytes = max(NT * 128, 16384)  # a copy of the state, then 64 rows of y
    o_C = 8192 + NT * 128  # in a stage: x, B, C
    o_ring = stages * stage_bytes
    o_scal = o_ring + ring * ring_bytes
    o_side = o_scal + factors * SC  # fp16: scales of the state's copies, then tops of the state's parts
    o_tops = o_side + ring * 16
    o_full = o_tops + 64  # mbarriers
    o_free = o_full + 8 * stages
    o_cfull = o_free + 8 * stages
    o_cfree = o_cfull + 8 * factors
    o_sfull = o_cfree + 8 * factors
    o_sfree = o_sfull + 8 * ring
    total = o_sfree + 8 * ring + 16
    ty = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    values = {
        "SAFE": int(safe),
        "SW": SW,
        "SOFTPLUS": int(softplus),
        "NT": NT,
        "NS": NS,
        "NREAL": N,
        "SSD_STATE_MMA": f"ssd_wgmma_rs_{NS}_1",
    }
    source = "".join(f"#define {name} {value}\n" for name, value in values.items()) + COMMON + (FP16 if safe else BF16)
    source += wgmma_ss(64, ty, 0) + "".join(wgmma_rs(n, ty, 1) for n in sorted({64, NS})) + BODY
    threads = 128 * (1 + SW + ny)
    once, keep = T.uint64(0x12F0000000000000), T.uint64(0x14F0000000000000)
    B, S, H, G = k.dims("B S H G")

    def tiles(t: Any, inner: int, heads: Any) -> Any:
        """Descriptor of 64 x 64 tiles (tokens x inner) of one head, 128-byte swizzle, 128-byte L2 promotion, zeros outside."""
        code = 6 if safe else 9  # CUtensorMapDataType
        pitches = [t.strides[d] * 2 for d in (2, 1, 0)]
        return T.create_tma_descriptor(code, 4, t.data, inner, heads, S, B, 2, *pitches, 64, 1, 64, 1, 1, 1, 1, 1, 0, 3, 2, 0)

    def out_tiles(t: Any) -> Any:
        """Descriptor of 16 x 32 float32 boxes (tokens x d_head) of y, 128-byte swizzle."""
        row = T.cast(H, "int64") * (P * 4)
        return T.create_tma_descriptor(7, 4, t.data, P, H, S, B, 4, T.int64(P * 4), row, row * S, 32, 1, 16, 1, 1, 1, 1, 1, 0, 3, 2, 0)

    @T.prim_func
    def fused_main(
        x: k.strided("x", (B, S, H, P), dtype, 8),
        dt: k.strided("dt", (B, S, H), "float32"),
        A: T.Tensor((H,), "float32"),
        dt_bias: T.Tensor((H,), "float32"),
        Bm: k.strided("Bm", (B, S, G, N), dtype, 8),
        Cm: k.strided("Cm", (B, S, G, N), dtype, 8),
        initial_states: T.Tensor((B, H, P, N), "float32"),
        carry: T.Tensor((B * H * slices, SW * 128 * (NS // 2)), "float32"),
        sync: T.Tensor((1 + B * H * slices * (SW * 4),), "int32"),
        y: T.Tensor((B, S, H, P), "float32"),
        final_states: T.Tensor((B, H, P, N), "float32"),
        dt_min: T.float32,
        dt_max: T.float32,
        segs: T.int32,
        seg_chunks: T.int32,
    ):
        with T.Kernel(B * H * slices * segs, threads=threads) as bx:
            T.import_source(source)
            smem = T.alloc_shared((total,), "uint8", scope="shared.dyn")
            tx = T.get_thread_binding()
            base = T.alloc_var("uint32")
            base = T.call_extern("uint32", "ssd_smem", smem.access_ptr("rw"))
            if tx == 0:
                for i in T.serial(stages):
                    do("ssd_bar_init", base + o_full + 8 * i, 1)
                    do("ssd_bar_init", base + o_free + 8 * i, 4 * SW + 4)
                for i in T.serial(factors):
                    do("ssd_bar_init", base + o_cfull + 8 * i, 1)
                    do("ssd_bar_init", base + o_cfree + 8 * i, 4 * SW + 4)
                for i in T.serial(ring):
                    do("ssd_bar_init", base + o_sfull + 8 * i, 4 * SW)
                    do("ssd_bar_init", base + o_sfree + 8 * i, 4)
            do("ssd_bars_ready")
            item = T.alloc_var("int32", init=bx)
            if segs > 1:
                # Segments of a chain wait for each other, so they are taken in order, whatever order CTAs start in.
                item = T.call_extern("int32", "ssd_ticket", T.address_of(sync[0]), base + total - 16)
            chains = T.alloc_var("int32", init=B * H * slices)
            seg = T.alloc_var("int32", init=T.truncdiv(item, chains))
            chain = T.alloc_var("int32", init=item - seg * chains)
            bh = T.alloc_var("int32", init=T.truncdiv(chain, slices))
            p0 = T.alloc_var("int32", init=(chain - bh * slices) * 64)
            b = T.alloc_var("int32", init=T.truncdiv(bh, H))
            h = T.alloc_var("int32", init=bh - b * H)
            g = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(H, G)))
            first = T.alloc_var("int32", init=seg * seg_chunks)  # first chunk of this segment
            count = T.alloc_var("int32", init=T.min(seg_chunks, T.truncdiv(S + 63, 64) - first))
            warp = T.alloc_var("int32", init=0)
            warp = T.call_extern("int32", "ssd_warp")
            wg = T.alloc_var("int32", init=warp // 4)
            w = T.alloc_var("int32", init=warp % 4)

            if wg == 0:
                if tx == 0:
                    for c in T.serial(count):
                        st = c % stages
                        at = base + st * stage_bytes
                        s0 = (first + c) * 64
                        do("ssd_wait", base + o_free + 8 * st, (c // stages + 1) % 2)
                        do("ssd_expect", base + o_full + 8 * st, stage_bytes)
                        do("ssd_tile", tiles(x, P, H), at, base + o_full + 8 * st, p0, h, s0, b, once)
                        for i in T.unroll(NT // 64):
                            do("ssd_tile", tiles(Bm, N, G), at + 8192 + i * 8192, base + o_full + 8 * st, 64 * i, g, s0, b, keep)
                        for i in T.unroll(NT // 64):
                            do("ssd_tile", tiles(Cm, N, G), at + o_C + i * 8192, base + o_full + 8 * st, 64 * i, g, s0, b, keep)
                elif warp > 0:
                    # Three warps take chunks in turn: one alone needs a load's latency and 1300 cycles for each.
                    raw = T.alloc_local((4,), "float32")
                    rate = T.alloc_var("float32", init=A[h] * k.LOG2E)
                    bias = T.alloc_var("float32", init=0.0)
                    if has_bias:
                        bias = dt_bias[h]
                    start = (first + warp - 1) * 64
                    do("ssd_dt_load", T.address_of(raw[0]), T.address_of(dt[b, start, h]), dt.strides[1], S - start)
                    for i in T.serial(T.truncdiv(count - (warp - 1) + 2, 3)):
                        c = i * 3 + (warp - 1)
                        kc = c % factors
                        s0 = (first + c) * 64
                        do("ssd_dt_load", T.address_of(raw[2]), T.address_of(dt[b, s0 + 192, h]), dt.strides[1], S - s0 - 192)
                        do("ssd_wait", base + o_cfree + 8 * kc, (c // factors + 1) % 2)
                        do("ssd_scalars", base + o_scal + kc * SC, T.address_of(raw[0]), bias, rate, dt_min, dt_max, S - s0)
                        do("ssd_arrive_warp", base + o_cfull + 8 * kc)
                        raw[0] = raw[2]
                        raw[1] = raw[3]
            elif wg <= SW:
                acc = T.alloc_local((NS // 2,), "float32")
                op = T.alloc_local((16,), "uint32")
                nextop = T.alloc_local((16,), "uint32")
                n0 = (wg - 1) * NS
                do("ssd_zero", T.address_of(acc[0]), NS // 2)
                if seg > 0:
                    do(
                        "ssd_carry_in",
                        T.address_of(acc[0]),
                        T.address_of(carry[chain, (wg - 1) * (64 * NS)]),
                        T.address_of(sync[1 + (chain * SW + wg - 1) * 4 + w]),
                        seg,
                    )
                elif has_initial_states:
                    do("ssd_state_read", T.address_of(acc[0]), T.address_of(initial_states[b, h, p0, n0]), w, P - p0, N - n0)
                up = T.alloc_var("float32", init=1.0)
                if count > 0:
                    do("ssd_wait", base + o_full, 0)
                    do("ssd_wait", base + o_cfull, 0)
                    do("ssd_state_operand", T.address_of(op[0]), base, base + o_scal, w)
                for c in T.serial(count):
                    st = c % stages
                    at = base + st * stage_bytes
                    kc = c % factors
                    scal = base + o_scal + kc * SC
                    slot = c % ring
                    n = c + 1
                    do("ssd_wait", base + o_sfree + 8 * slot, (c // ring + 1) % 2)
                    copy = base + o_ring + slot * ring_bytes + n0 * 128
                    do("ssd_state_handoff", copy, T.address_of(acc[0]), w, base + o_side + slot * 16, base + o_tops, wg - 1)
                    if safe:
                        do("ssd_scale", T.address_of(acc[0]), T.call_extern("float32", "ssd_lds", scal + 1024), NS // 2)
                        up = T.call_extern("float32", "ssd_lds", scal + 1028)
                    do("ssd_scale", T.address_of(acc[0]), T.call_extern("float32", "ssd_lds", scal + (768 + 63 * 4)), NS // 2)
                    do("ssd_state_update", T.address_of(acc[0]), T.address_of(op[0]), at + 8192 + n0 * 128)
                    do("ssd_proxy_fence")
                    do("ssd_arrive_warp", base + o_sfull + 8 * slot)
                    # The next chunk's operand is made while the product runs. The wait that follows must not be made conditional:
                    # ptxas then reuses the registers of an operand that is still being read.
                    if n < count:
                        do("ssd_wait", base + o_full + 8 * (n % stages), n // stages % 2)
                        do("ssd_wait", base + o_cfull + 8 * (n % factors), n // factors % 2)
                        ahead = base + n % stages * stage_bytes
                        do("ssd_state_operand", T.address_of(nextop[0]), ahead, base + o_scal + n % factors * SC, w)
                    do("SSD_WAIT", 0)
                    do("ssd_landed", T.address_of(acc[0]), NS // 2)
                    do("ssd_held", T.address_of(op[0]))
                    do("ssd_arrive_warp", base + o_free + 8 * st)
                    do("ssd_arrive_warp", base + o_cfree + 8 * kc)
                    if safe:
                        do("ssd_scale", T.address_of(acc[0]), up, NS // 2)
                    do("ssd_copy", T.address_of(op[0]), T.address_of(nextop[0]))
                if seg + 1 < segs:
                    do(
                        "ssd_carry_out",
                        T.address_of(carry[chain, (wg - 1) * (64 * NS)]),
                        T.address_of(acc[0]),
                        T.address_of(sync[1 + (chain * SW + wg - 1) * 4 + w]),
                        seg + 1,
                    )
                else:
                    do("ssd_state_write", T.address_of(final_states[b, h, p0, n0]), T.address_of(acc[0]), w, P - p0, N - n0)
            else:
                cb = T.alloc_local((32,), "float32")
                out = T.alloc_local((32,), "float32")
                m = T.alloc_local((16,), "uint32")
                scale = T.alloc_local((2,), "float32")
                yw = T.alloc_var("int32", init=wg - SW - 1)
                for i in T.serial(T.truncdiv(count - yw + (ny - 1), ny)):
                    c = i * ny + yw
                    st = c % stages
                    at = base + st * stage_bytes
                    kc = c % factors
                    scal = base + o_scal + kc * SC
                    slot = c % ring
                    mine = base + o_ring + slot * ring_bytes + w * 4096
                    do("ssd_wait", base + o_full + 8 * st, c // stages % 2)
                    do("ssd_mma_kmajor", T.address_of(cb[0]), at + o_C, at + 8192)
                    if i > 0:
                        do("ssd_y_sent", base + o_sfree + 8 * ((c - ny) % ring))
                    do("ssd_wait", base + o_sfull + 8 * slot, c // ring % 2)
                    do("ssd_mma_kmajor", T.address_of(out[0]), at + o_C, base + o_ring + slot * ring_bytes)
                    do("ssd_wait", base + o_cfull + 8 * kc, c // factors % 2)
                    do("SSD_WAIT", 1)
                    do("ssd_landed", T.address_of(cb[0]), 32)
                    do("ssd_weights", T.address_of(m[0]), T.address_of(cb[0]), scal, w, T.address_of(scale[0]))
                    do("SSD_WAIT", 0)
                    do("ssd_landed", T.address_of(out[0]), 32)
                    do("ssd_rows_scale", T.address_of(out[0]), scal, w, T.address_of(scale[0]), base + o_side + slot * 16)
                    do("ssd_mma_mx", T.address_of(out[0]), T.address_of(m[0]), at)
                    do("ssd_arrive_warp", base + o_cfree + 8 * kc)
                    do("SSD_WAIT", 0)
                    do("ssd_landed", T.address_of(out[0]), 32)
                    do("ssd_held", T.address_of(m[0]))
                    do("ssd_arrive_warp", base + o_free + 8 * st)
                    # The copy of the state has been read: its place takes the rows of y.
                    do("ssd_y_together", 2 + yw)
                    do("ssd_y_stage", T.address_of(out[0]), mine, T.address_of(scale[0]))
                    do("ssd_y_send", out_tiles(y), mine, p0, P, h, (first + c) * 64 + w * 16, b)
                do("ssd_y_finish")

    return k.complete(fused_main)
