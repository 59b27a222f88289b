"""One token: state = exp(dt A) state + dt x B in place, y = C . state; the state is in registers, read once and written once.

A (H,P,N) float32, or one rate a head (tied); dt (B,H,P) float32, or one a head (tied); x (B,H,P), Bm, Cm (B,G,N) dtype;
state (B,H,P,N) float32, strided -> y (B,H,P) float32.
LANES lanes hold one row (d_head) of the state, VECTORS times 4 columns each; a lane has ROWS such rows, whose loads are
all in flight at once. A CTA takes ``per`` batch rows one after the other, so that a full A is read once for them.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

SOURCE = r"""
#define DI static __device__ __forceinline__
// element (row r, vector v) of a lane's part of a (d_head, d_state) matrix: is it inside?
#define IN(r, v) (FULL || ((r) * STEP < rows && 4 * (lane + (v) * LANES) < NCOLS))
DI void ssd_set(float* d, float4 q) { d[0] = q.x; d[1] = q.y; d[2] = q.z; d[3] = q.w; }
DI void ssd_state_load(float* d, const float* p, long long pitch, int lane, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const float4* s = (const float4*)(p + r * STEP * pitch + 4 * (lane + v * LANES));
      ssd_set(d + (r * VECTORS + v) * 4, IN(r, v) ? STATE_LOAD : make_float4(0.f, 0.f, 0.f, 0.f));
    }
}
DI void ssd_state_store(float* p, const float* d, long long pitch, int lane, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const float* q = d + (r * VECTORS + v) * 4;
      float4* s = (float4*)(p + r * STEP * pitch + 4 * (lane + v * LANES));
      float4 value = make_float4(q[0], q[1], q[2], q[3]);
      if (IN(r, v)) STATE_STORE;
    }
}
// A log2(e). -inf becomes a finite rate that decays to 0 all the same: 0 * -inf would be NaN where dt is 0.
DI float ssd_rate(float a) { return a == __int_as_float(0xff800000) ? -1e30f : a * 1.4426950408889634f; }
DI void ssd_rates_load(float* d, const float* p, long long pitch, int lane, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      float4 q = IN(r, v) ? __ldg((const float4*)(p + r * STEP * pitch + 4 * (lane + v * LANES))) : make_float4(0.f, 0.f, 0.f, 0.f);
      ssd_set(d + (r * VECTORS + v) * 4, make_float4(ssd_rate(q.x), ssd_rate(q.y), ssd_rate(q.z), ssd_rate(q.w)));
    }
}
template <typename E> DI void ssd_vector_load(float* d, const E* p, int lane) {
#pragma unroll
  for (int v = 0; v < VECTORS; v++)
#pragma unroll
    for (int i = 0; i < 4; i++) d[4 * v + i] = (FULL || 4 * (lane + v * LANES) < NCOLS) ? (float)p[4 * (lane + v * LANES) + i] : 0.f;
}
DI float ssd_exp2(float v) { float e; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v)); return e; }
// One rate a head or one an element: the same operations, so the same bits.
DI float ssd_decay(float dt, float a) { return ssd_exp2(__fmul_rn(dt, a)); }
// Sums of ROWS values over LANES lanes: every step halves either the values a lane keeps or, when one is left, the lanes.
// Afterwards a lane holds the sum of row ssd_row(lane).
DI float ssd_sum(float* v, int lane) {
  int o = LANES / 2;
#pragma unroll
  for (int n = ROWS; n > 1; n /= 2, o /= 2) {
    bool up = lane & o;
#pragma unroll
    for (int i = 0; i < n / 2; i++) {
      float send = up ? v[i] : v[i + n / 2], keep = up ? v[i + n / 2] : v[i];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, send, o);
    }
  }
#pragma unroll
  for (; o > 0; o /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], o);
  return v[0];
}
DI int ssd_row(int lane) {
  int row = 0, o = LANES / 2;
#pragma unroll
  for (int n = ROWS; n > 1; n /= 2, o /= 2) row += (lane & o) ? n / 2 : 0;
  return row;
}
template <typename E> DI void ssd_step(float* y, float* st, const float* a, float decay, const float* dt, const E* x, const float* bv,
  const float* cv, int lane, int rows) {
  float dot[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    bool real = FULL || r * STEP < rows;
    float d = TIED ? *dt : (real ? dt[r * STEP] : 0.f), u = d * (real ? (float)x[r * STEP] : 0.f);
    dot[r] = 0.f;
#pragma unroll
    for (int i = 0; i < 4 * VECTORS; i++) {
      float s = __fmaf_rn(st[r * 4 * VECTORS + i], TIED ? decay : ssd_decay(d, a[r * 4 * VECTORS + i]), __fmul_rn(u, bv[i]));
      st[r * 4 * VECTORS + i] = s;
      dot[r] = __fmaf_rn(s, cv[i], dot[r]);
    }
  }
  float total = ssd_sum(dot, lane);
  int row = ssd_row(lane);
  if ((lane & (LANES / ROWS - 1)) == 0 && (FULL || row * STEP < rows)) y[row * STEP] = total;
}
"""

THREADS = 128


def do(name: str, *args: Any) -> Any:
    return T.evaluate(T.call_extern("handle", name, *args))


def program(*, P: int, N: int, dtype: str, tied: bool) -> Any:
    lanes = 4
    while lanes < min(32, N // 4):
        lanes *= 2
    vectors = k.ceildiv(N, 4 * lanes)
    rows = min(lanes, max(1, (8 if tied else 4) // vectors))
    step = 32 // lanes  # rows that a warp holds side by side
    block_rows = THREADS // 32 * step * rows
    tiles = k.ceildiv(P, block_rows)
    full = P % block_rows == 0 and N == 4 * lanes * vectors
    # Measured on an H200: evict-first hints pay where a full A wants to stay in L2, and cost 1 to 2 % where it does not exist.
    load, store = ("*s", "*s = value") if tied else ("__ldcs(s)", "__stcs(s, value)")
    names = {
        "NCOLS": N,
        "ROWS": rows,
        "STEP": step,
        "LANES": lanes,
        "VECTORS": vectors,
        "FULL": int(full),
        "TIED": int(tied),
        "STATE_LOAD": load,
        "STATE_STORE": store,
    }
    source = "".join(f"#define {name} {value}\n" for name, value in names.items()) + SOURCE
    count = rows * vectors * 4
    B, H, G = k.dims("B H G")

    @T.prim_func
    def recurrent(
        A: k.strided("A", (H, P, N), "float32", 1 if tied else 4),
        dt: k.strided("dt", (B, H, P), "float32"),
        x: k.strided("x", (B, H, P), dtype),
        Bm: k.strided("Bm", (B, G, N), dtype),
        Cm: k.strided("Cm", (B, G, N), dtype),
        state: k.strided("state", (B, H, P, N), "float32", 4),
        y: T.Tensor((B, H, P), "float32"),
        per: T.int32,
    ):
        with T.Kernel(T.ceildiv(B, per) * H * tiles, threads=THREADS) as bx:
            T.import_source(source)
            tx = T.get_thread_binding()
            lane = T.alloc_var("int32", init=tx % lanes)
            hp = T.alloc_var("int32", init=T.truncmod(bx, H * tiles))
            b0 = T.alloc_var("int32", init=T.truncdiv(bx, H * tiles) * per)
            h = T.alloc_var("int32", init=T.truncdiv(hp, tiles))
            p = T.alloc_var("int32", init=(hp - h * tiles) * block_rows + tx // 32 * (step * rows) + tx % 32 // lanes)
            g = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(H, G)))
            s = T.alloc_local((count,), "float32")
            a = T.alloc_local((count,), "float32")
            bv = T.alloc_local((vectors * 4,), "float32")
            cv = T.alloc_local((vectors * 4,), "float32")
            decay = T.alloc_var("float32", init=0.0)
            if not tied:
                do("ssd_rates_load", T.address_of(a[0]), T.address_of(A[h, p, 0]), A.strides[1], lane, P - p)
            for i in T.serial(T.min(per, B - b0)):
                b = b0 + i
                do("ssd_state_load", T.address_of(s[0]), T.address_of(state[b, h, p, 0]), state.strides[2], lane, P - p)
                do("ssd_vector_load", T.address_of(bv[0]), T.address_of(Bm[b, g, 0]), lane)
                do("ssd_vector_load", T.address_of(cv[0]), T.address_of(Cm[b, g, 0]), lane)
                if tied:
                    decay = T.call_extern("float32", "ssd_decay", dt[b, h, 0], T.call_extern("float32", "ssd_rate", A[h, 0, 0]))
                do(
                    "ssd_step",
                    T.address_of(y[b, h, p]),
                    T.address_of(s[0]),
                    T.address_of(a[0]),
                    decay,
                    T.address_of(dt[b, h, 0 if tied else p]),
                    T.address_of(x[b, h, p]),
                    T.address_of(bv[0]),
                    T.address_of(cv[0]),
                    lane,
                    P - p,
                )
                do("ssd_state_store", T.address_of(state[b, h, p, 0]), T.address_of(s[0]), state.strides[2], lane, P - p)

    return k.complete(recurrent)
