"""An artifact is launched from its record alone: json, cuda-bindings and torch's memory, none of this package's code.

What a record promises to other people's loaders is tested by being one: the arithmetic of grids and parameters is
evaluated here with a few lines that follow the grammar in docs/artifacts.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import struct
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ARTIFACTS = Path(__file__).parents[2] / "artifacts"


def _value(text: str, sizes: dict[str, int]) -> int:
    assert re.fullmatch(r"[\w.+\-*/(), ]+", text), text
    names = {name.replace(".", "_"): value for name, value in sizes.items()}
    names.update(ceildiv=lambda a, b: -(-a // b), min=min, max=max)
    return int(eval(re.sub(r"(?<=\w)\.(?=\w)", "_", text), {"__builtins__": {}}, names))


def _record(arch: str, kernel: str, **config: object) -> tuple[dict, bytes]:
    manifest = json.loads((ARTIFACTS / arch / "manifest.json").read_text())
    for key, record in manifest["records"].items():
        if record["kernel"] == kernel and all(record["config"][k] == v for k, v in config.items()):
            cubin = (ARTIFACTS / arch / f"{key}.cubin").read_bytes()
            assert hashlib.sha256(cubin).hexdigest() == record["cubin_sha256"]
            return record, cubin
    raise AssertionError(f"no {kernel} with {config} in {ARTIFACTS / arch}")


def _arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _launch(record: dict, cubin: bytes, tensors: dict[str, torch.Tensor], sizes: dict[str, float]) -> None:
    """Launches the kernel on the current stream and waits. Tensors that the record has as optional may be missing."""
    from cuda.bindings import driver

    def ok(result):
        assert int(result[0]) == 0, result
        return result[1] if len(result) == 2 else result[1:]

    sizes = dict(sizes)
    for name, tensor in tensors.items():
        sizes.update({f"{name}.stride{i}": s for i, s in enumerate(tensor.stride())})
    for name in set(record.get("optional", ())) - set(tensors):
        sizes.update({f"{name}.stride{i}": 0 for i in range(5)})
    values, addresses = [], []
    for param in record["params"]:
        if param["kind"] == "pointer":
            tensor = tensors.get(param["bind"])
            assert tensor is not None or param["bind"] in record["optional"]
            address = 0 if tensor is None else tensor.data_ptr()
            assert address % record["alignment"][param["bind"]] == 0
            values.append(ctypes.c_uint64(address))
        elif param["kind"] == "float32":
            values.append(ctypes.c_float(struct.unpack("<f", struct.pack("<f", sizes[param["bind"]]))[0]))
        else:
            kind = {"int32": ctypes.c_int32, "int64": ctypes.c_int64}[param["kind"]]
            values.append(kind(_value(param["bind"], sizes)))
        addresses.append(ctypes.addressof(values[-1]))
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    library = ok(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    function = ok(driver.cuKernelGetFunction(ok(driver.cuLibraryGetKernel(library, record["symbol"].encode()))))
    grid = [_value(g, sizes) for g in record["grid"]]
    stream = torch.cuda.current_stream().cuda_stream
    ok(driver.cuLaunchKernel(function, *grid, *record["block"], record["dynamic_smem"], stream, ctypes.addressof(pointers), 0))
    torch.cuda.synchronize()


def test_state_passing_runs_from_its_record_alone():
    record, cubin = _record(_arch(), "state_passing", aligned=True)
    batch, chunks, heads, m = 2, 5, 3, 64 * 128
    generator = torch.Generator("cuda").manual_seed(1)
    states = torch.randn(batch, chunks, heads, m, device="cuda", generator=generator)
    decay = -torch.rand(batch, heads, chunks, device="cuda", generator=generator)
    initial = torch.randn(batch, heads, m, device="cuda", generator=generator)
    prev = torch.full((batch, chunks, heads, m), float("nan"), device="cuda")
    final = torch.full((batch, heads, m), float("nan"), device="cuda")
    tensors = {"states": states, "dA_chunk": decay, "initial_states": initial, "prev_states": prev, "final_states": final}
    _launch(record, cubin, tensors, {"B": batch, "C": chunks, "H": heads, "M": m})

    running, expected = initial.double(), []
    for c in range(chunks):
        expected.append(running)
        running = running * decay[:, :, c, None].double().exp() + states[:, c].double()
    torch.testing.assert_close(prev.double(), torch.stack(expected, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final.double(), running, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_recurrent_runs_from_its_record_alone_with_and_without_optional_tensors(gated):
    record, cubin = _record(_arch(), "recurrent", P=64, N=128, dtype="bfloat16", state_dtype="float32", tied=True)
    batch, heads = 3, 4
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    A, dt = (-normal(heads, 1, 1).abs()).expand(heads, 64, 128), normal(batch, heads, 1).abs().expand(batch, heads, 64)
    x, B, C, z = (normal(batch, *shape).bfloat16() for shape in ((heads, 64), (1, 128), (1, 128), (heads, 64)))
    state, skip = normal(batch, heads, 64, 128), normal(heads, 64)
    new = state.double() * torch.exp(dt * A[..., 0]).double().unsqueeze(-1) + (dt * x).double().unsqueeze(-1) * B.double().unsqueeze(2)
    expected = (new * C.double().unsqueeze(2)).sum(-1)
    tensors = {"A": A, "dt": dt, "x": x, "Bm": B, "Cm": C, "state": state}
    if gated:
        expected = (expected + skip * x.double()) * z.double() * torch.sigmoid(z.double())
        tensors.update(D=skip, z=z, slots64=torch.arange(batch, device="cuda"))
    y = torch.full((batch, heads, 64), float("nan"), device="cuda", dtype=torch.bfloat16 if gated else torch.float32)
    tensors["y_half" if gated else "y"] = y
    sizes = {"B": batch, "H": heads, "G": 1, "M": batch, "per": 1, "per_group": heads, "softplus_to": -float("inf")}
    _launch(record, cubin, tensors, sizes)
    torch.testing.assert_close(y.double(), expected, rtol=1e-2 if gated else 1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), new, rtol=1e-5, atol=1e-5)
