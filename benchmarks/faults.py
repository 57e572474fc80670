"""python benchmarks/faults.py  # everything: ten to twenty minutes on 2 free cores
python benchmarks/faults.py [PART ...] [--quick] [--seed 0] [--only WORDS] [--jobs 3] [--folder /tmp/faults]

Faults on purpose: short runs of every recipe are killed while they write, their files are damaged, their disk fails, their
processes get signals, they get in each other's way, and they are given wrong commands. Each is then resumed and compared with
a run that nothing happened to. It needs Linux, a C compiler (`cc`) and, for disks that are really full, root.

What is done when follows from --seed, which is printed, and a failure is printed with the command that repeats it: nothing
depends on the time or on where --folder is. What has been tried is kept in --folder, for each commit and seed: a campaign that
was stopped goes on where it was, and what failed has failed until there is another commit. The last lines are the table of
docs/reliability.md. The figures of a whole campaign go to benchmarks/results, with the commit and the seed.
"""

import argparse
import errno
import itertools
import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fixtures import faults, tiny_run
from fixtures.faults import FAIL_FROM_NOW_ON, FAIL_ONCE, RECIPES, SAID, SURVIVED, Fault, Whole

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGABRT)
FAILED = "failed"
Cycle = Callable[[], str]


@dataclass(frozen=True)
class Choice:
    """Which cycles of a part are done."""

    quick: bool = False
    seed: int = 0
    only: str = ""


def kills(whole: Whole, choice: Choice) -> Iterator[tuple[str, Cycle]]:
    """Every 26th or so write of each recipe, at its beginning or halfway."""
    for number, recipe in enumerate(RECIPES):
        for place, moment in enumerate(faults.spread(1 if choice.quick else 12, whole.moments(recipe))):
            moment += 120 if choice.quick else (7 * number + choice.seed) % 13
            yield f"{recipe} {moment}", partial(faults.kill, whole, recipe, moment, halfway=place % 3 == 2)


def damages(whole: Whole, choice: Choice) -> Iterator[tuple[str, Cycle]]:
    """Every kind of file with every kind of damage, in the first recipe that has it, and some more in each recipe. Quick
    cycles are some of these."""
    tried: set[str] = set()
    for recipe in RECIPES:
        names = faults.files_to_damage(whole, recipe)
        pairs = list(itertools.product(names, faults.DAMAGES))
        chosen = random.Random(f"{choice.seed} {recipe}").sample(pairs, len(pairs))[: 1 if choice.quick else 4]
        if not choice.quick:
            new = {faults.kind_of(name): name for name in reversed(names) if faults.kind_of(name) not in tried}
            tried |= new.keys()
            chosen += [pair for pair in itertools.product(new.values(), faults.DAMAGES) if pair not in chosen]
        for name, kind in chosen:
            yield f"{recipe} {kind} {name}", partial(faults.damage, whole, recipe, name, kind)


def disks(whole: Whole, choice: Choice) -> Iterator[tuple[str, Cycle]]:
    """Writes and reads that fail, once or from a moment on, and disks that are full."""
    for number, recipe in enumerate(RECIPES):
        for reads in (False, True) if number < 3 or not choice.quick else (False,):
            last = whole.moments(recipe, reads)
            for place, moment in enumerate(faults.spread(1 if choice.quick else 4 - reads, last)):
                error = errno.EIO if reads else ERRORS[(number + place) % len(ERRORS)]
                action = FAIL_FROM_NOW_ON if error == errno.ENOSPC or place % 2 else FAIL_ONCE
                moment += (11 * number + choice.seed) % 17
                about = f"{recipe} {'reads' if reads else 'writes'} {errno.errorcode[error]} {action} {moment}"
                yield about, partial(faults.break_disk, whole, recipe, Fault(action, moment, error, reads=reads))
    sizes = [40] if choice.quick else [40, 80, 120, 200, 300, 400]
    if not faults.can_mount(whole.folder):
        print("Full disks are left out: mounting one needs root.", flush=True)
        sizes = []
    for size in sizes:
        yield f"full at {size} kB", partial(faults.fill_disk, whole, "pretrain_electra", size)


def signals(whole: Whole, choice: Choice) -> Iterator[tuple[str, Cycle]]:
    """At writes of all recipes, to the run or to a process that prepares its data; and stopped for a while."""
    for number, recipe in enumerate(RECIPES):
        last = whole.moments(recipe)
        for place, sent in enumerate(SIGNALS[: 1 + (number < 1)] if choice.quick else SIGNALS):
            moment = 1 + (number * 29 + place * 41 + choice.seed) % last
            yield f"{recipe} {sent.name} {moment}", partial(faults.send, whole, recipe, moment, sent)
    for moment in (100,) if choice.quick else (30, 100, 170, 240):
        yield f"paused {moment}", partial(faults.pause, whole, "pretrain_electra", moment)


def contention(whole: Whole, choice: Choice) -> Iterator[tuple[str, Cycle]]:
    for recipe in list(RECIPES)[: 1 if choice.quick else None]:
        yield f"cache {recipe}", partial(faults.share_cache, whole, recipe)
        yield f"folder {recipe}", partial(faults.share_folder, whole, recipe)


def inputs(whole: Whole, choice: Choice) -> Iterator[tuple[str, Cycle]]:
    """The wrong commands of tests/bad_inputs.tsv, in one process."""
    import test_bad_inputs  # every process of a cycle imports this file, and would import it as well

    outcomes: list = []
    lock = threading.Lock()
    rows = range(len(test_bad_inputs.ROWS))

    def judge(number: int) -> str:
        with lock:
            if not outcomes:
                with tempfile.TemporaryDirectory(dir=whole.folder) as name:
                    ended = tiny_run.start(Path(name), test_bad_inputs.run_rows, name).wait(1800)
                    if ended.code:
                        raise faults.Failed(ended.err)
                    outcomes.extend(json.loads(Path(name, "outcomes.json").read_text()))
        code, printed, _, untouched = outcomes[number]
        words = test_bad_inputs.ROWS[number][2].split(" | ")
        if code != 2 or "Traceback" in printed or not untouched or not all(word in printed for word in words):
            raise faults.Failed(f"{test_bad_inputs.ROWS[number]}: {code} {printed[-500:]}")
        return SAID

    for number in rows if not choice.quick else ():
        yield " ".join(test_bad_inputs.ROWS[number][:2]), partial(judge, number)


PARTS = {  # what it is called in the table
    "kills": (kills, "kills at writes, all recipes"),
    "damages": (damages, "damaged, cut, missing files of runs and caches"),
    "disks": (disks, "disks that fail or are full"),
    "signals": (signals, "other signals, at writes"),
    "contention": (contention, "two runs at once, same cache or same folder"),
    "inputs": (inputs, "wrong commands"),
}


class Journal:
    """What came of each cycle, a line of JSON each; a later line replaces an earlier one."""

    def __init__(self, path: Path):
        self.path, self.lock = path, threading.Lock()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.outcomes: dict[tuple[str, str], str] = {
            (part, about): what for part, about, what in map(json.loads, lines)
        }

    def write(self, part: str, about: str, what: str) -> None:
        with self.lock, open(self.path, "a", encoding="utf-8") as file:
            self.outcomes[part, about] = what
            file.write(json.dumps([part, about, what]) + "\n")

    def counts(self, part: str) -> Counter:
        kinds = [what for (name, _), what in self.outcomes.items() if name == part]
        return Counter(what if what in (SURVIVED, SAID) else FAILED for what in kinds)


def run_part(journal: Journal, part: str, cycles: list[tuple[str, Cycle]], choice: Choice, jobs: int) -> None:
    def do(about: str, cycle: Cycle) -> None:
        try:
            what = cycle()
        except faults.Failed as error:
            what = f"{FAILED}: {error}"
        except Exception:
            what = f"{FAILED}: {traceback.format_exc()}"
        journal.write(part, about, what)
        print(f"{time.strftime('%H:%M:%S')} {part} {about}: {what}", flush=True)
        if what.startswith(FAILED):
            options = ["--quick"] if choice.quick else []
            words = ["python", "benchmarks/faults.py", part, *options, "--seed", str(choice.seed), "--only", about]
            print(f"To repeat it: {shlex.join(words)}", flush=True)

    wanted = [(about, cycle) for about, cycle in cycles if choice.only in about]
    left = [(about, cycle) for about, cycle in wanted if choice.only or (part, about) not in journal.outcomes]
    start = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: do(*one), left))
    print(f"{part}: {len(left)} cycles in {(time.monotonic() - start) / 60:.1f} minutes", flush=True)


def commit() -> str:
    words = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "no commit"


def rows(journal: Journal, parts: list[str], **made_by) -> list[dict]:
    found = []
    for part in parts:
        counts = journal.counts(part)
        if total := counts.total():
            figures = {"tried": total, "survived": counts[SURVIVED], "said": counts[SAID], "failed": counts[FAILED]}
            command = f"python benchmarks/faults.py {part}"
            found.append({"what": PARTS[part][1], "command": command, **made_by, "figures": figures})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a few cycles of each part, and nothing is kept")
    parser.add_argument("--seed", type=int, default=0, help="shifts the moments, chooses the files that are damaged")
    parser.add_argument("--only", default="", help="only cycles whose name, as it is printed, contains these words")
    parser.add_argument("--jobs", type=int, default=3, help="cycles at the same time: one more than there are cores")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "faults"))
    given = parser.parse_args()
    parts = given.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}")
    choice = Choice(given.quick, given.seed, given.only)
    made_by = {"commit": commit(), "seed": given.seed}
    print(f"seed {given.seed}, commit {made_by['commit']}", flush=True)
    folder = given.folder / "{commit}-{seed}".format(**made_by)
    if given.quick:
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
    whole = Whole(folder, faults.prepare(folder))
    journal = Journal(folder / ("repeated.jsonl" if given.only else "journal.jsonl"))
    for part in parts:
        run_part(journal, part, list(PARTS[part][0](whole, choice)), choice, given.jobs)
    table = rows(journal, list(PARTS), **made_by)
    for row in table:
        print("  ".join(f"{value:>10}" for value in row["figures"].values()), " ", row["what"])
    failed = sum(row["figures"]["failed"] for row in table)
    if given.quick:
        shutil.rmtree(folder)
    elif not (given.only or given.parts):
        path = ROOT / "benchmarks" / "results" / "faults.all.json"
        path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({"tried": sum(row["figures"]["tried"] for row in table), "failed": failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
