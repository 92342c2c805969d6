"""One epoch of data by one library: `python data_readers.py READER SHAPE DIRECTORY [prepare]`.

The last line of the output is a JSON object with the number of samples, the seconds to the first
batch (imports come before) and those of the epoch, and the processor time of all of it. Each
library reads the form that it is made for. BENCH_BUCKET names a server of objects that has the
files of the directory: then they are read from there. BENCH_SECONDS ends an epoch of slow libraries
earlier.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = {"rows": 256, "images": 32, "tokens": 32}
# Rows and tokens are read by the process that trains; images are decoded by two others, except
# where a library has threads for it.
WORKERS = {"rows": 0, "images": 2, "tokens": 0}
COLUMNS = [f"x{n}" for n in range(6)] + ["id", "label"]
# litdata's `optimize` wants functions that its processes can import.
DIRECTORY = Path(sys.argv[3]) if len(sys.argv) > 3 else Path()
# The address of a server, if the files are read from a bucket.
SERVER = os.environ.get("BENCH_BUCKET", "")
# Libraries that keep files on the disk keep them here.
KEPT = Path(os.environ.get("BENCH_KEPT", "kept")).absolute()


def files_of(form: str) -> str:
    """Return where the files of a form are read from."""
    return f"s3://bucket/{form}" if SERVER else str(DIRECTORY / form)


def table_of(shape: str) -> Any:
    """Return all rows or blocks of tokens, which were written to Parquet before."""
    import pyarrow.parquet as pq

    return pq.read_table(DIRECTORY / "parquet")


def samples_of(shape: str) -> Iterable[dict[str, Any]]:
    """Yield every sample as a writer of other forms wants it."""
    if shape == "images":
        for path in sorted((DIRECTORY / "folders").rglob("*.jpg")):
            yield {"image": path.read_bytes(), "label": int(path.parent.name)}
        return
    # Not every library's environment has what reads Parquet.
    arrays = {path.stem: np.load(path) for path in sorted((DIRECTORY / "arrays").iterdir())}
    values = [a.tolist() if a.ndim == 1 else a for a in arrays.values()]
    for row in zip(*values, strict=True):
        yield dict(zip(arrays, row, strict=True))


# ---- this library ---------------------------------------------------------------------------


def paceline(shape: str) -> Any:
    """Read Parquet files, and images in folders; those on a server in tar files."""
    from paceline import data

    if shape == "images":
        # One request for each image would be the speed of the server.
        files = data.read(files_of("tar")) if SERVER else data.read_images(files_of("folders"))
    else:
        files = data.read(files_of("parquet"), disk_bytes=1 << 32 if SERVER else 0)
    # Threads decode images.
    return files.shuffle().to_torch(BATCH[shape])


# ---- others ---------------------------------------------------------------------------------


def torch_loader(shape: str) -> Any:
    """Read all into memory at first, as far as it is no image."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    if shape == "images":
        from torchvision.datasets import ImageFolder

        images = ImageFolder(str(DIRECTORY / "folders"), transform=lambda image: np.array(image))
        return DataLoader(images, BATCH[shape], shuffle=True, num_workers=WORKERS[shape])
    table = table_of(shape)
    tensors = []
    for column in table.columns:
        chunk = column.combine_chunks()
        if shape == "tokens":
            values = chunk.flatten().to_numpy().reshape(len(chunk), -1)
        else:
            values = chunk.to_numpy()
        tensors.append(torch.from_numpy(values.copy()))
    return DataLoader(TensorDataset(*tensors), BATCH[shape], shuffle=True)


_PARQUET = "parquet", "parquet", "parquet"


def hugging_face(shape: str) -> Any:
    """Stream Parquet files or folders."""
    import datasets
    from torch.utils.data import DataLoader

    kind, form, suffix = ("webdataset", "tar", "tar") if shape == "images" else _PARQUET
    if shape == "images" and not SERVER:
        stream = datasets.load_dataset(
            "imagefolder", data_dir=str(DIRECTORY / "folders"), split="train", streaming=True
        )
    else:
        names = sorted(each.name for each in (DIRECTORY / form).glob(f"*.{suffix}"))
        stream = datasets.load_dataset(
            kind, data_files=[f"{files_of(form)}/{name}" for name in names], split="train",
            streaming=True,
            storage_options={"client_kwargs": {"endpoint_url": SERVER}} if SERVER else None,
        )  # fmt: skip
    stream = stream.shuffle(buffer_size=1000 if shape == "images" else 10_000)
    loader = stream.with_format("torch")
    return DataLoader(loader, BATCH[shape], num_workers=min(WORKERS[shape], stream.num_shards))


def prepare_litdata(shape: str) -> None:
    """Write litdata's chunks."""
    import litdata

    litdata.optimize(
        fn=_whole_sample, inputs=[0], output_dir=str(DIRECTORY / "litdata"), num_workers=1,
        chunk_bytes="16MB",
    )  # fmt: skip


def _whole_sample(_: int) -> Iterable[Any]:
    yield from samples_of(DIRECTORY.name)


def litdata(shape: str) -> Any:
    """Read litdata's chunks."""
    import litdata as library
    import obstore.store

    if SERVER:
        # It has no option that lets its client read from a server without encryption.
        make = obstore.store.S3Store
        obstore.store.S3Store = lambda *given, client_options=None, **more: make(
            *given, client_options={**(client_options or {}), "allow_http": True}, **more
        )
    stream = library.StreamingDataset(
        files_of("litdata"), cache_dir=str(KEPT / "litdata") if SERVER else None, shuffle=True,
        drop_last=False, transform=_DECODE[shape],
        storage_options={"endpoint_url": SERVER} if SERVER else None,
    )  # fmt: skip
    return library.StreamingDataLoader(stream, batch_size=BATCH[shape], num_workers=WORKERS[shape])


def prepare_mosaic(shape: str) -> None:
    """Write shards of MosaicML Streaming."""
    from streaming import MDSWriter

    kinds = {
        "images": {"image": "bytes", "label": "int"},
        "tokens": {"tokens": "ndarray:int32"},
        "rows": dict.fromkeys(COLUMNS[:6], "float32") | {"id": "int64", "label": "int32"},
    }[shape]
    with MDSWriter(out=str(DIRECTORY / "mosaic"), columns=kinds, size_limit=1 << 24) as writer:
        for sample in samples_of(shape):
            writer.write(sample)


def mosaic(shape: str) -> Any:
    """Read shards of MosaicML Streaming."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    decode = _DECODE[shape]

    class Decoded(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return sample if decode is None else decode(sample)

    os.environ["S3_ENDPOINT_URL"] = SERVER
    stream = Decoded(
        remote=files_of("mosaic") if SERVER else None,
        local=str((KEPT if SERVER else DIRECTORY) / "mosaic"), shuffle=True,
        batch_size=BATCH[shape],
    )  # fmt: skip
    return DataLoader(stream, BATCH[shape], num_workers=WORKERS[shape])


def prepare_webdataset(shape: str) -> None:
    """Write tar files."""
    import webdataset

    (DIRECTORY / "tar").mkdir()
    with webdataset.ShardWriter(str(DIRECTORY / "tar" / "%05d.tar"), maxcount=250) as writer:
        for number, sample in enumerate(samples_of(shape)):
            key = f"{number:08}"
            if shape == "images":
                writer.write({"__key__": key, "jpg": sample["image"], "cls": sample["label"]})
            else:
                writer.write({"__key__": key, "npy": sample["tokens"]})


def webdataset(shape: str) -> Any:
    """Read tar files."""
    import webdataset as library

    shards = sorted(map(str, (DIRECTORY / "tar").glob("*.tar")))
    if SERVER:
        shards = [f"pipe:curl -s {SERVER}/bucket/tar/{Path(shard).name}" for shard in shards]
    stream = library.WebDataset(shards, shardshuffle=100, empty_check=False).shuffle(1000)
    if shape == "images":
        stream = stream.decode("rgb8").to_tuple("jpg", "cls")
    else:
        stream = stream.decode().to_tuple("npy")
    batches = stream.batched(BATCH[shape])
    return library.WebLoader(batches, batch_size=None, num_workers=WORKERS[shape])


def ray(shape: str) -> Any:
    """Read Parquet files or images by Ray Data."""
    import ray as library

    # Not a cluster that happens to run on this machine.
    library.init("local", num_cpus=2, logging_level="error", include_dashboard=False)
    library.data.DataContext.get_current().enable_progress_bars = False
    if shape == "images":
        rows = library.data.read_images(str(DIRECTORY / "folders"), mode="RGB")
    else:
        rows = library.data.read_parquet(str(DIRECTORY / "parquet"))
    buffer = 200 if shape == "images" else 10_000
    return rows.iter_torch_batches(batch_size=BATCH[shape], local_shuffle_buffer_size=buffer)


def _decode_image(sample: Any) -> Any:
    import io

    from PIL import Image

    image = np.asarray(Image.open(io.BytesIO(sample["image"])).convert("RGB"))
    return {"image": image.copy(), "label": sample["label"]}


_DECODE: dict[str, Any] = {"rows": None, "images": _decode_image, "tokens": None}


def _repair_torchvision() -> None:
    """Let torchvision be imported where its own library does not fit torch; none of it is used."""
    import torch

    register = torch.library.register_fake

    def register_ours(name: Any, *arguments: Any, **options: Any) -> Any:
        if str(name).startswith("torchvision::"):
            return lambda function: function
        return register(name, *arguments, **options)

    torch.library.register_fake = register_ours


def count(batch: Any) -> int:
    """Return the number of samples of a batch."""
    while not hasattr(batch, "shape"):
        if isinstance(batch, dict):
            # The key of a sample is a text.
            batch = next(value for value in batch.values() if hasattr(value, "shape"))
        else:
            batch = batch[0]
    return len(batch)


def main() -> None:
    """Prepare a form, or read one epoch."""
    reader, shape = sys.argv[1:3]
    if reader in ("mosaic", "torch_loader"):
        _repair_torchvision()
    if sys.argv[4:] == ["prepare"]:
        prepare = globals().get(f"prepare_{reader}")
        if prepare is not None:
            prepare(shape)
        return
    modules = {"torch_loader": "torch", "hugging_face": "datasets", "mosaic": "streaming"}
    importlib.import_module("torch.utils.data")
    importlib.import_module(modules.get(reader, reader))
    if reader == "paceline":
        importlib.import_module("paceline.data._table_formats")
    cpu_before_s = time.process_time()
    began = time.perf_counter()
    batches = iter(globals()[reader](shape))
    total = count(next(batches))
    first_s = time.perf_counter() - began
    first = total
    longest_s = float(os.environ.get("BENCH_SECONDS", "inf"))
    for batch in batches:
        total += count(batch)
        if time.perf_counter() - began > longest_s:
            break
    epoch_s = time.perf_counter() - began
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(each.ru_utime + each.ru_stime for each in used) - cpu_before_s
    print(
        json.dumps({
            "samples": total, "first_s": first_s, "epoch_s": epoch_s, "cpu_s": cpu_s,
            "later": total - first,
        })
    )  # fmt: skip
    sys.stdout.flush()
    # Some readers have threads that wait for their whole epoch.
    os._exit(0)


if __name__ == "__main__":
    main()
