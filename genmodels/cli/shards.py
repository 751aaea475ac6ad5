"""`genmodels shards`: a data set written as tar shards, for training on more than fits in memory."""

from __future__ import annotations

from pathlib import Path

from genmodels.cli.schema import Schema
from genmodels.core.errors import InputError, at_least
from genmodels.core.files import typed
from genmodels.data.base import data_root
from genmodels.data.shard_writer import write_shards
from genmodels.models.build import build


def run(*, data: dict, out: str, items: int = 5000, progress: bool = True, trust: list[str] | None = None) -> None:
    """Write a data set as tar shards in WebDataset's format, which data=shards reads.

    The same command resumes where a killed one stopped.

    Arguments:
        data: the data set as in training, with its sizes and splits: data=image_folder data.root=photos data.size=64.
        out: the folder of the shards; copy it to a server when it is complete.
        items: items per shard.
        progress: show a progress bar.
        trust: further packages whose classes the configuration may name.
    """
    at_least(1, items=items)
    if "://" in out:
        raise InputError(f"out={out}: shards are written to a folder of this machine; copy them to the server then, "
                         "for example with aws s3 sync or gsutil rsync")
    if strange := [mark for mark in ("*", "::", "$") if mark in out]:
        raise InputError(f"out={out}: data.root could not name this folder, because of {strange[0]}")
    if out.endswith(".tar"):
        raise InputError(f"out={out} is a folder of shards: give it another ending than .tar")
    module = build(data, trust=trust or []).prepare()
    whole = Schema("genmodels.cli.shards.run", trust=trust or []).complete({"data": data})["data"]
    # What changes nothing in an item may differ when the command is repeated.
    source = {key: value for key, value in whole.items() if key not in ("batch_size", "num_workers", "flip", "cache")}
    folder = Path(data_root(out))
    record = write_shards(module, folder, items, source, progress)
    size = sum(one["bytes"] for one in record["shards"].values())
    counts = ", ".join(f"{count:,} {split}" for split, count in record["items"].items())
    print(f"{len(record['shards'])} shards in {folder}: {counts}, {size / 1e6:,.1f} MB")
    model = "" if module.spec.text is None else "model=glow_tts "
    print(f"train:    genmodels train {model}data=shards {typed('data.root', folder)}")
