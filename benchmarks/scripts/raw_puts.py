"""The floor of saving to a store: bare `put_object` of files by several processes at once."""

from __future__ import annotations

import argparse
import os
import time
from multiprocessing import get_context
from urllib.parse import urlsplit

from measured import tell
from minio import Minio

MB = 10**6


def puts(client_number: int, path: str, count: int) -> None:
    client = make_client()
    for number in range(count):
        client.fput_object(
            options.bucket, f"raw/{client_number}/{number}", path, part_size=16 * 2**20
        )


def make_client() -> Minio:
    url = urlsplit(options.endpoint)
    return Minio(
        endpoint=url.netloc,
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        secure=url.scheme == "https",
        region="us-east-1",
    )


parser = argparse.ArgumentParser()
parser.add_argument("--endpoint", required=True)
parser.add_argument("--bucket", required=True)
parser.add_argument("--folder", required=True, help="for the file that is put")
parser.add_argument("--clients", type=int, default=4)
parser.add_argument("--puts", type=int, default=20)
parser.add_argument("--mb", type=int, default=10)
options = parser.parse_args()

if __name__ == "__main__":
    path = os.path.join(options.folder, "raw.bin")
    with open(path, "wb") as file:
        file.write(os.urandom(options.mb * MB))
    processes = get_context("fork")
    began = time.time()
    children = [
        processes.Process(target=puts, args=(number, path, options.puts))
        for number in range(options.clients)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    took = time.time() - began
    os.unlink(path)
    assert all(child.exitcode == 0 for child in children)
    tell({"seconds": took})
