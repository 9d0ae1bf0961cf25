"""Image files of every mode, size and format, and files that are not images."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = {
    ".png": ("1", "L", "P", "RGB", "RGBA", "LA", "I;16"),
    ".jpg": ("L", "RGB", "CMYK"),
    ".webp": ("RGB", "RGBA"),
    ".gif": ("1", "L", "P", "RGB", "RGBA"),
    ".bmp": ("1", "L", "P", "RGB", "RGBA"),
    ".tif": ("1", "L", "P", "RGB", "RGBA", "CMYK", "LAB", "I;16", "I", "F"),
    ".ppm": ("1", "L", "RGB"),
    ".tga": ("1", "L", "P", "RGB", "RGBA"),
    ".jp2": ("L", "RGB", "RGBA"),
    ".pcx": ("1", "L", "P", "RGB"),
    ".ico": ("RGBA",),
    ".sgi": ("L", "RGB", "RGBA"),
    ".avif": ("RGB", "RGBA"),
}
SIZES = ((1, 1), (7, 7), (1, 500), (500, 1), (3, 2), (320, 240), (2000, 30))


def scene(mode: str, size: tuple[int, int] = (64, 48), seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(noise)
    if mode == "I;16":
        return Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    if mode in ("I", "F"):
        return Image.fromarray(noise[..., 0].astype(np.int32 if mode == "I" else np.float32))
    if mode == "LAB":
        return Image.frombytes("LAB", size, noise[..., :3].tobytes())
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def png_header(width: int, height: int) -> bytes:
    """An RGB PNG that claims this size and has only a few bytes of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def tiff_header(width: int, height: int) -> bytes:
    """A TIFF that says how large it is, of one bit a pixel, and holds none."""
    tags = {256: width, 257: height, 258: 1, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 8}
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + rows + bytes(4)


def tiff(values: np.ndarray, order: str = "<") -> bytes:
    """An uncompressed TIFF of shape (H, W) or (H, W, C) and any number type; `order` of the bytes is "<" or ">"."""
    height, width = values.shape[:2]
    channels = values.shape[2] if values.ndim == 3 else 1
    bits, kind = 8 * values.itemsize, {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    pixels = values.astype(values.dtype.newbyteorder(order)).tobytes()
    tail = 8 + 2 + 12 * 11 + 4
    tags = [
        (256, 4, 1, width), (257, 4, 1, height), (258, 4, 1, bits), (259, 4, 1, 1), (262, 4, 1, 1),
        (273, 4, 1, tail), (277, 4, 1, channels), (278, 4, 1, height), (279, 4, 1, len(pixels)),
        (284, 4, 1, 1), (339, 4, 1, kind),
    ]  # fmt: skip
    rows = b"".join(struct.pack(f"{order}HHII", *tag) for tag in tags)
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, len(tags))
    return head + rows + bytes(4) + pixels


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_all(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Writes readable images, unreadable files, and damaged images that only some decoders accept; gives their paths."""
    good, bad, either = [], [], []

    def put(name: str, data: bytes, to: list[Path]) -> None:
        (folder / name).write_bytes(data)
        to.append(folder / name)

    for ending, modes in FORMATS.items():
        for mode in modes:
            path = folder / f"{mode.replace(';', '')}{ending}"
            scene(mode).save(path)
            good.append(path)
    for width, height in SIZES:
        for ending in (".png", ".jpg", ".webp", ".bmp", ".gif", ".tif"):
            path = folder / f"{width}x{height}{ending}"
            scene("RGB", (width, height)).save(path)
            good.append(path)
    for turn in range(1, 10):
        notes = Image.Exif()
        notes[0x0112] = turn
        put(f"turned{turn}.jpg", encoded(scene("RGB"), "JPEG", exif=notes), good)
    frames = [scene("RGB", seed=seed) for seed in range(3)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        moving = {"save_all": True, "append_images": frames[1:]}
        put(f"moving.{kind.lower()}", encoded(frames[0], kind, **moving), good)
    gray = np.asarray(scene("L"))
    for kind in ("uint8", "uint16", "int16", "uint32", "int32", "float32", "float64"):
        put(
            f"microscope_{kind}.tif", tiff((gray * 16.0).astype(kind)), either if kind == "float64" else good
        )  # rasterio reads float64
    put("satellite.tif", tiff((gray - 20.0).astype(np.float32), ">"), good)
    put("holes.tif", tiff(np.where(gray > 99, np.nan, gray / 255).astype(np.float32)), good)
    put("nothing.tif", tiff(np.full((8, 8), np.nan, np.float32)), bad)
    put("bands.tif", tiff(np.zeros((8, 8, 5), np.float32)), bad)
    put("clear.gif", encoded(scene("P"), "GIF", transparency=3), good)
    put("clear.png", encoded(scene("P"), "PNG", transparency=bytes(range(256))), good)
    put("clear_gray.png", encoded(scene("L"), "PNG", transparency=9), good)
    put("progressive.jpg", encoded(scene("RGB"), "JPEG", progressive=True), good)
    put("broken_exif.jpg", encoded(scene("RGB"), "JPEG", exif=b"Exif\0\0" + b"II*\0" + bytes(range(40))), good)
    put("named.txt", encoded(scene("RGB"), "PNG"), good)
    put("no_ending", encoded(scene("RGB"), "JPEG"), good)
    put("wrong_ending.png", encoded(scene("RGB"), "JPEG"), good)
    put("ünï côde 画像.png", encoded(scene("RGB"), "PNG"), good)
    put("trailing.png", encoded(scene("RGB"), "PNG") + b"more" * 100, good)
    for ending in (".png", ".jpg", ".webp", ".gif", ".tif", ".jp2", ".bmp"):
        whole = (folder / f"RGB{ending}").read_bytes()
        for share in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7):
            put(f"cut{share}{ending}", whole[: max(1, int(len(whole) * share))], bad)
        damaged = bytearray(whole)
        damaged[len(whole) // 3 : len(whole) // 3 + 40] = bytes(40)
        put(f"damaged{ending}", bytes(damaged), either)
    rest = {
        "empty.png": b"",
        "zeros.png": bytes(1000),
        "drawing.svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "drawing2.svg": b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>',
        "notes.png": "dear diary, today äöü".encode(),
        "notes.jpg": b"hello\n" * 1000,
        "page.html": b"<!doctype html><html></html>",
        "paper.pdf": b"%PDF-1.7\n1 0 obj",
        "figure.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
        "photo.heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        "film.mp4": b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom",
        "noise.png": np.random.default_rng(0).bytes(5000),
        "archive.png": b"PK\x03\x04" + bytes(100),
        "head.png": b"\x89PNG\r\n\x1a\n",
        "head.jpg": b"\xff\xd8\xff\xe0",
        "head.gif": b"GIF89a",
        "huge.png": png_header(20_000, 20_000),
        "vast.png": png_header(2_000_000_000, 2_000_000_000),
        "long.png": png_header(1_000_000_000, 1),
        "flat.png": png_header(0, 40),
        "bomb.tif": tiff_header(20_000, 20_000),
        "bomb.gif": b"GIF89a"
        + struct.pack("<HH", 65_535, 65_535)
        + b"\x80\0\0"
        + bytes(6)
        + b","
        + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0)
        + b"\x02\x01\x44\x00;",
    }
    for name, data in rest.items():
        put(name, data, bad)
    (folder / "folder.png").mkdir()
    bad.append(folder / "folder.png")
    bad.append(folder / "nowhere.png")
    return good, bad, either
