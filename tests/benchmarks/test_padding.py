"""How full batches are: by hand, and of a recipe's own batches."""

import json
import subprocess
import sys

from fixtures.labelled import write_table
from fixtures.tiny_run import ROOT


def test_real_tokens_of_a_recipe(tmp_path):
    """30 texts of one length and 2 of another, in batches of 32: all of the long ones' places are padded in the others."""
    rows = [("나는 책을 읽는다", "a")] * 30 + [("나는 어제 책을 읽는다", "b")] * 2
    data = write_table(tmp_path / "train.tsv", rows, ("text", "label"))
    command = [sys.executable, ROOT / "benchmarks" / "padding.py", "finetune-classifier", "--train_file", data]
    command += ["--validation_file", data, "--vocab_size", "300", "--tokenizer_model", "bytes", "--init", "random"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    long = found["longest"]
    short = long - len(" 어제".encode())  # a token is a byte
    assert found["real_tokens"] == round((30 * short + 2 * long) / (32 * long), 3)
    assert (found["samples"], found["batches"]) == (32, 1)
