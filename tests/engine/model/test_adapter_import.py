"""Adapters of others are taken in as hostile input: what PEFT wrote computes the same here, and nothing else gets in."""

import gzip
import io
import json
import struct
import tarfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from contracts.base_model import read_base_model_facts
from contracts.errors import InvalidRequest
from engine.model.adapter_folder import CONFIG, WEIGHTS
from engine.model.adapter_import import ImportBounds, import_adapter, write_imported
from engine.model.base import BaseModel
from engine.model.lora import AdapterSegment

BOUNDS = ImportBounds(most_bytes=20 * 2**20, max_rank=16)
TOLERANCE = 2e-5
"""Tolerance of logits in fp32, whose products are summed in another order."""


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> BaseModel:
    """The tiny base."""
    return BaseModel.load(read_base_model_facts("weft/tiny", tiny_model_dir, None))


def by_peft(folder: Path, adapter: Path | None = None) -> PeftModel:
    """The base with an adapter of PEFT's on two kinds of layers, new or read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if adapter is not None:
            return PeftModel.from_pretrained(model, adapter)
        return get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"]))


@pytest.fixture(scope="module")
def adapter(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as PEFT writes it, of an adapter with weights unlike zero."""
    folder = tmp_path_factory.mktemp("peft")
    torch.manual_seed(1)
    model = by_peft(tiny_model_dir)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def tar_of(files: dict[str, bytes], *others: tarfile.TarInfo) -> bytes:
    """A tar of files, and of other members without content."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for other in others:
            tar.addfile(other)
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return content.getvalue()


def files_of(folder: Path) -> dict[str, bytes]:
    """The two files of an adapter."""
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """A member of a tar that is no file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("form", ["folder", "tar", "tar in a folder", "gzip"])
def test_what_peft_wrote_computes_the_same_here(base: BaseModel, adapter: Path, tmp_path: Path, form: str) -> None:
    """The adapter is on two of the attention's four layers; the written checkpoint covers all four."""
    source, work = tmp_path / "source", tmp_path / "work"
    work.mkdir()
    if form == "folder":
        source = adapter
    else:
        files = {
            (f"some/{name}" if form == "tar in a folder" else f"./{name}"): body
            for name, body in files_of(adapter).items()
        }
        packed = tar_of({**files, "README.md": b"mine"})
        source.write_bytes(gzip.compress(packed) if form == "gzip" else packed)
    weights = import_adapter(source, work, base, BOUNDS)
    size = write_imported(tmp_path / "out", base, weights)
    assert size == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    tokens = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(7))
    with torch.no_grad(), base.adapters([AdapterSegment(weights, 0, 1)]):
        found = base.logits(tokens)
    with torch.no_grad():
        expected = by_peft(base.facts.path, adapter)(tokens).logits
        bare = base.logits(tokens)
        again = by_peft(base.facts.path, tmp_path / "out")(tokens).logits
    torch.testing.assert_close(found[0], expected[0], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(again, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(found[1], bare[1]), "the neighbour in the batch has no adapter"
    assert (expected[0] - bare[0]).abs().max() > 0.05
    assert (weights.settings.rank, weights.settings.alpha, weights.settings.train_mlp) == (4, 6.0, False)
    assert len(weights.tensors) == 16


def header_of(content: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    """The header of a safetensors file, and what follows it."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(content: bytes, change: Callable[[dict[str, dict[str, object]]], object]) -> bytes:
    """A safetensors file with another header."""
    header, data = header_of(content)
    change(header)
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def with_config(files: dict[str, bytes], **values: object) -> dict[str, bytes]:
    """The files with other values in the config."""
    return {**files, CONFIG: json.dumps({**json.loads(files[CONFIG]), **values}).encode()}


def with_tensors(
    files: dict[str, bytes], change: Callable[[dict[str, torch.Tensor]], object], folder: Path
) -> dict[str, bytes]:
    """The files with other tensors."""
    (folder / "old").write_bytes(files[WEIGHTS])
    tensors = load_file(folder / "old")
    change(tensors)
    save_file(tensors, folder / "new")
    return {**files, WEIGHTS: (folder / "new").read_bytes()}


Tensors = dict[str, torch.Tensor]


def _nan(tensors: Tensors) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def _infinite(tensors: Tensors) -> None:
    next(iter(tensors.values()))[0, 0] = float("inf")


def _stranger(tensors: Tensors) -> None:
    tensors["base_model.model.model.nothing.lora_A.weight"] = torch.zeros(4, 4)


def _other_rank(tensors: Tensors) -> None:
    for key in list(tensors):
        if ".0." in key:
            tensors[key] = (
                torch.zeros(8, tensors[key].shape[1]) if "lora_A" in key else torch.zeros(tensors[key].shape[0], 8)
            )


def _other_shape(tensors: Tensors) -> None:
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key] = torch.zeros(tensors[key].shape[0] + 1, 4)


def _without_half(part: str) -> Callable[[Tensors], object]:
    """Drops one half of one layer's pair."""
    return lambda tensors: tensors.pop(next(key for key in tensors if f"lora_{part}" in key))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without_half("A"), "missing or damaged"),
        (_without_half("B"), "missing or damaged"),
        (_nan, "NaN or infinite"),
        (_infinite, "NaN or infinite"),
        (_stranger, "nothing"),
        (_other_rank, "rank"),
        (_other_shape, "does not fit"),
        (lambda tensors: tensors.update({key: t.double() for key, t in tensors.items()}), "F32, F16 or BF16"),
        (lambda tensors: tensors.update({key: t.to(torch.int8) for key, t in tensors.items()}), "F32, F16 or BF16"),
        (lambda tensors: tensors.update({"x": torch.zeros(3)}), "must be a matrix"),
    ],
)
def test_tensors_that_are_no_adapter_of_the_base_are_refused(
    base: BaseModel, adapter: Path, tmp_path: Path, change: Callable[[Tensors], object], says: str
) -> None:
    refused(base, tmp_path, tar_of(with_tensors(files_of(adapter), change, tmp_path)), says)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"r": 17}, "largest rank"),
        ({"r": 0}, "r must be"),
        ({"r": "4"}, "r must be"),
        ({"r": True}, "r must be"),
        ({"r": 8}, "rank"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"lora_alpha": -1}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": "6"}, "lora_alpha"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_configs_that_ask_for_anything_else_are_refused(
    base: BaseModel, adapter: Path, tmp_path: Path, values: dict[str, object], says: str
) -> None:
    refused(base, tmp_path, tar_of(with_config(files_of(adapter), **values)), says)


@pytest.mark.parametrize(
    ("name", "says"),
    [("../../weft.db", "leads out"), ("/etc/passwd", "leads out"), ("a/../../b", "leads out"), ("..\\x", "leads out")],
)
def test_paths_that_lead_out_are_refused(base: BaseModel, adapter: Path, tmp_path: Path, name: str, says: str) -> None:
    refused(base, tmp_path, tar_of({name: b"x", **files_of(adapter)}), says)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(base: BaseModel, adapter: Path, tmp_path: Path, kind: bytes) -> None:
    files = files_of(adapter)
    refused(base, tmp_path, tar_of({CONFIG: files[CONFIG]}, member(WEIGHTS, kind, "/etc/passwd")), "link or a device")


def test_bombs_are_refused_before_they_expand(base: BaseModel, adapter: Path, tmp_path: Path) -> None:
    bomb = gzip.compress(tar_of({"zeros": bytes(BOUNDS.most_bytes + 1), **files_of(adapter)}))
    assert len(bomb) < 10**6
    refused(base, tmp_path, bomb, "too large")
    refused(base, tmp_path, tar_of({f"file{number}": b"" for number in range(300)}), "too large")
    refused(base, tmp_path, tar_of({CONFIG: b" " * (2**20 + 1), WEIGHTS: b""}), "too large")
    refused(base, tmp_path, tar_of({CONFIG: b"[" * 10**6, WEIGHTS: files_of(adapter)[WEIGHTS]}), "no JSON")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a file within the bounds", tarfile.REGTYPE),
        ("a long name", tarfile.GNUTYPE_LONGNAME),
        ("a long link", tarfile.GNUTYPE_LONGLINK),
        ("records of a member", tarfile.XHDTYPE),
        ("records of all members", tarfile.XGLTYPE),
        ("holes", tarfile.GNUTYPE_SPARSE),
    ],
)
def test_no_archive_chooses_the_memory_that_its_reading_takes(
    base: BaseModel, adapter: Path, tmp_path: Path, name: str, kind: bytes
) -> None:
    """A gzip of well under a mebibyte, expanded at once, would take a quarter of a gibibyte, header or content."""
    size = 256 * 2**20
    info = tarfile.TarInfo("beside")
    info.type, info.size = kind, size
    with gzip.open(tmp_path / "archive", "wb") as packed:
        packed.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(size >> 20):
            packed.write(bytes(2**20))
        packed.write(tar_of(files_of(adapter)))
    assert (tmp_path / "archive").stat().st_size < 2**20
    work = tmp_path / "work"
    work.mkdir()
    tracemalloc.start()
    try:
        if kind == tarfile.REGTYPE:
            import_adapter(tmp_path / "archive", work, base, ImportBounds(most_bytes=2 * size, max_rank=16))
        else:
            with pytest.raises(InvalidRequest, match=r"a header of more than|a link or a device|too large"):
                import_adapter(tmp_path / "archive", work, base, ImportBounds(most_bytes=2 * size, max_rank=16))
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20, name
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read_and_checked(base: BaseModel, adapter: Path, tmp_path: Path, form: int) -> None:
    """Both ways to write a name that a header has no room for."""

    def packed(folder: str) -> bytes:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=form) as tar:
            for name, body in files_of(adapter).items():
                info = tarfile.TarInfo(f"{folder}{name}")
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
        return content.getvalue()

    (tmp_path / "archive").write_bytes(packed("ä" * 90 + "/" + "b" * 200 + "/"))
    (tmp_path / "work").mkdir()
    assert import_adapter(tmp_path / "archive", tmp_path / "work", base, BOUNDS).settings.rank == 4
    refused(base, tmp_path, packed("b" * 200 + "/../../../"), "leads out")
    refused(base, tmp_path, packed("/" + "b" * 200 + "/"), "leads out")


def test_an_archive_that_is_cut_short_is_refused_wherever_it_is_cut(
    base: BaseModel, adapter: Path, tmp_path: Path
) -> None:
    whole = tar_of(files_of(adapter))
    packed = gzip.compress(whole)
    for content in (*(whole[:end] for end in (100, 600, 5000)), *(packed[:end] for end in (5, 20, 5000))):
        refused(base, tmp_path, content, "cannot be read")
    broken = packed[:2000] + bytes([packed[2000] ^ 255]) + packed[2001:]
    refused(base, tmp_path, broken, "cannot be read|header|not as large|NaN")


def test_a_gzip_whose_checksum_is_another_is_refused(base: BaseModel, adapter: Path, tmp_path: Path) -> None:
    """Else a number that was changed on the way would be trained on. Zeros behind the files are read, and not without end."""
    whole = tar_of(files_of(adapter))
    packed = gzip.compress(whole, compresslevel=0)
    weights = len(whole.rstrip(b"\0")) - 4000
    at = packed.index(whole[weights : weights + 64])
    refused(base, tmp_path, packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :], "cannot be read")
    refused(base, tmp_path, gzip.compress(whole + bytes(8 * 2**20)), "goes on")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({CONFIG: b"{}", "adapter_model.bin": b"\x80\x04"}, "pickle"),
        ({CONFIG: b"{}"}, "no adapter_model.safetensors"),
        ({WEIGHTS: b""}, "no adapter_config.json"),
        ({CONFIG: b"not", WEIGHTS: b""}, "no JSON"),
        ({CONFIG: b"[]", WEIGHTS: b""}, "no JSON object"),
        ({f"a/{CONFIG}": b"{}", f"b/{CONFIG}": b"{}"}, "twice"),
    ],
)
def test_input_that_is_no_adapter_is_refused(
    base: BaseModel, tmp_path: Path, files: dict[str, bytes], says: str
) -> None:
    refused(base, tmp_path, tar_of(files), says)


def test_headers_that_lie_are_refused(base: BaseModel, adapter: Path, tmp_path: Path) -> None:
    files = files_of(adapter)
    whole = files[WEIGHTS]
    first = next(name for name in header_of(whole)[0] if name != "__metadata__")
    for weights, says in (
        (whole[:6], "header"),
        (struct.pack("<Q", 2**62) + whole[8:], "header"),
        (struct.pack("<Q", 50) + b"x" * 60, "no JSON"),
        (whole[:-4], "not as large as the file"),
        (whole + b"more", "not as large as the file"),
        (with_header(whole, lambda header: header[first].update(shape=[2**30, 2**30])), "not as large"),
        (with_header(whole, lambda header: header[first].update(data_offsets=[0, 2**40])), "not as large"),
        (with_header(whole, lambda header: header[first].update(data_offsets=[-4, 0])), "no place"),
        (with_header(whole, lambda header: header.clear()), "must hold 1"),
    ):
        refused(base, tmp_path, tar_of({**files, WEIGHTS: weights}), says)


def test_names_that_read_like_errors_of_the_disk_are_refused(base: BaseModel, adapter: Path, tmp_path: Path) -> None:
    """The two matrices lie on each other, and safetensors quotes one's name. An archive beside it is taken all the same."""
    one = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
    header = json.dumps({"a (os error 5)": one, "b (os error 5)": one}).encode()
    lying = {**files_of(adapter), WEIGHTS: struct.pack("<Q", len(header)) + header + bytes(8)}
    refused(base, tmp_path, tar_of(lying), "missing or damaged")
    (tmp_path / "theirs").write_bytes(tar_of(files_of(adapter)))
    work = tmp_path / "their work"
    work.mkdir()
    assert import_adapter(tmp_path / "theirs", work, base, BOUNDS).settings.rank == 4


@pytest.mark.parametrize("content", [b"", b"not a tar", b"\x1f\x8bnot gzip", b"PK\x03\x04"])
def test_what_is_no_archive_is_refused(base: BaseModel, tmp_path: Path, content: bytes) -> None:
    refused(base, tmp_path, content, "archive cannot be read|holds no")


def refused(base: BaseModel, folder: Path, archive: bytes, says: str) -> None:
    """Import ``archive``, and see it refused with nothing written outside of its working folder."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    for left in work.iterdir():
        left.unlink()
    (folder / "archive").write_bytes(archive)
    before = sorted(path for path in folder.rglob("*") if work not in path.parents)
    with pytest.raises(InvalidRequest, match=says):
        import_adapter(folder / "archive", work, base, BOUNDS)
    assert sorted(path for path in folder.rglob("*") if work not in path.parents) == before
