"""Reads the GPU architecture out of a cubin's ELF header, with no CUDA tool.

Two layouts are about (measured on NVRTC and nvJitLink 12.9 and NVRTC 13.5, ``e_flags`` at offset 48):

======  ==========  ============  =============================  ========================
e_ident OSABI (7)   ABI ver. (8)  SM number                      accelerated (``a``) code
======  ==========  ============  =============================  ========================
        0x33        7             bits 0-7 (sm_90: 0x5a055a)     bit 11 (sm_90a: 0x5a0d5a)
        0x41        8             bits 8-15 (sm_100: 0x6006402)  bit 3 (sm_100a: 0x600640a)
======  ==========  ============  =============================  ========================

13.5 leaves bit 3 clear even for ``a`` code (sm_90 and sm_90a: 0x6005a04); there the assembler's command line in the section
``.note.nv.tkinfo`` (``-arch sm_90a``) tells them apart, so the note wins where it is present.
"""

from __future__ import annotations

import re
import struct

_CUDA_MACHINE = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOTE_ARCH = re.compile(rb"-arch[= ](sm_\d+[af]?)\b")


def arch(cubin: bytes) -> str:
    """The arch a cubin is code for, as ``sm_90a``. Raises ValueError with the reason where it is no cubin this can read."""
    if len(cubin) < _HEADER.size or cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    header = _HEADER.unpack_from(cubin)
    identity, machine, sections_at, flags = header[0], header[2], header[6], header[7]
    section_size, section_count, names_index = header[11:14]
    if machine != _CUDA_MACHINE:
        raise ValueError(f"ELF machine {machine}, a cubin has {_CUDA_MACHINE}")
    if identity[8] <= 7:
        number, accelerated = flags & 0xFF, bool(flags & 0x800)
    else:
        number, accelerated = flags >> 8 & 0xFF, bool(flags & 0x8)
    plain = f"sm_{number}"
    noted = _noted_archs(cubin, sections_at, section_size, section_count, names_index)
    for name in noted:
        if name.rstrip("af") != plain:
            raise ValueError(f"the header says {plain}, the assembler's note {name}")
    return noted[-1] if noted else plain + "a" * accelerated


def _noted_archs(cubin: bytes, at: int, size: int, count: int, names_index: int) -> list[str]:
    if size != _SECTION.size or at + size * count > len(cubin) or names_index >= count:
        return []
    sections = [_SECTION.unpack_from(cubin, at + size * i) for i in range(count)]
    names_at = sections[names_index][4]
    found: list[str] = []
    for section in sections:
        if cubin.startswith(b".note.nv.tkinfo\0", names_at + section[0]):
            found += [m.decode() for m in _NOTE_ARCH.findall(cubin[section[4] : section[4] + section[5]])]
    return found
