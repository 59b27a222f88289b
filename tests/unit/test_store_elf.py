"""The arch in a cubin's header. The flags are those of real cubins (NVRTC and nvJitLink 12.9, NVRTC 13.5)."""

from __future__ import annotations

import struct

import pytest

from tileops.store import elf

MEASURED = [
    (7, 0x500550, None, "sm_80"),
    (7, 0x560556, None, "sm_86"),
    (7, 0x590559, None, "sm_89"),
    (7, 0x5A055A, None, "sm_90"),
    (7, 0x5A0D5A, None, "sm_90a"),
    (8, 0x6006402, "sm_100", "sm_100"),
    (8, 0x600640A, "sm_100a", "sm_100a"),
    (8, 0x6006402, "sm_100f", "sm_100f"),
    (8, 0x6007802, "sm_120", "sm_120"),
    (8, 0x600780A, "sm_120a", "sm_120a"),
    (8, 0x600780A, None, "sm_120a"),
    (8, 0x6005004, "sm_80", "sm_80"),
    (8, 0x6005A04, "sm_90", "sm_90"),
    (8, 0x6005A04, "sm_90a", "sm_90a"),  # 13.5 sets no bit for `a`: only the note tells
    (8, 0x6006402, "sm_100a", "sm_100a"),
]


def image(abi, flags, noted=None, machine=190):
    """An ELF file with a section for names and, where ``noted``, the assembler's note."""
    names = b"\0.shstrtab\0.note.nv.tkinfo\0"
    note = b"NVIDIA Corp\0ptxas\0Cuda compilation tools, release 13.5\0-v  -O 3 -arch %s -c \0" % noted.encode() if noted else b""
    identity = b"\x7fELF\x02\x01\x01" + (b"\x33" if abi == 7 else b"\x41") + bytes([abi]) + bytes(7)
    at = 64 + len(names) + len(note)
    sections = [(0,) * 10, (1, 3, 0, 0, 64, len(names), 0, 0, 1, 0)]
    if noted:
        sections.append((11, 7, 0, 0, 64 + len(names), len(note), 0, 0, 4, 0))
    header = struct.pack("<16sHHIQQQIHHHHHH", identity, 2, machine, 1, 0, 0, at, flags, 64, 56, 0, 64, len(sections), 1)
    return header + names + note + b"".join(struct.pack("<IIQQQQIIQQ", *s) for s in sections)


@pytest.mark.parametrize(("abi", "flags", "noted", "arch"), MEASURED)
def test_measured_headers(abi, flags, noted, arch):
    assert elf.arch(image(abi, flags, noted)) == arch


def test_a_note_that_contradicts_the_header_is_an_error():
    with pytest.raises(ValueError, match=r"sm_100.*sm_90a"):
        elf.arch(image(8, 0x600640A, "sm_90a"))


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"PTX" * 100, b"\x7fELF\x01" + bytes(100), image(7, 0x500550, machine=62)])
def test_what_is_no_cubin_is_an_error(data):
    with pytest.raises(ValueError, match=r"ELF|machine"):
        elf.arch(data)


@pytest.mark.parametrize("made", [image(8, 0x600640A, "sm_100a"), image(7, 0x5A0D5A)])
def test_no_cut_or_flip_is_a_crash(made):
    for length in range(len(made)):
        try:
            elf.arch(made[:length])
        except ValueError:
            pass
    for position in range(len(made)):
        for value in (0, 0xFF):
            try:
                elf.arch(made[:position] + bytes([value]) + made[position + 1 :])
            except ValueError:
                pass
