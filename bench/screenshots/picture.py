"""Pictures of a few colours: a page's screenshot as a PNG with a palette, a third of the size."""

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

_INDEXED = 3
_REDUCE = """
async (source) => {
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
  const palette = [...counts.entries()].sort((a, b) => b[1] - a[1]).slice(0, 128).map((entry) => entry[0]);
  const places = new Map(palette.map((color, place) => [color, place]));
  const parts = (color) => [color & 255, (color >> 8) & 255, (color >> 16) & 255];
  const known = palette.map(parts);
  for (const color of counts.keys()) {
    if (places.has(color)) continue;
    const [red, green, blue] = parts(color);
    let best = 0, least = Infinity;
    known.forEach(([r, g, b], place) => {
      const distance = (r - red) ** 2 + (g - green) ** 2 + (b - blue) ** 2;
      if (distance < least) { least = distance; best = place; }
    });
    places.set(color, best);
  }
  const indices = new Uint8Array(pixels.length);
  pixels.forEach((pixel, at) => { indices[at] = places.get(pixel); });
  let text = '';
  for (let at = 0; at < indices.length; at += 32768) text += String.fromCharCode(...indices.subarray(at, at + 32768));
  return { width: image.width, height: image.height, palette: known.flat(), indices: btoa(text) };
}
"""


def write_picture(path: Path, screenshot: bytes, workbench: Page) -> None:
    """Write the screenshot with its 128 most frequent colours. ``workbench`` is an empty page that counts them."""
    source = "data:image/png;base64," + base64.b64encode(screenshot).decode()
    found: dict[str, Any] = workbench.evaluate(_REDUCE, source)
    width, height, indices = found["width"], found["height"], base64.b64decode(found["indices"])
    rows = b"".join(b"\0" + indices[at : at + width] for at in range(0, width * height, width))
    header = struct.pack(">IIBBBBB", width, height, 8, _INDEXED, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", bytes(found["palette"])), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
