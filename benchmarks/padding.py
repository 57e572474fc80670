"""How many of the tokens in the batches of a fine-tuning are real, and not padding.

python benchmarks/padding.py finetune-seq2seq --train_file train.tsv  # a recipe and its flags, as for hf-tiny
python benchmarks/padding.py --results captions "English to German, captions" finetune-seq2seq --train_file train.en train.de ...

It cuts the batches of the first epoch and trains nothing. The last line is JSON.
"""

import argparse
import json
import shlex
import tempfile

from ablate import load_recipe
from finetune import real_share
from render import write

from hf_tiny.arguments import parse
from hf_tiny.tasks import Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", nargs=2, metavar=("NAME", "WHAT"), help="keep the figures as padding.NAME.json")
    parser.add_argument("verb")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    module = load_recipe(given.verb.replace("-", "_"))
    (task_class,) = (one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Task))
    with tempfile.TemporaryDirectory() as folder:
        task = task_class(parse(module.Recipe, [*given.flags, "--output_dir", folder]))
        splits = task.splits()
        features = task.start(splits)
        task.prepare()
        batches = task.batches(features["train"], splits["train"], training=True)
        longest = int(batches.lengths.sum(1).max())
        found = {"real_tokens": round(real_share(batches), 3), "batches": len(batches), "samples": len(batches.data)}
        found |= {"most_samples": batches.max_samples, "most_tokens": batches.max_tokens, "longest": longest}
    if given.results:
        name, what = given.results
        command = shlex.join(["python", "benchmarks/padding.py", given.verb, *given.flags])
        write(f"padding.{name}", {"what": what, "command": command, "seeds": 1, "figures": found})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
