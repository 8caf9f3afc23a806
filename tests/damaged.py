"""Damaged checkpoints of a run: flipped bits and truncated files."""


def make_two(folder):
    """Write two checkpoints of a few tensors; returns the newer one."""
    import torch

    from regard.training import store

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "weight": torch.randn(7, 5, generator=generator),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "step": torch.tensor(12.0),
        "random": torch.randint(256, (99,), generator=generator, dtype=torch.uint8),
    }
    for step in (5, 10):
        path = store.save(folder, step, tensors, {"step": step, "best": {"loss": 0.25}}, keep=2)
    return path


def noticed(path):
    """Whether the older checkpoint is chosen, with a sentence that names the damaged one."""
    from regard.training import store

    newest, skipped = store.newest(path.parent)
    return newest is not None and newest.name == "step-00000005" and len(skipped) == 1 and str(path) in skipped[0]


def flips(path, count, rng):
    """Flip random bits, one at a time; yields where it was and whether it was noticed."""
    files = sorted(path.iterdir())
    for number in range(count):
        file = files[number % len(files)]
        good = file.read_bytes()
        bit = rng.randrange(8 * len(good))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        yield f"{file.name}, bit {bit}", noticed(path)
        file.write_bytes(good)


def truncations(path, count, rng):
    """Truncate files to very few bytes, to all but one, and to random sizes; yields like `flips`."""
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for size in {0, 1, 7, 8, 9, len(good) - 1, *(rng.randrange(len(good)) for _ in range(count))}:
            file.write_bytes(good[:size])
            yield f"{file.name}, {size} bytes of {len(good)}", noticed(path)
            file.write_bytes(good)
