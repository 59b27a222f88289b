"""Options that change the code a TileLang program becomes. Part of every key (config.SHARED_SOURCES). Stdlib only."""

#: TileLang pass options (tilelang.PassConfigKey values), the same for every kernel.
PASS_CONFIGS: dict[str, object] = {
    "tl.disable_warp_specialized": True,
    "tl.disable_tma_lower": True,
}

#: NVRTC options besides arch and include paths. Exact arithmetic: no fast-math, no flush-to-zero.
NVRTC_FLAGS = ("-default-device", "-std=c++17")

#: nvJitLink options besides arch.
LINK_FLAGS = ("-O3",)
