"""python benchmarks/corpora.py DATA OUT

The raw text that the pretrained encoders of README.md's table have read, a text a line: OUT/korean and OUT/english. Beside
books, reviews and bills it has the texts of the training parts of the tasks, without their labels. Half of the books are there a
second time in lower case, since some English texts have no capitals.
"""

import argparse
import csv
import gzip
import re
from pathlib import Path


def lines(path: Path) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return file.read().split("\n")


def cells(path: Path, *columns: str) -> list[str]:
    header, *rows = ([*line.split("\t")] for line in lines(path) if line)
    places = [header.index(column) for column in columns]
    return [row[place] for row in rows for place in places if len(row) > place and row[place].strip()]


def sentences(path: Path) -> list[str]:
    """Of a treebank."""
    return [line.partition(" = ")[2] for line in lines(path) if line.startswith("# text = ")]


def tagged(path: Path) -> list[str]:
    """The words of each sentence, which stand in the first of two columns."""
    rows = (line.split("\t")[0].strip() for line in lines(path))
    return [" ".join(text.split("\n")) for text in re.split(r"\n{2,}", "\n".join(rows)) if text.strip()]


def paragraphs(path: Path) -> list[str]:
    return [" ".join(text.split()) for text in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")) if text.strip()]


def texts(data: Path) -> dict[str, list[str]]:
    books = [paragraphs(path) for path in sorted((data / "books_en").glob("*.txt"))]
    with open(data / "chatbot_ko/ChatbotData.csv", encoding="utf-8") as file:
        dialogue = [f"{row['Q']} {row['A']}" for row in csv.DictReader(file)]
    pairs = cells(data / "korsts_ko/sts-train.tsv", "sentence1", "sentence2")
    return {
        "korean/reviews": lines(data / "nsmc_ko/raw_reviews_unlabeled.txt"),
        "korean/reviews_train": cells(data / "nsmc_ko/ratings_train.tsv", "document"),
        "korean/bills": lines(data / "bills_ko/bills_raw_train.txt"),
        "korean/pairs_train": pairs + cells(data / "question_pair_ko/train.tsv", "question1", "question2"),
        "korean/dialogue": dialogue,
        "korean/docs": [row.split("\t")[1] for row in lines(data / "pydocs_ko_en/train.tsv") if row.count("\t") == 1],
        "korean/treebank_train": sentences(data / "ud_korean_gsd/ko_gsd-ud-train.conllu"),
        "english/books": [text for book in books for text in book],
        "english/books_lower": [text.lower() for book in books[1::2] for text in book],
        "english/sst2_train": [line[2:] for line in lines(data / "sst2_en/stsa.binary.train") if line],
        "english/tweets_train": tagged(data / "wnut17_en/wnut17train.conll"),
        "english/treebank_train": sentences(data / "ud_english_ewt/en_ewt-ud-train.conllu"),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    for name, found in texts(given.data).items():
        path = (given.out / name).with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(text.replace("\r", " ") for text in found) + "\n", encoding="utf-8")
        print(f"{path}: {len(found):,} texts, {path.stat().st_size:,} bytes")
