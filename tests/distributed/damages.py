"""Ways to damage a checkpoint: each takes a folder with one checkpoint and a generator, and changes files there.

All of them must be noticed. What cannot be is left out on purpose: a manifest that makes sense and is not true, with
its hash written anew (another learning rate, two rows of the same length exchanged), data changed together with its
CRC-32, and a ``latest`` or ``COMMIT`` that has lost its line end.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Damage = Callable[[Path, Path, Random], object]
"""(folder to damage, folder of a checkpoint of the same model at a later step, generator)."""


def _only(folder: Path) -> Path:
    (path,) = (path for path in folder.iterdir() if path.is_dir())
    return path


def _shards(folder: Path) -> list[Path]:
    return sorted(_only(folder).glob("*.safetensors"))


def _place(folder: Path, name: str, rng: Random) -> Path:
    if name == "a shard":
        return rng.choice(_shards(folder))
    return folder / name if name == "latest" else _only(folder) / name


def _cut(file: Path, rng: Random) -> None:
    content = file.read_bytes()
    # The line end of a small file says nothing, and may be lost.
    file.write_bytes(content[: rng.choice([0, rng.randrange(len(content.rstrip(b"\n")))])])


def _flip(file: Path, rng: Random, most: int | None = None) -> None:
    content = bytearray(file.read_bytes())
    place = rng.randrange(min(len(content.rstrip(b"\n")), most or len(content)))
    content[place] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _lay_folder(file: Path, rng: Random) -> None:
    file.unlink()
    file.mkdir()


def _lay_file(folder: Path, later: Path, rng: Random) -> None:
    path = _only(folder)
    shutil.rmtree(path)
    path.write_text("no folder")


def _swap(folder: Path, later: Path, rng: Random) -> None:
    shards = _shards(folder)
    first, second = rng.sample(shards, 2) if len(shards) > 1 else (shards[0], _only(folder) / "manifest.json")
    aside = first.with_suffix(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def _half_written(folder: Path, later: Path, rng: Random) -> None:
    """As a kill in the first save leaves it."""
    path = _only(folder)
    (path / "COMMIT").unlink()
    (folder / "latest").unlink()
    if rng.random() < 0.5:
        (path / "manifest.json").unlink()
    _cut(rng.choice(_shards(folder)), rng)
    path.rename(folder / f".saving-0123456789ab-{path.name}")


def _on(name: str, act: Callable[[Path, Random], object]) -> Damage:
    return lambda folder, later, rng: act(_place(folder, name, rng), rng)


def _from_later(*names: str) -> Damage:
    def damage(folder: Path, later: Path, rng: Random) -> None:
        for name in names:
            file = _place(folder, name, rng)
            shutil.copy(_only(later) / file.name, file)

    return damage


FILES: dict[str, Damage] = {
    "a shard longer": _on("a shard", lambda file, rng: file.write_bytes(file.read_bytes() + rng.randbytes(7))),
    "a bit of a shard's length": _on("a shard", lambda file, rng: _flip(file, rng, 8)),
    "a bit of a shard's header": _on("a shard", lambda file, rng: _flip(file, rng, 2000)),
    "shards swapped": _swap,
    "a later shard": _from_later("a shard"),
    "a later manifest": _from_later("manifest.json"),
    "a later commit": _from_later("COMMIT"),
    "a later manifest and commit": _from_later("manifest.json", "COMMIT"),
    "half written": _half_written,
    "a file for the checkpoint": _lay_file,
}
for _name in ("a shard", "manifest.json", "COMMIT", "latest"):
    FILES[f"{_name} cut"] = _on(_name, _cut)
    FILES[f"a bit of {_name}"] = _on(_name, _flip)
    FILES[f"{_name} missing"] = _on(_name, lambda file, rng: file.unlink())
    FILES[f"a folder for {_name}"] = _on(_name, _lay_folder)


# ---- edited manifests ------------------------------------------------------------------------------------------------

Content = dict[str, Any]
Edit = Callable[[Content, Random], object]


def _top(content: Content, rng: Random) -> Content:
    return content


def _file(content: Content, rng: Random) -> Content:
    return content["files"][rng.choice(sorted(content["files"]))]


def _row(content: Content, rng: Random) -> Content:
    return rng.choice([row for row in _file(content, rng)["rows"] if row["numel"] > 1])


def _parameter(content: Content, rng: Random) -> Content:
    return content["parameters"][rng.choice(sorted(content["parameters"]))]


def _set(where: Callable[[Content, Random], Content], **values: Any) -> Edit:
    return lambda content, rng: where(content, rng).update(values)


def _add(where: Callable[[Content, Random], Content], key: str, amount: int) -> Edit:
    return lambda content, rng: (place := where(content, rng)).update({key: place[key] + amount})


def _other_crc(content: Content, rng: Random) -> None:
    file = _file(content, rng)
    block = 8 * rng.randrange(len(file["crc32"]) // 8)
    crc = int(file["crc32"][block : block + 8], 16) ^ 1 << rng.randrange(32)
    file["crc32"] = f"{file['crc32'][:block]}{crc:08x}{file['crc32'][block + 8 :]}"


def _file_renamed(name: str) -> Edit:
    def edit(content: Content, rng: Random) -> None:
        content["files"][name] = content["files"].pop(rng.choice(sorted(content["files"])))

    return edit


EDITS: dict[str, Edit] = {
    "another shape": lambda content, rng: _parameter(content, rng)["shape"].append(2),
    "shape a text": _set(_parameter, shape="3"),
    "shape negative": _set(_parameter, shape=[-3, -4]),
    "another dtype": _set(_parameter, dtype="F99"),
    "tensors not there": lambda content, rng: _parameter(content, rng)["tensors"].update(exp_more="F32"),
    "state of no dtype": _set(_parameter, state={"step": {"dtype": "F99", "shape": [], "value": 3.0}}),
    "state of a shape": _set(_parameter, state={"step": {"dtype": "F32", "shape": [2], "value": 3.0}}),
    "state a text": _set(_parameter, state={"step": {"dtype": "F32", "shape": [], "value": "many"}}),
    "a parameter gone": lambda content, rng: content["parameters"].pop(rng.choice(sorted(content["parameters"]))),
    "an alias twice": lambda content, rng: _parameter(content, rng)["aliases"].extend(["norm.weight", "norm.weight"]),
    "an offset moved": _add(_row, "offset", 4),
    "an offset negative": _set(_row, offset=-4),
    "an offset far out": _add(_row, "offset", 1 << 40),
    "an offset a fraction": _set(_row, offset=64.0),
    "an offset not a number": _set(_row, offset=float("nan")),
    "a row longer": _add(_row, "numel", 1),
    "a row shorter": _add(_row, "numel", -1),
    "a row negative": _set(_row, numel=-1),
    "a row of texts": _set(_row, dtype="STR"),
    "a row elsewhere": _add(_row, "start", 1),
    "a row of another key": _set(_row, key="exp_other"),
    "a row of a list": _set(_row, name=["a", "b"]),
    "a row twice": lambda content, rng: (rows := _file(content, rng)["rows"]).append(dict(rng.choice(rows))),
    "rows dropped": lambda content, rng: _file(content, rng)["rows"].pop(),
    "all rows dropped": lambda content, rng: _file(content, rng)["rows"].clear(),
    "a row without an offset": lambda content, rng: _row(content, rng).pop("offset"),
    "a CRC-32 changed": _other_crc,
    "a CRC-32 dropped": lambda content, rng: _set(_file, crc32=_file(content, rng)["crc32"][8:])(content, rng),
    "CRC-32s no numbers": lambda content, rng: _set(_file, crc32="g" * 8000)(content, rng),
    "blocks of 0 bytes": _set(_file, block_bytes=0),
    "blocks of 1024 bytes": _set(_file, block_bytes=1024),
    "blocks negative": _set(_file, block_bytes=-512),
    "other bytes": _add(_file, "bytes", 64),
    "a rank too high": _set(_file, rank=99),
    "a file gone": lambda content, rng: content["files"].pop(sorted(content["files"])[-1]),
    "a file outside": _file_renamed("../latest"),
    "a file of no name": _file_renamed(""),
    "version raised": _set(_top, version=2),
    "version a list": _set(_top, version=[1], versions=None),
    "another format": _set(_top, format="other"),
    "a key gone": lambda content, rng: content.pop(rng.choice(sorted(set(content) - {"format", "version"}))),
    "a key too many": _set(_top, more=1),
    "a key null": lambda content, rng: content.update(
        {rng.choice(sorted(set(content) - {"format", "version", "client_state", "lr_scheduler"})): None}
    ),
    "a key a list": lambda content, rng: content.update({rng.choice(sorted(content)): [1]}),
    "world size 0": _set(_top, world_size=0),
    "world size too high": _add(_top, "world_size", 1),
    "world size a text": _set(_top, world_size="2"),
    "counters negative": lambda content, rng: content["counters"].update(global_steps=-1),
    "a counter gone": lambda content, rng: content["counters"].pop("skipped_steps"),
    "generators of fewer ranks": lambda content, rng: content["rng_numbers"].pop(),
    "generators of nothing": lambda content, rng: content["rng_numbers"][0].clear(),
    "client state unknown": _set(_top, client_state={"$nothing": 1}),
    "client state absent": _set(_top, client_state={"x": {"$tensor": "nowhere", "shape": [2]}}),
    "client state of a shape": lambda content, rng: content["client_state"]["x"].update(shape=[5, 5]),
    "client state a code": _set(_top, client_state={"$dtype": "no_such_dtype"}),
    "client state no dtype": _set(_top, client_state={"$dtype": "load"}),
    "no optimizer class": lambda content, rng: content["optimizer"].pop("class"),
    "no optimizer groups": lambda content, rng: content["optimizer"]["groups"].clear(),
    "optimizer groups of texts": lambda content, rng: content["optimizer"].update(groups="AdamW"),
    "a schedule of nothing": lambda content, rng: content["lr_scheduler"].pop("state"),
    "a schedule of another shape": lambda content, rng: content["lr_scheduler"].update(state={"x": 1}),
}

TEXTS: dict[str, Callable[[bytes, Random], bytes]] = {
    "not JSON": lambda raw, rng: raw[: rng.randrange(len(raw) - 3)],
    "a list": lambda raw, rng: b"[" + raw + b"]",
    "not UTF-8": lambda raw, rng: raw.replace(b"master", b"m\xffster", 1),
    "too deep": lambda raw, rng: b"[" * 100_000,
    "empty": lambda raw, rng: b"",
}


def _edited(edit: Edit) -> Callable[[bytes, Random], bytes]:
    def change(raw: bytes, rng: Random) -> bytes:
        content = json.loads(raw)
        edit(content, rng)
        return json.dumps(content).encode()

    return change


def _manifest(change: Callable[[bytes, Random], bytes], commit: bool = True) -> Damage:
    """``commit``: with a hash that is right, as after an edit by hand."""

    def damage(folder: Path, later: Path, rng: Random) -> None:
        file = _only(folder) / "manifest.json"
        content = change(file.read_bytes(), rng)
        file.write_bytes(content)
        if commit:
            file.with_name("COMMIT").write_text(hashlib.sha256(content).hexdigest() + "\n")

    return damage


MANIFESTS: dict[str, Damage] = {
    **{f"manifest with {name}, committed": _manifest(_edited(edit)) for name, edit in EDITS.items()},
    **{f"manifest {name}, committed": _manifest(change) for name, change in TEXTS.items()},
    **{
        f"manifest with {name}": _manifest(_edited(EDITS[name]), commit=False)
        for name in ("another shape", "an offset moved", "a CRC-32 changed", "rows dropped", "version raised")
    },
}

ALL: dict[str, Damage] = {**FILES, **MANIFESTS}
