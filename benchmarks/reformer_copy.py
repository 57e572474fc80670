"""python benchmarks/reformer_copy.py [--quick]

The copy task of the Reformer paper (section 5, table 2): sequences 0w0w with random w; the second w is to be predicted. A model
of LSH layers only is trained with 4 hashes and evaluated with 8, 4, 2 and 1. The paper's are 1,024 tokens long, here 256; its
chunks of 32 tokens are a small part of them, so that hashing has to find the place to copy from. The last line is JSON.
"""

import argparse
import json
import os
import time

import torch
from torch import Tensor

from hf_tiny import HfTinyReformerConfig, HfTinyReformerForCausalLM

SYMBOLS = 127
PAPER = {8: 100.0, 4: 99.9, 2: 99.4, 1: 91.9}  # percent, trained with 4 hashes
TRAINED = 4


def sequences(count: int, length: int, seed: int) -> Tensor:
    """(count, length): 0w0w with the symbols 1 ... SYMBOLS."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, SYMBOLS + 1, (count, length // 2 - 1), generator=generator)
    return torch.cat((torch.zeros(count, 1, dtype=torch.long), words), dim=1).repeat(1, 2)


def build(length: int, layers: int, centred: bool) -> HfTinyReformerForCausalLM:
    """The paper's sizes: one layer, width and feed-forward 256, 4 heads. A place has an embedding of its own."""
    config = HfTinyReformerConfig(
        vocab_size=SYMBOLS + 1, hidden_size=512, attn_layers=["lsh"] * layers, num_attention_heads=4,
        intermediate_size=256, axial_pos_shape=[length, 1], lsh_attn_chunk_length=32, num_hashes=TRAINED, hash_centred_keys=centred,
        hidden_dropout_prob=0.0, initializer_range=0.05, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return HfTinyReformerForCausalLM(config)


def loss_of(model: HfTinyReformerForCausalLM, ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[:, : ids.shape[1] // 2 + 1] = -100  # nothing says what the first w is
    return model(input_ids=ids, labels=labels).loss


@torch.no_grad()
def accuracy(model: HfTinyReformerForCausalLM, ids: Tensor, num_hashes: int) -> float:
    """Of the tokens of the second w, each predicted from all that is before it."""
    model.eval()
    half = ids.shape[1] // 2
    right = [
        model(input_ids=part, num_hashes=num_hashes).logits[:, half:-1].argmax(-1) == part[:, half + 1 :]
        for part in ids.split(16)
    ]
    model.train()
    return torch.cat(right).double().mean().item()


def train(model: HfTinyReformerForCausalLM, arguments: argparse.Namespace, held_out: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.0, fused=True)
    begun = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * min(step / 200, 1 - (step - 1) / arguments.steps)
        loss = loss_of(model, sequences(arguments.batch_size, arguments.length, seed=step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 250 == 0 or step == arguments.steps:
            found = accuracy(model, held_out[:32], TRAINED)
            seconds = time.perf_counter() - begun
            print(f"step {step:,}: loss {loss.item():.4f}, accuracy {found:.4f}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps: a check, not a measurement")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--hash_centred_keys", type=lambda text: text == "True", default=True)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.batch_size = 20, 4
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = build(arguments.length, arguments.layers, arguments.hash_centred_keys).train()
    held_out = sequences(32 if arguments.quick else 256, arguments.length, seed=2**40)
    train(model, arguments, held_out)
    found = {hashes: round(100 * accuracy(model, held_out, hashes), 2) for hashes in PAPER}
    print(f"\n{'hashes':>8}{'here, %':>10}{'paper, %':>10}")
    for hashes, value in found.items():
        print(f"{hashes:>8}{value:>10.2f}{PAPER[hashes]:>10.1f}")
    settings = {name: value for name, value in vars(arguments).items() if name != "quick"}
    print(json.dumps({"copy_accuracy": found, "paper": PAPER, "trained_with": TRAINED, **settings}))


if __name__ == "__main__":
    main()
