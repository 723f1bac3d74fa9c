"""Makes the sample files of this folder: small files as torch, NumPy and safetensors write them.

Made with Python 3, torch 2.15, numpy 2.4, safetensors 0.8. The tests need none of them: they read what lies here.
`want-*` are what a view must look like, written by the library the view stands in for.
"""

import io
import os
import zipfile
from collections import OrderedDict

import numpy as np
import torch
from safetensors.torch import save_file

os.chdir(os.path.dirname(os.path.abspath(__file__)))

base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
strided = OrderedDict(
    base=base,
    tied=base,
    t=base.t(),
    window=base[1:5, 2:9:3],
    perm=torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1),
    scalar=torch.tensor(3.5, dtype=torch.float64),
    empty=torch.zeros(2, 0),
    ends=base[6:],
    expanded=torch.tensor([1.0, 2.0]).unsqueeze(1).expand(2, 5),
)
torch.save(strided, "strided.pt")
torch.save(OrderedDict((k, v) for k, v in strided.items() if k != "expanded"), "gather.pt")

names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 float8_e4m3fn"
names += " float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz complex64 complex128"
torch.save({n: torch.tensor([1.0, 2.0]).to(getattr(torch, n)) for n in names.split()}, "dtypes.pt")

one = torch.ones(1)
keys = ["a/b", "", "..", ".hidden", "100%", "nl\n", "\u00e9\u6f22\U0001f600", "\ud800x", "-x", "k" * 300, 0, "0", None, True, (1, 2), b"\xff"]
odd = {k: one for k in keys}
odd["a"] = {"b": one, "c.pt": {"q": one}}
odd["list"] = [one, (one, {"x": one})]
torch.save(odd, "names.pt")

model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
torch.nn.init.ones_(model[0].weight), torch.nn.init.zeros_(model[0].bias)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 2)).sum().backward()
optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, "train.pt")
torch.save({"global_step": 7, "model": {"loss": 1.0}, "epoch": 0.5, "loss": -2.25e-3, "flag": True, 5: 6, "name": "x", "nan": float("nan")}, "facts.pt")
torch.save(model, "module.pt")
torch.save(torch.nn.Parameter(base), "root.pt")
torch.save([torch.nn.Buffer(one), 1.5, 2**70, -5, b"x", {1, 2}, frozenset([one])], "protocol5.pt", pickle_protocol=5)
torch.jit.script(torch.nn.Linear(3, 4)).save("script.pt")
torch.save({"s": torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))}, "sparse.pt")

# The same tensors under three prefixes, which move the data.
for name in ["a", "b", "sub-ckpt-with-a-longer-name"]:
    torch.save({"w": base, "b": base[0].clone()}, f"prefix-{name}.pt")

# What must stay opaque.
torch.save({"w": base}, "legacy.pt", _use_new_zipfile_serialization=False)
torch.save({"n": torch._neg_view(base)}, "negative.pt")


def rewrite(source, target, change, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(source) as z, zipfile.ZipFile(target, "w", compression) as out:
        for name in z.namelist():
            data = change(name, z.read(name))
            if data is not None:
                out.writestr(zipfile.ZipInfo(name), data)


rewrite("prefix-a.pt", "big-endian.pt", lambda n, d: b"big" if n.endswith("byteorder") else d)
rewrite("prefix-a.pt", "record-removed.pt", lambda n, d: None if n.endswith("data/1") else d)
rewrite("prefix-a.pt", "rewritten.pt", lambda n, d: d)

array = base.numpy()
np.save("c.npy", array)
np.save("fortran.npy", np.asfortranarray(array))
np.save("scalar.npy", np.float32(3))
np.save("big-endian.npy", array.astype(">f4"))
np.save("object.npy", np.array([{}], dtype=object), allow_pickle=True)
np.save("structured.npy", np.zeros(3, dtype=[("a", "<f4")]))
np.savez("some.npz", array, b=np.arange(5), **{"x/y": np.ones(2), "o": np.array([{}], dtype=object)})
np.savez_compressed("packed.npz", a=array)

some = {"w": base, "zero": torch.zeros(0, 3), "s": torch.tensor(1.0), "a/b": torch.ones(2, dtype=torch.bfloat16)}
save_file(some, "some.safetensors", metadata={"k": "v", "format": "pt"})
save_file({}, "metadata-only.safetensors", metadata={"k": "v"})
save_file({"a": torch.zeros(2, 0), "b": torch.zeros(0), "c": torch.tensor(1.0)}, "zero-size.safetensors")


def saved(tensor):
    """As torch.save writes it, up to the record .data/serialization_id that views leave out."""
    out = io.BytesIO()
    torch.save(tensor, out)
    data = out.getvalue()
    return data[: data.index(b"archive/.data/serialization_id") - 30]


# The view holds the span that the tensor touches: elements 12 to 48 of the storage.
window = torch.arange(12, 49, dtype=torch.float32).as_strided((4, 3), (10, 3))
open("want-window.pt.start", "wb").write(saved(window))
fp8 = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
open("want-float8.pt.start", "wb").write(saved(fp8))
open("want-empty.pt.start", "wb").write(saved(torch.zeros(2, 0)))
np.save("want-t.npy", np.asfortranarray(base.t().numpy()))
np.save("want-window.npy", np.ascontiguousarray(base[1:5, 2:9:3].numpy()))
np.save("want-perm.npy", np.ascontiguousarray(strided["perm"].numpy()))
plain = {k: v.contiguous().clone() for k, v in strided.items() if k != "expanded"}
save_file(plain, "want-gather.safetensors", metadata={"format": "pt"})
