"""One token: state = exp(v A) state + v x B in place, y = (C . state + D x) z sigmoid(z); the state is in registers, read and written once.

v = dt + dt_bias, log1p(exp(v)) in its place where it is <= ``softplus_to`` (20, or -inf for no softplus). A (H,P,N) float32, dt
(B,H,P), D and dt_bias (H,P) float32; ``tied``: A, dt and dt_bias are one value a head. x, z (B,H,P), Bm, Cm (B,G,N) dtype. state
(M,H,P,N) state_dtype, strided; row b has slot ``slots[b]`` (int32) or ``slots64[b]`` (int64) or, without them, b of it. A slot outside
0 ... M - 1 is a pad: its state is not accessed, its y is 0. y (B,H,P) float32, or y_half in dtype: one of them is given. The other
tensors of OPTIONAL may be left out: D and dt_bias count as 0, the gate as 1.

LANES lanes hold one row (d_head) of the state, VECTORS times 16 bytes each; a lane has ROWS such rows, whose loads are all in flight
at once. Of these rows it owns one, whose dt, x, D, z and y it alone reads and writes. A CTA takes ``per`` batch rows one after the
other, so that a full A is read once for them.

From sm_90 on a kernel waits for the one before it by itself (catalog.OVERLAPPING), so that its launch may overlap that one's end.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

OPTIONAL = ("D", "dt_bias", "slots", "slots64", "y", "y_half", "z")

#: How a 32-bit word becomes floats, and floats, rounded to nearest, a word.
UNPACK = {
    "float32": "f[0] = __uint_as_float(w);",
    "bfloat16": "f[0] = __uint_as_float(w << 16); f[1] = __uint_as_float(w & 0xffff0000u);",
    "float16": 'asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(f[0]), "=f"(f[1]) : "r"(w));',
}
PACK = {
    "float32": "w = __float_as_uint(f[0]);",
    "bfloat16": 'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(f[1]), "f"(f[0]));',
    "float16": 'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(f[1]), "f"(f[0]));',
}

SOURCE = r"""
DI void ssd_unpack_state(float* f, unsigned w) { UNPACK_STATE }
DI void ssd_unpack(float* f, unsigned w) { UNPACK }
DI unsigned ssd_pack_state(const float* f) { unsigned w; PACK_STATE return w; }
#if OVERLAP
// The CTA may be there while the kernel before it in the stream still runs: nothing is read before that one has ended and its writes are
// seen, and not through the read-only path, which takes memory for constant as long as a kernel lasts. Then the next one may come.
#define READ_ONLY ""
DI void ssd_begin() { asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory"); }
#else
#define READ_ONLY ".nc"
DI void ssd_begin() {}
#endif
// Loads are volatile, so that none moves behind the branch of softplus, which waits for one of them; and predicated: no other branches.
#define READ "{ .reg .pred p; setp.ne.s32 p, %"
DI void ssd_load4(unsigned* w, const void* p, bool real) {
  w[0] = w[1] = w[2] = w[3] = 0;
  asm volatile(READ "5, 0; @p ld.global" LOAD_HINT ".v4.b32 {%0, %1, %2, %3}, [%4]; }"
    : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3]) : "l"(p), "r"((int)real));
}
DI void ssd_store4(void* p, const unsigned* w, bool real) {
  asm volatile(READ "5, 0; @p st.global" STORE_HINT ".v4.b32 [%4], {%0, %1, %2, %3}; }"
    :: "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(p), "r"((int)real) : "memory");
}
DI float ssd_get(const float* p, bool real) {
  unsigned w = 0;
  asm volatile(READ "2, 0; @p ld.global" READ_ONLY ".b32 %0, [%1]; }" : "+r"(w) : "l"(p), "r"((int)real));
  return __uint_as_float(w);
}
DI int ssd_get(const int* p) {
  int v;
  asm volatile("ld.global" READ_ONLY ".b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
template <typename L> DI L ssd_get(const L* p) {
  long long v;
  asm volatile("ld.global" READ_ONLY ".b64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}
DI float4 ssd_get4(const float* p) {
  float4 q;
  asm volatile("ld.global" READ_ONLY ".v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(q.x), "=f"(q.y), "=f"(q.z), "=f"(q.w) : "l"(p));
  return q;
}
DI unsigned ssd_get16(const void* p, bool real) {
  unsigned short w = 0;
  asm volatile(READ "2, 0; @p ld.global" READ_ONLY ".b16 %0, [%1]; }" : "+h"(w) : "l"(p), "r"((int)real));
  return w;
}
template <typename E> DI float ssd_get(const E* p, bool real) {
  float f[2];
  ssd_unpack(f, ssd_get16(p, real));
  return f[0];
}
// WIDTH 16-bit elements
#if WIDTH == 4
DI void ssd_words_load(unsigned* w, const void* p, bool real) {
  w[0] = w[1] = 0;
  asm volatile(READ "3, 0; @p ld.global" READ_ONLY ".v2.b32 {%0, %1}, [%2]; }" : "+r"(w[0]), "+r"(w[1]) : "l"(p), "r"((int)real));
}
#else
DI void ssd_words_load(unsigned* w, const void* p, bool real) {
  w[0] = w[1] = w[2] = w[3] = 0;
  asm volatile(READ "5, 0; @p ld.global" READ_ONLY ".v4.b32 {%0, %1, %2, %3}, [%4]; }"
    : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3]) : "l"(p), "r"((int)real));
}
#endif
// column of a lane's vector v, and whether (row r, vector v) of a lane's part of a (d_head, d_state) matrix is inside
#define COLUMN(v) (WIDTH * (lane + (v) * LANES))
#define IN(r, v) (FULL || ((r) * STEP < rows && COLUMN(v) < NCOLS))
template <typename L, typename S> DI void ssd_state_load(L slot, unsigned* d, const S* p, long long pitch, int lane, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int v = 0; v < VECTORS; v++) ssd_load4(d + (r * VECTORS + v) * 4, p + r * STEP * pitch + COLUMN(v), slot >= 0 && IN(r, v));
  __syncwarp();  // nothing is loaded before them
}
template <typename L, typename S> DI void ssd_state_store(L slot, S* p, const unsigned* d, long long pitch, int lane, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int v = 0; v < VECTORS; v++) ssd_store4(p + r * STEP * pitch + COLUMN(v), d + (r * VECTORS + v) * 4, slot >= 0 && IN(r, v));
}
// A log2(e). -inf becomes a finite rate that decays to 0 all the same: 0 * -inf would be NaN where dt is 0.
DI float ssd_rate(float a) { return a == __int_as_float(0xff800000) ? -1e30f : a * 1.4426950408889634f; }
DI void ssd_rates_load(float* d, const float* p, long long pitch, int lane, int rows) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
      for (int j = 0; j < WIDTH; j += 4) {
        float4 q = IN(r, v) ? ssd_get4(p + r * STEP * pitch + COLUMN(v) + j) : make_float4(0.f, 0.f, 0.f, 0.f);
        float* f = d + (r * VECTORS + v) * WIDTH + j;
        f[0] = ssd_rate(q.x); f[1] = ssd_rate(q.y); f[2] = ssd_rate(q.z); f[3] = ssd_rate(q.w);
      }
}
// WIDTH elements of B and of C a vector, two a word; one by one where they are not aligned.
template <typename E> DI void ssd_vectors_load(unsigned* bw, unsigned* cw, const E* pb, const E* pc, int lane) {
  bool wide = (((unsigned long long)pb | (unsigned long long)pc) & (2 * WIDTH - 1)) == 0;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    bool real = FULL || COLUMN(v) < NCOLS;
    const E *sb = pb + COLUMN(v), *sc = pc + COLUMN(v);
    unsigned *b = bw + v * WIDTH / 2, *c = cw + v * WIDTH / 2;
    if (wide) {
      ssd_words_load(b, sb, real);
      ssd_words_load(c, sc, real);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i++) {
        b[i] = ssd_get16(sb + 2 * i, real) | ssd_get16(sb + 2 * i + 1, real) << 16;
        c[i] = ssd_get16(sc + 2 * i, real) | ssd_get16(sc + 2 * i + 1, real) << 16;
      }
    }
  }
}
// The slot of batch row b, -1 for a pad.
template <typename L> DI L ssd_slot(const int* slots, L pitch, const L* wide, L wide_pitch, int b, int pool) {
  L slot = slots ? (L)ssd_get(slots + b * pitch) : wide ? ssd_get(wide + b * wide_pitch) : (L)b;
  return slot >= 0 && slot < pool ? slot : (L)-1;
}
// An element of a tensor that may not be given: no address is worked out where it is not.
template <typename E, typename L> DI float ssd_find(const E* p, bool inside, int h, L s, int q, L t, int b = 0, L r = 0) {
  return p ? ssd_get(p + (h * s + q * t + b * r), inside) : 0.f;
}
// Opaque to the compiler: keeps it from working out every address ahead of the loads of the state.
DI int ssd_late(int v) { asm volatile("" : "+r"(v)); return v; }
DI float ssd_time(float v, float softplus_to) { return v > softplus_to ? v : log1pf(expf(v)); }
DI float ssd_exp2(float v) { float e; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v)); return e; }
// One rate a head or one an element: the same operations, so the same bits.
DI float ssd_decay(float dt, float a) { return ssd_exp2(__fmul_rn(dt, a)); }
// Sums of ROWS values over LANES lanes: every step halves either the values a lane keeps or, when one is left, the lanes.
// Afterwards a lane holds the sum of the row it owns, lane / SHARE.
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
// dt and x: of the row that the lane owns. Updates the lane's part of the state; C . state of that row.
DI float ssd_step(unsigned* st, const float* a, float decay, float dt, float x, const unsigned* bw, const unsigned* cw, int lane) {
  float dot[ROWS], own = dt * x, bv[WIDTH * VECTORS], cv[WIDTH * VECTORS];
#pragma unroll
  for (int i = 0; i < WIDTH * VECTORS; i += 2) {
    ssd_unpack(bv + i, bw[i / 2]);
    ssd_unpack(cv + i, cw[i / 2]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float u = __shfl_sync(0xffffffffu, own, r * SHARE, LANES), d = TIED ? 0.f : __shfl_sync(0xffffffffu, dt, r * SHARE, LANES);
    dot[r] = 0.f;
#pragma unroll
    for (int i = 0; i < WIDTH * VECTORS; i += PACKED) {
      unsigned* w = st + (r * WIDTH * VECTORS + i) / PACKED;
      float f[PACKED];
      ssd_unpack_state(f, *w);
#pragma unroll
      for (int j = 0; j < PACKED; j++) {
        f[j] = __fmaf_rn(f[j], TIED ? decay : ssd_decay(d, a[r * WIDTH * VECTORS + i + j]), __fmul_rn(u, bv[i + j]));
        dot[r] = __fmaf_rn(f[j], cv[i + j], dot[r]);
      }
      *w = ssd_pack_state(f);
    }
  }
  return ssd_sum(dot, lane);
}
template <typename E> DI float ssd_gated(float y, float skip, float x, const E* given, float z) {
  y = __fmaf_rn(skip, x, y);
  return given ? y * __fdividef(z, 1.f + expf(-z)) : y;
}
// y of row q, as float or as E.
template <typename E, typename L> DI void ssd_put(bool real, float value, int b, int h, int q, float* y, L yb, L yh, L yq, E* y_half, L hb,
  L hh, L hq) {
  if (!real) return;
  if (y) y[b * yb + h * yh + q * yq] = value;
  else y_half[b * hb + h * hh + q * hq] = (E)value;
}
"""

THREADS = 128


def do(name: str, *args: Any) -> Any:
    return T.evaluate(T.call_extern("handle", name, *args))


def real(name: str, *args: Any) -> Any:
    return T.call_extern("float32", name, *args)


def program(*, arch: str, P: int, N: int, dtype: str, state_dtype: str, tied: bool) -> Any:
    packed = 1 if state_dtype == "float32" else 2
    width = 4 * packed  # columns in 16 bytes of the state
    lanes = 4 // packed
    while lanes < min(32, N // width):
        lanes *= 2
    vectors = k.ceildiv(N, width * lanes)
    rows = min(lanes, max(1, (8 if tied else 4) // vectors))
    step = 32 // lanes  # rows that a warp holds side by side
    share = lanes // rows  # lanes that own the same row; the first writes y
    block_rows = THREADS // 32 * step * rows
    tiles = k.ceildiv(P, block_rows)
    full = P % block_rows == 0 and N == width * lanes * vectors
    # Measured on an H200: evict-first hints pay where a full A wants to stay in L2, and cost 1 to 2 % where it does not exist.
    hint = '""' if tied else '".cs"'
    names = {
        "DI": "static __device__ __forceinline__",
        "NCOLS": N,
        "ROWS": rows,
        "STEP": step,
        "LANES": lanes,
        "SHARE": share,
        "VECTORS": vectors,
        "PACKED": packed,
        "WIDTH": width,
        "FULL": int(full),
        "TIED": int(tied),
        "OVERLAP": int(arch not in ("sm_80", "sm_86", "sm_89")),
        "LOAD_HINT": hint,
        "STORE_HINT": hint,
        "UNPACK": UNPACK[dtype],
        "UNPACK_STATE": UNPACK[state_dtype],
        "PACK_STATE": PACK[state_dtype],
    }
    source = "".join(f"#define {name} {value}\n" for name, value in names.items()) + SOURCE
    # CTAs an SM, which limits registers: as many as spill none. Bytes in flight count for more: 16-bit states keep their rows instead.
    ctas = 4 if packed == 2 else 6 if tied or arch not in ("sm_80", "sm_86", "sm_89") else 5
    rates = 1 if tied else rows * vectors * width
    B, H, G, M = k.dims("B H G M")

    @T.prim_func
    def recurrent(
        A: k.strided("A", (H, P, N), "float32", 1 if tied else 4),
        dt: k.strided("dt", (B, H, P), "float32", last=True),
        x: k.strided("x", (B, H, P), dtype, last=True),
        Bm: k.strided("Bm", (B, G, N), dtype),
        Cm: k.strided("Cm", (B, G, N), dtype),
        state: k.strided("state", (M, H, P, N), state_dtype, width),
        D: k.strided("D", (H, P), "float32", last=True),
        z: k.strided("z", (B, H, P), dtype, last=True),
        dt_bias: k.strided("dt_bias", (H, P), "float32", last=True),
        slots: k.strided("slots", (B,), "int32", last=True),
        slots64: k.strided("slots64", (B,), "int64", last=True),
        y: k.strided("y", (B, H, P), "float32", last=True),
        y_half: k.strided("y_half", (B, H, P), dtype, last=True),
        per: T.int32,
        per_group: T.int32,
        softplus_to: T.float32,
    ):
        with T.Kernel((B if tied else T.ceildiv(B, per)) * H * tiles, threads=THREADS) as bx:
            T.import_source(source)
            k.at_least(ctas)
            tx = T.get_thread_binding()
            lane = T.alloc_var("int32", init=tx % lanes)
            hp = T.alloc_var("int32", init=T.truncmod(bx, H * tiles))
            b0 = T.alloc_var("int32", init=T.truncdiv(bx, H * tiles) * (1 if tied else per))
            h = T.alloc_var("int32", init=T.truncdiv(hp, tiles))
            p = T.alloc_var("int32", init=(hp - h * tiles) * block_rows + tx // 32 * (step * rows) + tx % 32 // lanes)
            own = T.alloc_var("int32", init=p + tx % lanes // share * step)
            late = T.alloc_var("int32", init=0)
            g = T.alloc_var("int32", init=0)
            s = T.alloc_local((rows * vectors * 4,), "uint32")
            a = T.alloc_local((rates,), "float32")
            bw = T.alloc_local((vectors * width // 2,), "uint32")
            cw = T.alloc_local((vectors * width // 2,), "uint32")
            slot = T.alloc_var("int64", init=0)
            v, xv, rate, bias, skip, zv, total = (T.alloc_var("float32", init=0.0) for _ in range(7))
            do("ssd_begin")
            if not tied:
                do("ssd_rates_load", T.address_of(a[0]), T.address_of(A[h, p, 0]), A.strides[1], lane, P - p)
            for i in k.rolled(1 if tied else T.min(per, B - b0)):
                b = b0 + i
                slot = T.call_extern("int64", "ssd_slot", slots.data, slots.strides[0], slots64.data, slots64.strides[0], b, M)
                do("ssd_state_load", slot, T.address_of(s[0]), T.address_of(state[slot, h, p, 0]), state.strides[2], lane, P - p)
                late = T.call_extern("int32", "ssd_late", h)
                own = T.call_extern("int32", "ssd_late", own)
                g = T.truncdiv(late, per_group)
                inside = True if full else own < P
                here, time = (True, 0) if tied else (inside, own)
                do(
                    "ssd_vectors_load",
                    T.address_of(bw[0]),
                    T.address_of(cw[0]),
                    T.address_of(Bm[b, g, 0]),
                    T.address_of(Cm[b, g, 0]),
                    lane,
                )
                v = real("ssd_get", T.address_of(dt[b, late, time]), here)
                xv = real("ssd_get", T.address_of(x[b, late, own]), inside)
                rate = real("ssd_get", T.address_of(A[late, 0, 0]), tied)
                bias = real("ssd_find", dt_bias.data, here, late, dt_bias.strides[0], time, dt_bias.strides[1])
                skip = real("ssd_find", D.data, inside, late, D.strides[0], own, D.strides[1])
                zv = real("ssd_find", z.data, inside, late, z.strides[1], own, z.strides[2], b, z.strides[0])
                v = real("ssd_time", v + bias, softplus_to)
                rate = real("ssd_decay", v, real("ssd_rate", rate))
                total = real(
                    "ssd_step", T.address_of(s[0]), T.address_of(a[0]), rate, v, xv, T.address_of(bw[0]), T.address_of(cw[0]), lane
                )
                do("ssd_state_store", slot, T.address_of(state[slot, h, p, 0]), T.address_of(s[0]), state.strides[2], lane, P - p)
                total = real("ssd_gated", total, skip, xv, z.data, zv)
                do(
                    "ssd_put",
                    T.And(lane % share == 0, inside),
                    T.if_then_else(slot >= 0, total, 0.0),
                    b,
                    late,
                    own,
                    T.address_of(y[0, 0, 0]),
                    *y.strides,
                    T.address_of(y_half[0, 0, 0]),
                    *y_half.strides,
                )

    return k.complete(recurrent)
