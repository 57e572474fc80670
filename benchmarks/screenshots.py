"""Pictures of the pages of `hf-tiny demo` for the docs, of trained models.

python benchmarks/screenshots.py docs/images/demo_classify.png "정말 재미있게 봤다" runs/reviews runs/other_reviews
python benchmarks/screenshots.py docs/images/demo_images.png image.png runs/classes
python benchmarks/screenshots.py docs/images/demo_embed.png "한 남자가 달린다" runs/embeddings lines.txt
"""

import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fixtures.browser import Visitor, browser

from hf_tiny import demo

WIDTH, COLOURS = 820, 128


def take(path: Path, given: str, names: list[str], lines: list[str]) -> None:
    """Give a text or the path of an image to a page, and take its picture, without the space around it."""
    blocks = demo.serve(names, lines=lines)
    with browser() as chromium:
        visitor = Visitor(chromium, blocks.local_url, WIDTH, 200)
        if Path(given).is_file():
            visitor.give_image(Path(given))
        else:
            visitor.type("text", given)
        visitor.page.wait_for_timeout(1500)
        visitor.ask()
        visitor.page.wait_for_timeout(8000)
        visitor.screenshot(path)
        visitor.close()
    blocks.close()
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    target, given, *names = sys.argv[1:]
    take(
        Path(target),
        given,
        [name for name in names if Path(name).is_dir()],
        [name for name in names if Path(name).is_file()],
    )
